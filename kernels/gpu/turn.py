"""The tower's rotation: queries and keys of a fused projection, every head over its whole width, by halves."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import jit, launchable, power_of_two, tl


def turn(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """qkv bf16 [P, 3, heads, d], contiguous; cos, sin float32 [P, d / 2] -> q, k bf16 [P, heads, d], rotated in float32
    and rounded once."""
    P, _, heads, d = qkv.shape
    out = qkv.new_empty(2, P, heads, d)
    if not launchable(qkv):
        x, (c, s) = qkv[:, :2].double().movedim(1, 0), (part.double()[:, None] for part in (cos, sin))
        a, b = x.chunk(2, -1)
        out.copy_(torch.cat([a * c - b * s, b * c + a * s], -1))
    elif P:
        half = power_of_two(d // 2)
        _turn[(P, 2)](qkv, cos, sin, out, P, heads, d // 2, power_of_two(heads), half, num_warps=4)
    return out[0], out[1]


@jit(do_not_specialize=["P"])
def _turn(qkv, cos, sin, out, P, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """A program a row of queries or keys."""
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h, i = tl.arange(0, HEADS), tl.arange(0, HALF)
    there = (h < heads)[:, None] & (i < half)[None, :]
    c = tl.load(cos + row * half + i, mask=i < half, other=0.0)[None, :]
    s = tl.load(sin + row * half + i, mask=i < half, other=0.0)[None, :]
    place = h[:, None] * 2 * half + i[None, :]
    x = qkv + (row * 3 + which) * heads * 2 * half + place
    a = tl.load(x, mask=there, other=0.0).to(tl.float32)
    b = tl.load(x + half, mask=there, other=0.0).to(tl.float32)
    to = out + (which.to(tl.int64) * P + row) * heads * 2 * half + place
    tl.store(to, (a * c - b * s).to(tl.bfloat16), mask=there)
    tl.store(to + half, (b * c + a * s).to(tl.bfloat16), mask=there)
