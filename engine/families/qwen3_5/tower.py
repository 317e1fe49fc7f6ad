"""The vision tower: one image's patches to its feature rows. Images run alone, so no image's bits depend on another."""

from __future__ import annotations

import torch
from torch import Tensor

from tfmagic.kernels import attention, norm, rotary
from tfmagic.kernels.activation import gelu, gelu_tanh
from tfmagic.kernels.linear import linear

from .config import Vision
from .weights import VisionWeights

EPS = 1e-6
THETA = 10000.0
MOST_PATCHES = 1 << 14
"""Patches a frame may have: the attention's grids are cut for so many."""


def encode(patches: Tensor, grid: tuple[int, int, int], v: Vision, w: VisionWeights) -> Tensor:
    """patches [P, C·T·p·p] float32 by merge cells, grid (frames, rows, columns) in patches -> [P / merge², out]."""
    frames, height, width = grid
    if height * width > MOST_PATCHES:
        raise ValueError(f"a picture of {height * width:,} patches; at most {MOST_PATCHES:,} are encoded")
    row, column = places(height, width, v.merge, patches.device)
    x = linear(patches, w.patch) + position_rows(w.table, row, column, height, width).repeat(frames, 1)
    cos, sin = rotary_tables(row, column, v.hidden // v.heads)
    for block in w.blocks:
        x = x + mix(norm.layer(x, *block.norm1, EPS), block, cos, sin, frames, v)
        x = x + linear(gelu_tanh(linear(norm.layer(x, *block.norm2, EPS), block.fc1)), block.fc2)
    cells = norm.layer(x, *w.norm, EPS).view(-1, v.hidden * v.merge**2)
    return linear(gelu(linear(cells, w.fc1)), w.fc2)


def mix(x: Tensor, block, cos: Tensor, sin: Tensor, frames: int, v: Vision) -> Tensor:
    """Self-attention among the patches of one frame."""
    d = v.hidden // v.heads
    bits = attention.Bits(d, MOST_PATCHES)
    outs = []
    for part in linear(x, block.qkv).view(frames, -1, 3, v.heads, d):
        q, k = rotary.rotate(part[:, 0], cos, sin), rotary.rotate(part[:, 1], cos, sin)
        outs.append(attention.attend(q, *attention.prepare(k, part[:, 2], bits), None, bits))
    return linear(torch.cat(outs), block.proj)


def places(height: int, width: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch of a frame, merge cells one after another; int64 [height · width] each."""
    cells = torch.arange(height * width, device=device).view(height // merge, merge, width // merge, merge)
    order = cells.transpose(1, 2).flatten()
    return order // width, order % width


def position_rows(table: Tensor, row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    """The position table [side, side, Dv] at the patches of a height x width frame, bilinear, corners aligned."""
    side = len(table)
    r0, r1, fr = between(row, height, side)
    c0, c1, fc = between(column, width, side)
    top = table[r0, c0] * (1 - fr) * (1 - fc) + table[r0, c1] * (1 - fr) * fc
    return top + table[r1, c0] * fr * (1 - fc) + table[r1, c1] * fr * fc


def between(index: Tensor, n: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two table places around `index` of n, and the share of the second [len, 1]."""
    place = index.float() * (side - 1) / max(n - 1, 1)
    low = place.floor().long()
    return low, (low + 1).clamp(max=side - 1), (place - low)[:, None]


def rotary_tables(row: Tensor, column: Tensor, d: int) -> tuple[Tensor, Tensor]:
    inverse = rotary.frequencies(THETA, d // 2, row.device)
    return rotary.doubled(torch.cat([row.float()[:, None] * inverse, column.float()[:, None] * inverse], -1))
