"""Positions of text and image rows on the three axes: time, height, width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tfmagic.engine.prompt import PreparedImage


def positions(ids: Sequence[int], images: Sequence[PreparedImage], image_token_id: int) -> tuple[torch.Tensor, int]:
    """(int64 [3, len(ids)], delta): a generated row of index s has the position s + delta on every axis.

    Text advances all axes by one a row. An image of h x w tokens stands at one time; its rows count from there down
    and its columns across; the text after it resumes past the longer of the two.
    Raises ValueError when an image's rows are not exactly its placeholders.
    """
    runs, at, done = [], 0, 0
    for image in images:
        end = image.start + image.tokens
        if image.start < done or any(id != image_token_id for id in ids[image.start : end]) or end > len(ids):
            raise ValueError(f"image {image.name} does not lie on its {image.tokens} placeholders")
        runs.append(text_rows(at, image.start - done))
        at += image.start - done
        _, rows, columns = image.grid
        merge = math.isqrt(rows * columns // image.tokens)
        high, wide = rows // merge, columns // merge
        runs.append(at + image_rows(high, wide))
        at, done = at + max(high, wide), end
    if image_token_id in ids[done:]:
        raise ValueError("a placeholder without an image")
    runs.append(text_rows(at, len(ids) - done))
    return torch.cat(runs, dim=1), at - done


def text_rows(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count).expand(3, count)


def image_rows(high: int, wide: int) -> torch.Tensor:
    """[3, high * wide] from 0: (0, row, column)."""
    rows = torch.arange(high).repeat_interleave(wide)
    columns = torch.arange(wide).repeat(high)
    return torch.stack([torch.zeros_like(rows), rows, columns])
