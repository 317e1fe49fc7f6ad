"""Image preprocessing of Qwen3.5: resize to whole cells, normalise, cut into patches in the tower's order.

The same bits as transformers' PIL backend (`image_processing_pil_qwen2_vl.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image

from tfmagic.errors import Refusal

AGAIN = "Download the model again."
AT_ONCE = 512
"""Patches, or one row of cells, that a thread makes at once: about 1.5 MB before they are repeated."""
THREADS = ThreadPoolExecutor(min(16, os.cpu_count() or 1), "patches")
"""For tasks that wait for no other."""


@dataclass(frozen=True)
class Preprocessor:
    """The options of a checkpoint's image processor; the defaults are those of the released checkpoints."""

    patch: int = 16
    """Pixels a side of a patch."""
    frames: int = 2
    """Frames a patch; a still picture is repeated."""
    merge: int = 2
    """Patches a side of the cell that becomes one token."""
    least: int = 65536
    most: int = 16777216
    """Pixels of the resized picture."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    scale: float = 1 / 255

    @classmethod
    def read(cls, options: Mapping[str, Any], vision: Mapping[str, Any], tokens: int = 4096) -> Preprocessor:
        """From preprocessor_config.json and config.json's vision_config. Raises Refusal for what cannot be meant.

        `size` counts pixels, not sides, whatever its keys say; `min_pixels` and `max_pixels` are its old spelling.
        A picture over `tokens` tokens is made smaller than the checkpoint itself would ask.
        """
        size = options.get("size") or {}
        try:
            made = cls(
                patch=int(options.get("patch_size", vision.get("patch_size", cls.patch))),
                frames=int(options.get("temporal_patch_size", vision.get("temporal_patch_size", cls.frames))),
                merge=int(options.get("merge_size", vision.get("spatial_merge_size", cls.merge))),
                least=int(size.get("shortest_edge") or options.get("min_pixels") or cls.least),
                most=int(size.get("longest_edge") or options.get("max_pixels") or cls.most),
                mean=tuple(map(float, options.get("image_mean", cls.mean))),
                std=tuple(map(float, options.get("image_std", cls.std))),
                scale=float(options.get("rescale_factor", cls.scale)),
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise Refusal(f"The model's preprocessor_config.json is malformed: {error}.", AGAIN) from None
        cell = (made.patch * made.merge) ** 2
        sound = min(made.patch, made.frames, made.merge, made.least) >= 1 and made.most >= max(cell, made.least)
        if not sound or len(made.mean) != 3 or len(made.std) != 3 or 0 in made.std:
            raise Refusal("The model's preprocessor_config.json has impossible values.", AGAIN)
        return replace(made, most=max(made.least, min(made.most, tokens * cell)))

    @property
    def fingerprint(self) -> str:
        """Every option, and the version of the resizer, whose bits may differ between releases."""
        return f"qwen3_5 {astuple(self)} pillow {PIL.__version__}"

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing: multiples of patch * merge, between `least` and `most` pixels.

        Raises ValueError when one side is over 200 times the other.
        """
        if max(width, height) > 200 * min(width, height):
            raise ValueError(f"aspect ratio of {width} x {height} over 200")
        unit = self.patch * self.merge
        high, wide = round(height / unit) * unit, round(width / unit) * unit
        if high * wide > self.most:
            shrink = math.sqrt(height * width / self.most)
            high = max(unit, math.floor(height / shrink / unit) * unit)
            wide = max(unit, math.floor(width / shrink / unit) * unit)
        elif high * wide < self.least:
            grow = math.sqrt(self.least / (height * width))
            high = math.ceil(height * grow / unit) * unit
            wide = math.ceil(width * grow / unit) * unit
        return wide, high

    def tokens(self, width: int, height: int) -> int:
        """Prompt rows of a picture of this size."""
        wide, high = self.resized(width, height)
        return wide * high // (self.patch * self.merge) ** 2


def prepare(
    image: Image.Image | np.ndarray, preprocessor: Preprocessor
) -> tuple[torch.Tensor, tuple[int, int, int], int]:
    """An RGB picture, or its pixels uint8 [height, width, 3], as (patches, grid (1, gh, gw), prompt rows).

    The patches are float32 [gh * gw, 3 * frames * patch * patch]. They run cell by cell (merge x merge patches a
    cell), so that each token's patches are consecutive.
    """
    p, pixels = preprocessor, np.asarray(image)
    height, width, _ = pixels.shape
    wide, high = p.resized(width, height)
    planes = pixels.transpose(2, 0, 1)
    if (wide, high) != (width, height):
        planes = np.stack(list(THREADS.map(partial(resized, wide=wide, high=high), planes)))
    gh, gw = high // p.patch, wide // p.patch
    patches = np.empty((gh * gw, 3, p.frames, p.patch**2), np.float32)
    rows = p.merge * max(1, AT_ONCE // (p.merge * gw))  # of patches, whole cells

    def fill(top: int) -> None:
        band = planes[:, top * p.patch : (top + rows) * p.patch]
        normalise(squares(band, p.patch, p.merge), p, patches[top * gw : (top + rows) * gw])

    list(THREADS.map(fill, range(0, gh, rows)))
    return torch.from_numpy(patches.reshape(gh * gw, -1)), (1, gh, gw), gh * gw // p.merge**2


def resized(plane: np.ndarray, wide: int, high: int) -> np.ndarray:
    """One colour, uint8 [height, width] -> [high, wide]: the same bits as of the three together."""
    return np.asarray(Image.fromarray(np.ascontiguousarray(plane)).resize((wide, high), Image.Resampling.BICUBIC))


def squares(planes: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """planes uint8 [3, high, wide] -> [patches, 3, patch * patch], cell by cell. A patch's row, `patch` bytes of one
    colour, is moved as one element: by far faster than byte by byte."""
    _, high, wide = planes.shape
    lines = np.ascontiguousarray(planes).view(np.dtype((np.void, patch)))
    cells = lines.reshape(3, high // (patch * merge), merge, patch, wide // (patch * merge), merge)
    ordered = np.ascontiguousarray(cells.transpose(1, 4, 2, 5, 0, 3))
    return ordered.view(np.uint8).reshape(-1, 3, patch * patch)


def normalise(patches: np.ndarray, p: Preprocessor, out: np.ndarray) -> None:
    """uint8 [patches, 3, n] into float32 [patches, 3, frames, n], with the reference's roundings: uint8 times a double,
    rounded to float32, then normalised in float32."""
    mean, std = (np.array(values, np.float32)[:, None] for values in (p.mean, p.std))
    x = np.multiply(patches, p.scale, out=np.empty(patches.shape, np.float32), dtype=np.float64, casting="unsafe")
    x -= mean
    x /= std
    out[:] = x[:, :, None]
