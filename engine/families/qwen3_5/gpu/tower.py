"""The vision tower in bf16: patches of one or several pictures to their feature rows, the same for each picture
whichever others run beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from tfmagic.kernels.gpu.linear import linear
from tfmagic.kernels.gpu.norm import layer
from tfmagic.kernels.gpu.tower import tower_attention
from tfmagic.kernels.gpu.turn import turn

from ..config import Vision
from ..tower import EPS, places, position_rows, rotary_tables
from .weights import Block, VisionWeights

Grid = tuple[int, int, int]
MOST_PATCHES = 1 << 14
"""Patches a frame may have."""


def encode(patches: list[Tensor], grids: list[Grid], v: Vision, w: VisionWeights) -> list[Tensor]:
    """patches float32 [P, C·T·p·p] by merge cells of each picture, grids (frames, rows, columns) in
    patches -> bf16 [P / merge², out] of each."""
    for _, height, width in grids:
        if height * width > MOST_PATCHES:
            raise ValueError(f"a picture of {height * width:,} patches; at most {MOST_PATCHES:,} are encoded")
    device = w.table.device
    lengths = [height * width for frames, height, width in grids for _ in range(frames)]
    frames = torch.tensor(lengths, dtype=torch.int32).to(device, non_blocking=True)
    laid = [laid_out(grid, v, w) for grid in grids]
    cos, sin = (torch.cat([one[i] for one in laid]) for i in (1, 2))
    x = linear(torch.cat([one.to(torch.bfloat16).to(device) for one in patches]), w.patch)
    x += torch.cat([one[0] for one in laid])
    for block in w.blocks:
        x = linear(mix(x, block, cos, sin, frames, v), block.proj, residual=x, out=x)
        h = linear(layer(x, *block.norm2, EPS), block.fc1, activation="gelu_tanh")
        x = linear(h, block.fc2, residual=x, out=x)
    cells = layer(x, *w.norm, EPS).view(-1, v.hidden * v.merge**2)
    rows = linear(linear(cells, w.fc1, activation="gelu"), w.fc2)
    return list(rows.split([frames * height * width // v.merge**2 for frames, height, width in grids]))


def laid_out(grid: Grid, v: Vision, w: VisionWeights) -> tuple[Tensor, Tensor, Tensor]:
    """A picture's position rows bf16 [P, Dv], and cos, sin float32 [P, dh / 2] of its patches."""
    frames, height, width = grid
    row, column = places(height, width, v.merge, w.table.device)
    rows = position_rows(w.table, row, column, height, width).to(torch.bfloat16)
    cos, sin = (part.chunk(2, -1)[0].contiguous() for part in rotary_tables(row, column, v.hidden // v.heads))
    return rows.repeat(frames, 1), cos.repeat(frames, 1), sin.repeat(frames, 1)


def mix(x: Tensor, block: Block, cos: Tensor, sin: Tensor, frames: Tensor, v: Vision) -> Tensor:
    """Self-attention among the patches of each frame."""
    qkv = linear(layer(x, *block.norm1, EPS), block.qkv).view(len(x), 3, v.heads, -1)
    return tower_attention(*turn(qkv, cos, sin), qkv[:, 2], frames).flatten(1)
