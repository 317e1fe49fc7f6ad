"""Qwen3.5, 3.6 and 3.8 dense: Gated DeltaNet layers with a full-attention layer every few, and a vision tower."""

from .model import Model

__all__ = ["Model"]
