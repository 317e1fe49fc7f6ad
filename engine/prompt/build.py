"""One request's prompt: rendered, its images laid in, with a position and a cache key for every row."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from tfmagic.errors import Refusal
from tfmagic.protocol import ImageRef, Message, Text

from . import images as pictures
from .images import KNOWN, ImageCache, Limits, PreparedImage
from .text import TextSide


class Preprocessor(Protocol):
    fingerprint: str
    """Names every option that changes the patches of a picture."""

    def tokens(self, width: int, height: int) -> int:
        """Prompt rows of a picture of this size; the same when the sides are swapped."""


class Family(Protocol):
    """What building a prompt asks of a family."""

    image_token_id: int | None
    """The placeholder; None: the model reads no images."""
    preprocessor: Preprocessor | None

    def prepare(self, image: np.ndarray) -> tuple[torch.Tensor, tuple[int, int, int], int]:
        """An RGB picture's patches, grid and prompt rows."""

    def positions(self, ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[torch.Tensor, int]:
        """Positions [3, len(ids)] and what a generated row's index adds to be its position."""


@dataclass
class Prompt:
    """L rows, ready for the prompt pass."""

    ids: list[int]
    key: list[int]
    """`ids` with each image row as a negative 64-bit number made of the image's content and the row within it: two
    prompts agree up to a row exactly when their keys do."""
    images: list[PreparedImage]
    positions: torch.Tensor
    """int64 [3, L]."""
    rope_delta: int = 0
    marks: list[int] = field(default_factory=list)
    """Rows at which another prompt is likely to part from this one, ascending: where the first turn starts (the
    system turn's end) and where the last turn's texts start. A hint; empty when the template does not let them be
    found."""


def build(
    messages: Sequence[Message],
    encoded: Mapping[str, bytes],
    text: TextSide,
    family: Family,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    cache: ImageCache = KNOWN,
) -> Prompt:
    """The prompt of a conversation that ends with a user turn.

    `encoded`: digest → bytes of the images that are not known yet; others may be left out.
    Raises Refusal naming what is wrong, and MissingImages when `encoded` lacks bytes that are needed.
    """
    check(messages, limits)
    refs = [part for message in messages for part in message.parts if isinstance(part, ImageRef)]
    if refs and (family.image_token_id is None or family.preprocessor is None):
        raise Refusal("This model reads no images.", "Leave the image out, or start a model with a vision tower.")
    images = pictures.prepare(refs, encoded, family, limits, cache) if refs else []
    rendered = text.lay_out(messages)
    places = [row for row, id in enumerate(rendered.ids) if id == family.image_token_id]
    if len(places) != len(images):
        problem = f"The model's chat template wrote {len(places)} image places for {len(images)} images."
        raise Refusal(problem, "Use the template that came with the model, or leave the images out.")
    ids, images = expand(rendered.ids, places, images)
    positions, delta = family.positions(ids, images)
    # A mark lies after the images before it, each of which has grown from one row to its tokens.
    marks = [row + sum(image.tokens - 1 for image in images[: bisect_left(places, row)]) for row in rendered.marks]
    return Prompt(ids, key(ids, images), images, positions, delta, marks)


def expand(
    ids: list[int], places: Sequence[int], images: Sequence[PreparedImage]
) -> tuple[list[int], list[PreparedImage]]:
    """`ids` with the placeholder at each place repeated to its image's tokens, and the images with their start row."""
    rows, placed, done = [], [], 0
    for place, image in zip(places, images):
        rows += ids[done:place]
        placed.append(replace(image, start=len(rows)))
        rows += [ids[place]] * image.tokens
        done = place + 1
    return rows + ids[done:], placed


def key(ids: Sequence[int], images: Sequence[PreparedImage]) -> list[int]:
    rows = list(ids)
    for image in images:
        rows[image.start : image.start + image.tokens] = content_rows(image.content, image.tokens)
    return rows


def content_rows(content: bytes, rows: int) -> list[int]:
    """One negative int64 a row of an image, a function of (content, row): no token id, and no other image's row."""
    stream = np.frombuffer(hashlib.shake_256(content).digest(8 * rows), dtype="<i8")
    return (stream | np.int64(-(2**63))).tolist()


def check(messages: Sequence[Message], limits: Limits) -> None:
    """The conversation's form: a system turn at most, then user and assistant in turns, the user's last."""
    if len(messages) > limits.messages:
        fix = f"At most {limits.messages:,} are read: start a new conversation."
        raise Refusal(f"The conversation has {len(messages):,} turns.", fix)
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    for i, message in enumerate(turns):
        if message.role != ("user", "assistant")[i % 2]:
            fix = "After a system turn at most, user and assistant take turns."
            raise Refusal(f"Turn {i + 1} of the conversation is out of order: {message.role}.", fix)
    if len(turns) % 2 == 0:
        raise Refusal("The conversation does not end with a user turn.", "Add the user's message.")
    for message in messages:
        if message.role != "user" and any(isinstance(part, ImageRef) for part in message.parts):
            raise Refusal(f"There is an image in a turn of the {message.role}.", "Put images into user turns.")
        if message.role == "user" and not any(isinstance(p, ImageRef) or p.text.strip() for p in message.parts):
            raise Refusal("The prompt is empty.", "Write something, or add an image.")
    check_text([part.text for message in messages for part in message.parts if isinstance(part, Text)], limits)


def check_text(texts: Sequence[str], limits: Limits) -> None:
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError as error:
        problem = f"The text holds half a character (surrogate U+{ord(error.object[error.start]):04X})."
        raise Refusal(problem, "Decode it with errors='replace' where it was read.") from None
    if size > limits.text_bytes:
        fix = f"At most {limits.text_bytes / 1024:,.0f} KiB are read: shorten it, or start a new conversation."
        raise Refusal(f"The conversation has {size / 1024:,.0f} KiB of text.", fix)
