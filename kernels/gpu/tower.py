"""The vision tower's attention: every patch of a frame sees the patches of its own frame, and nothing else.

Tiles are cut from each frame's own first patch, so a picture's bits do not depend on what lies beside it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .common import INTERPRETED, cdiv, descriptor, dot, jit, launchable, power_of_two, tl
from .packing import locate

FRAMES = 256
"""Frames of a call at most."""


class Split(NamedTuple):
    """Queries, keys and values of P patches, contiguous, bf16. The copy engine is slow where a row's start or length is
    no power of two, so heads of keys and values are split in two: see `parts`."""

    q: Tensor
    """[P, H, d]"""
    k: Tensor
    """[P, H, wide]"""
    v: Tensor
    """[P, H, wide]"""
    rest: Tensor
    """[P, H, width]: what keys have beyond `wide`, behind it what values have, then zeros."""


def parts(d: int) -> tuple[int, int, int]:
    """(wide, rest, width): a head of d dimensions is `wide`, a power of two, and `rest` more, which of keys and values
    together take `width`. Products with 72 as 64 and 16 are less work than with 128. Raises ValueError."""
    if d % 8 or not 16 <= d <= 128:
        raise ValueError(f"the tower's heads have a multiple of 8 dimensions from 16 to 128, not {d}")
    wide = power_of_two(d + 1) // 2
    rest = d - wide
    return wide, rest, power_of_two(2 * rest) if rest else 0


def split(q: Tensor, k: Tensor, v: Tensor) -> Split:
    """q, k, v [P, H, d]"""
    wide, rest, width = parts(q.shape[-1])
    both = torch.cat([k[..., wide:], v[..., wide:], k.new_zeros(*k.shape[:2], width - 2 * rest)], -1)
    return Split(q.contiguous(), k[..., :wide].contiguous(), v[..., :wide].contiguous(), both)


def tower_attention(x: Split, lengths: Tensor) -> Tensor:
    """softmax(q kᵀ d^-0.5) v within each frame, bf16 [P, H, d].

    lengths int32 [frames]: patches of each, one frame after another, P in all. Raises ValueError for over 256 frames.
    """
    if len(lengths) > FRAMES:
        raise ValueError(f"the tower takes {FRAMES} frames at once, not {len(lengths)}")
    out = torch.empty_like(x.q)
    if launchable(x.q):
        return _launch(x, lengths, out)
    return tower_attention_twin(x, lengths, out)


def tower_attention_twin(x: Split, lengths: Tensor, out: Tensor) -> Tensor:
    d = x.q.shape[-1]
    _, rest, _ = parts(d)
    k, v = (torch.cat(one, -1) for one in ((x.k, x.rest[..., :rest]), (x.v, x.rest[..., rest : 2 * rest])))
    for rows in torch.arange(len(out)).split(lengths.tolist()):
        one, two, three = (each[rows].double().transpose(0, 1) for each in (x.q, k, v))
        scores = one @ two.transpose(1, 2) * d**-0.5
        out[rows] = (scores.softmax(-1) @ three).transpose(0, 1).to(out.dtype)
    return out


BLOCK, TILE, WARPS, STAGES = 128, 64, 4, 3
"""Patches of a program, keys folded in at once, warps (for heads of over 96 dimensions twice as many), stages. Two
programs share a multiprocessor: the one's products run beside the other's exponentials."""


def _launch(x: Split, lengths: Tensor, out: Tensor) -> Tensor:
    P, heads, d = out.shape
    wide, rest, width = parts(d)
    for each in x:
        if not each.is_contiguous() or each.data_ptr() % 16:
            raise ValueError("the tower takes contiguous tensors that start at multiples of 16 bytes")
    copied = [descriptor(each.flatten(1), TILE, each.shape[-1]) for each in (x.k, x.v, x.rest if rest else x.k)]
    _attend[(heads, cdiv(P, BLOCK) + len(lengths) - 1)](
        *x, *copied, lengths, out, d**-0.5 * math.log2(math.e), len(lengths),
        heads, d, wide, rest, width, BLOCK, TILE, FRAMES, INTERPRETED,
        num_warps=WARPS if wide <= 64 else 2 * WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


@jit
def _rows(x, first, end, stride, width, N: tl.constexpr, WIDTH: tl.constexpr):
    """Rows first .. first + N of x, `stride` apart; zeros from row `end` and column `width` on."""
    i, e = first + tl.arange(0, N), tl.arange(0, WIDTH)
    there = (i < end)[:, None] & (e < width)[None, :]
    return tl.load(x + i.to(tl.int64)[:, None] * stride + e[None, :], mask=there, other=0.0)


@jit
def _weigh(scores, top, total, scale):
    """Scores [M, n], unscaled -> (weights [M, n], what fades the sums so far, top [M], total [M])."""
    new = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(tl.fma(scores, scale, (0.0 - new * scale)[:, None]))
    fade = tl.exp2((top - new) * scale)
    return weights.to(tl.bfloat16), fade, new, tl.fma(total, fade, tl.sum(weights, 1))


@jit(do_not_specialize=["n"])
def _attend(
    q, k, v, both, copy_k, copy_v, copy_both, lengths, out, scale, n,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program a head and tile of BLOCK patches. The dimensions from WIDE on, if any, are products of their own: of
    what keys and values have there together, values meet zeros in the queries, and sums of keys are not stored.

    Whole tiles of keys come by the copy engine; a frame's last ones, behind which may be anything, by masked loads."""
    head = tl.program_id(0)
    frame, row, own, tile = locate(lengths, n, tl.program_id(1), BLOCK, MOST)
    if frame < n:
        first_row, end = row + tile * BLOCK, row + own
        queries = _rows(q + head * D, first_row, end, HEADS * D, WIDE, BLOCK, WIDE)
        mix = tl.zeros([BLOCK, WIDE], tl.float32)
        if REST:
            more = _rows(q + head * D + WIDE, first_row, end, HEADS * D, REST, BLOCK, WIDTH)
            rest = tl.zeros([BLOCK, WIDTH], tl.float32)
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        whole = row + own // TILE * TILE
        for first in range(row, whole, TILE):
            keys = copy_k.load([first, head * WIDE])
            scores = dot(queries, keys.T, tl.zeros([BLOCK, TILE], tl.float32), WIDEN)
            if REST:
                others = copy_both.load([first, head * WIDTH])
                scores = dot(more, others.T, scores, WIDEN)
            weights, fade, top, total = _weigh(scores, top, total, scale)
            values = copy_v.load([first, head * WIDE])
            mix = dot(weights, values, mix * fade[:, None], WIDEN)
            if REST:
                rest = dot(weights, others, rest * fade[:, None], WIDEN)
        # At most one, and not worth registers that the loop above lacks then.
        for first in tl.range(whole, end, TILE, num_stages=1):
            keys = _rows(k + head * WIDE, first, end, HEADS * WIDE, WIDE, TILE, WIDE)
            scores = dot(queries, keys.T, tl.zeros([BLOCK, TILE], tl.float32), WIDEN)
            if REST:
                others = _rows(both + head * WIDTH, first, end, HEADS * WIDTH, WIDTH, TILE, WIDTH)
                scores = dot(more, others.T, scores, WIDEN)
            scores = tl.where((first + tl.arange(0, TILE) < end)[None, :], scores, -float("inf"))
            weights, fade, top, total = _weigh(scores, top, total, scale)
            values = _rows(v + head * WIDE, first, end, HEADS * WIDE, WIDE, TILE, WIDE)
            mix = dot(weights, values, mix * fade[:, None], WIDEN)
            if REST:
                rest = dot(weights, others, rest * fade[:, None], WIDEN)
        i, e = first_row + tl.arange(0, BLOCK), tl.arange(0, WIDE)
        there = (i < end)[:, None]
        at = out + (i.to(tl.int64)[:, None] * HEADS + head) * D
        tl.store(at + e[None, :], (mix / total[:, None]).to(tl.bfloat16), mask=there)
        if REST:
            f = tl.arange(0, WIDTH)[None, :]
            there = there & (f >= REST) & (f < 2 * REST)
            tl.store(at + WIDE - REST + f, (rest / total[:, None]).to(tl.bfloat16), mask=there)
