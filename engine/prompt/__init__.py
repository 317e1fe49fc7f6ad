"""From a conversation to the rows that the engine computes: template, tokens, images, positions, cache key."""

from .build import Family, Prompt, build
from .images import ImageCache, Limits, MissingImages, PreparedImage
from .text import TextSide

__all__ = ["Family", "ImageCache", "Limits", "MissingImages", "PreparedImage", "Prompt", "TextSide", "build"]
