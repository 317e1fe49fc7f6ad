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
from .weights import Block, Laid, VisionWeights

Grid = tuple[int, int, int]
MOST_PATCHES = 1 << 14
"""Patches a frame may have."""


def encode(patches: list[Tensor], grids: list[Grid], v: Vision, w: VisionWeights) -> list[Tensor]:
    """patches float32 [P, C·T·p·p] by merge cells of each picture, grids (frames, rows, columns) in
    patches -> bf16 [P / merge², out] of each."""
    for _, height, width in grids:
        if height * width > MOST_PATCHES:
            raise ValueError(f"a picture of {height * width:,} patches; at most {MOST_PATCHES:,} are encoded")
    lengths = [height * width for frames, height, width in grids for _ in range(frames)]
    frames = torch.tensor(lengths, dtype=torch.int32).to(w.table.device, non_blocking=True)
    laid = [laid_out(height, width, v, w) for frames, height, width in grids for _ in range(frames)]
    rows, cos, sin = (part[0] if len(laid) == 1 else torch.cat(part) for part in zip(*laid))
    x = linear(sent(patches, w.table.device), w.patch, residual=rows)
    for block in w.blocks:
        x = linear(mix(x, block, cos, sin, frames, v), block.proj, residual=x, out=x)
        h = linear(layer(x, *block.norm2, EPS), block.fc1, activation="gelu_tanh")
        x = linear(h, block.fc2, residual=x, out=x)
    cells = layer(x, *w.norm, EPS).view(-1, v.hidden * v.merge**2)
    rows = linear(linear(cells, w.fc1, activation="gelu"), w.fc2)
    return list(rows.split([frames * height * width // v.merge**2 for frames, height, width in grids]))


def sent(patches: list[Tensor], device: torch.device) -> Tensor:
    """Patches in bf16 on the device, one picture after another: rounded into pinned memory, from where the copy is
    fast."""
    lengths = [len(one) for one in patches]
    shape = sum(lengths), patches[0].shape[1]
    rounded = torch.empty(shape, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    for to, one in zip(rounded.split(lengths), patches):
        to.copy_(one)
    return rounded.to(device, non_blocking=True)


def laid_out(height: int, width: int, v: Vision, w: VisionWeights) -> Laid:
    """Of a frame's patches: position rows bf16 [P, Dv], and cos, sin float32 [P, dh / 2]. The last sizes' are kept, as
    many as together have no more patches than one frame may."""
    laid = w.laid.pop((height, width), None)
    if laid is None:
        row, column = places(height, width, v.merge, w.table.device)
        rows = position_rows(w.table, row, column, height, width).to(torch.bfloat16)
        laid = rows, *(part.chunk(2, -1)[0].contiguous() for part in rotary_tables(row, column, v.hidden // v.heads))
    w.laid[height, width] = laid
    while sum(high * wide for high, wide in w.laid) > MOST_PATCHES:
        del w.laid[next(iter(w.laid))]
    return laid


def mix(x: Tensor, block: Block, cos: Tensor, sin: Tensor, frames: Tensor, v: Vision) -> Tensor:
    """Self-attention among the patches of each frame."""
    qkv = linear(layer(x, *block.norm1, EPS), block.qkv).view(len(x), 3, v.heads, -1)
    return tower_attention(turn(qkv, cos, sin), frames).flatten(1)
