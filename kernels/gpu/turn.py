"""The tower's rotation: queries and keys of a fused projection, every head over its whole width, by halves."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import cdiv, jit, launchable, tl
from .tower import Split, parts, split


def turn(qkv: Tensor, cos: Tensor, sin: Tensor) -> Split:
    """qkv bf16 [P, 3, heads, d], contiguous; cos, sin float32 [P, d / 2] -> queries and keys, rotated in float32 and
    rounded once, and values, as `tower_attention` takes them."""
    P, _, heads, d = qkv.shape
    if not launchable(qkv):
        x, (c, s) = qkv[:, :2].double(), (part.double()[:, None, None] for part in (cos, sin))
        a, b = x.chunk(2, -1)
        return split(*torch.cat([a * c - b * s, b * c + a * s], -1).to(qkv.dtype).unbind(1), qkv[:, 2])
    wide, rest, width = parts(d)
    q, k, v = (qkv.new_empty(P, heads, each) for each in (d, wide, wide))
    out = Split(q, k, v, (qkv.new_zeros if width > 2 * rest else qkv.new_empty)(P, heads, width))
    if P:
        _turn[(cdiv(P * heads * d // 8, PAIRS), 3)](
            qkv, cos, sin, *out, P, heads, d, wide, rest, width, PAIRS, num_warps=4
        )
    return out


PAIRS = 512
"""Of 4 dimensions and the 4 that they are rotated with, in a program."""


@jit(do_not_specialize=["P"])
def _turn(
    qkv, cos, sin, q, k, v, both, P,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """A program some of the queries, of the keys or of the values: 8-byte steps, since D / 2 is a multiple of 4."""
    which, pair = tl.program_id(1), tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    head, i = pair // (D // 8), (pair % (D // 8) * 4)[:, None] + tl.arange(0, 4)[None, :]
    row, at = (head // HEADS)[:, None], head.to(tl.int64)[:, None]
    there = row < P
    x = qkv + (row.to(tl.int64) * 3 + which) * (HEADS * D) + (head % HEADS)[:, None] * D + i
    a = tl.load(x, mask=there, other=0.0).to(tl.float32)
    b = tl.load(x + D // 2, mask=there, other=0.0).to(tl.float32)
    if which < 2:
        c = tl.load(cos + row * (D // 2) + i, mask=there, other=0.0)
        s = tl.load(sin + row * (D // 2) + i, mask=there, other=0.0)
        a, b = a * c - b * s, b * c + a * s
    a, b, j = a.to(tl.bfloat16), b.to(tl.bfloat16), i + D // 2
    if which == 0:
        tl.store(q + at * D + i, a, mask=there)
        tl.store(q + at * D + j, b, mask=there)
    else:
        to = tl.where(which == 1, k, v) + at * WIDE
        tl.store(to + i, a, mask=there)
        tl.store(to + j, b, mask=there & (j < WIDE))
        if REST:
            column = j - WIDE + tl.where(which == 1, 0, REST)
            tl.store(both + at * WIDTH + column, b, mask=there & (j >= WIDE))
