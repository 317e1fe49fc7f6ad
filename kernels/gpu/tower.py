"""The vision tower's attention: every patch of a frame sees the patches of its own frame, and nothing else.

Tiles are cut from each frame's own first patch, so a picture's bits do not depend on what lies beside it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .common import INTERPRETED, cdiv, dot, jit, launchable, power_of_two, tl
from .packing import locate

FRAMES = 256
"""Frames of a call at most."""


def tower_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """softmax(q kᵀ d^-0.5) v within each frame.

    q, k, v bf16 [P, H, d], the last two dimensions contiguous, rows of any stride; d a multiple of 8 up to 128;
    lengths int32 [frames]: patches of each, one frame after another, P in all. Returns bf16 [P, H, d].
    """
    if len(lengths) > FRAMES:
        raise ValueError(f"the tower takes {FRAMES} frames at once, not {len(lengths)}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if launchable(q):
        return _launch(q, k, v, lengths, out)
    return tower_attention_twin(q, k, v, lengths, out)


def tower_attention_twin(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor) -> Tensor:
    for rows in torch.arange(len(q)).split(lengths.tolist()):
        one, two, three = (x[rows].double().transpose(0, 1) for x in (q, k, v))
        scores = one @ two.transpose(1, 2) * q.shape[-1] ** -0.5
        out[rows] = (scores.softmax(-1) @ three).transpose(0, 1).to(out.dtype)
    return out


BLOCK, TILE, WARPS, STAGES = 128, 64, 8, 3


def _launch(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor) -> Tensor:
    P, heads, d = q.shape
    if d % 8 or d > 128:
        raise ValueError(f"the tower's heads have a multiple of 8 dimensions up to 128, not {d}")
    for x in (q, k, v):
        if x.stride(2) != 1 or x.stride(1) != d or x.data_ptr() % 16 or x.stride(0) % 8:
            raise ValueError("the tower takes rows of contiguous heads at multiples of 16 bytes")
    wide, rest = parts(d)
    _attend[(heads, cdiv(P, BLOCK) + len(lengths) - 1)](
        q, k, v, lengths, out, d**-0.5 * math.log2(math.e), len(lengths), q.stride(0), k.stride(0), v.stride(0),
        heads, d, wide, rest, BLOCK, TILE, FRAMES, INTERPRETED, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def parts(d: int) -> tuple[int, int]:
    """A head of d dimensions as a power of two and a padded rest: 72 is 64 and 16, which wastes less than 128."""
    wide = max(1 << (d.bit_length() - 1), 16)
    return wide, max(power_of_two(d - wide), 16) if d > wide else 0


@jit(do_not_specialize=["n"])
def _attend(
    q, k, v, lengths, out, scale, n, q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, MOST: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program a head and tile of BLOCK patches. The dimensions from WIDE on, if any, are products of their own."""
    head = tl.program_id(0)
    frame, row, own, tile = locate(lengths, n, tl.program_id(1), BLOCK, MOST)
    if frame < n:
        m, j, e = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TILE), tl.arange(0, WIDE)
        there = m < own
        at_q = q + (row + m).to(tl.int64)[:, None] * q_stride + head * D
        queries = tl.load(at_q + e[None, :], mask=there[:, None] & (e < D)[None, :], other=0.0)
        mix = tl.zeros([BLOCK, WIDE], tl.float32)
        if REST:
            f = WIDE + tl.arange(0, REST)
            more = tl.load(at_q + f[None, :], mask=there[:, None] & (f < D)[None, :], other=0.0)
            rest = tl.zeros([BLOCK, REST], tl.float32)
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, own, TILE):
            valid = first + j < own
            at_k = k + (row + first + j).to(tl.int64)[None, :] * k_stride + head * D
            at_v = v + (row + first + j).to(tl.int64)[:, None] * v_stride + head * D
            keys = tl.load(at_k + e[:, None], mask=valid[None, :] & (e < D)[:, None], other=0.0)
            scores = dot(queries, keys, tl.zeros([BLOCK, TILE], tl.float32), WIDEN)
            if REST:
                keys = tl.load(at_k + f[:, None], mask=valid[None, :] & (f < D)[:, None], other=0.0)
                scores = dot(more, keys, scores, WIDEN)
            scores = tl.where(valid[None, :], scores, -float("inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(tl.fma(scores, scale, (0.0 - new * scale)[:, None]))
            fade = tl.exp2((top - new) * scale)
            total = tl.fma(total, fade, tl.sum(weights, 1))
            weights = weights.to(tl.bfloat16)
            values = tl.load(at_v + e[None, :], mask=valid[:, None] & (e < D)[None, :], other=0.0)
            mix = dot(weights, values, mix * fade[:, None], WIDEN)
            if REST:
                values = tl.load(at_v + f[None, :], mask=valid[:, None] & (f < D)[None, :], other=0.0)
                rest = dot(weights, values, rest * fade[:, None], WIDEN)
            top = new
        at = out + ((row + m).to(tl.int64)[:, None] * HEADS + head) * D
        tl.store(at + e[None, :], (mix / total[:, None]).to(tl.bfloat16), mask=there[:, None] & (e < D)[None, :])
        if REST:
            tl.store(at + f[None, :], (rest / total[:, None]).to(tl.bfloat16), mask=there[:, None] & (f < D)[None, :])
