"""Log probabilities of what a round drew, and the likeliest tokens beside it: `engine.sampling.likeliest` on a GPU.

Both are of a row's logits before any cut or temperature, in float64. A logit and its id make one whole number that
orders as the logit does and, of equal ones, puts the lower id first; the likeliest are then the largest numbers. Rows
are cut into pieces that many programs read at once, each for its own likeliest and its sum; every row's sums are added
up in one order, whoever else is in the round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .common import cdiv, jit, launchable, power_of_two, tl
from .sample import float_of, key_of

PIECE = 4096
"""Logits a program reads."""
TOP = 20
"""Likeliest tokens of a row, as many as may be asked for."""


class Logprobs(NamedTuple):
    """By window and place on its walk; what lies behind the walk is left as it was."""

    logprob: Tensor
    """float64 [S, R]: of the token drawn."""
    top: Tensor
    """int32 [S, R, TOP]: the likeliest ids, the likeliest first; -1 where there are no more."""
    logprobs: Tensor
    """float64 [S, R, TOP]: theirs."""


def logprobs(logits: Tensor, drawn: Tensor, path: Tensor, walked: Tensor, size: int, out: Logprobs) -> None:
    """Of every row on a walk. logits float32 [S · R, V], no NaN in a row walked; drawn, path int32 [S, R] and walked
    int32 [S] as `walk` has them; `size`: ids at or beyond it do not count."""
    if not launchable(logits):
        return logprobs_twin(logits, drawn, path, walked, size, out)
    S, R = drawn.shape
    pieces = cdiv(size, PIECE)
    best = torch.empty(S, R, pieces, TOP, dtype=torch.int64, device=logits.device)
    largest, total = logits.new_empty(S, R, pieces), logits.new_empty(S, R, pieces, dtype=torch.float64)
    parts = best, largest, total
    told = path, walked, R
    _pieces[(S * R, pieces)](logits, *told, *parts, logits.stride(0), size, TOP, PIECE, num_warps=8)
    block = power_of_two(pieces * TOP)
    _rows[(S * R,)](logits, drawn, *told, *parts, *out, logits.stride(0), pieces, TOP, block, num_warps=8)


@jit(do_not_specialize=["R", "s_row"])
def _pieces(logits, path, walked, R, best, largest, total, s_row, size, TOP: tl.constexpr, PIECE: tl.constexpr):
    """A program a place on a walk and a piece of its row: the likeliest there, the largest logit and the sum of exp."""
    n, piece = tl.program_id(0), tl.program_id(1)
    s = n // R
    if n % R < tl.load(walked + s):
        row, i = (s * R + tl.load(path + n)).to(tl.int64), piece * PIECE + tl.arange(0, PIECE)
        x = tl.load(logits + row * s_row + i, mask=i < size, other=float("-inf"))
        at = n * tl.num_programs(1) + piece
        top = tl.max(x, 0)
        tl.store(largest + at, top)
        base = tl.where(top == float("-inf"), 0.0, top).to(tl.float64)
        tl.store(total + at, tl.sum(tl.exp(x.to(tl.float64) - base), 0))
        left = tl.where(i < size, key_of(x) * 2147483648 + (2147483647 - i), -1)
        for k in range(TOP):
            most = tl.max(left, 0)
            tl.store(best + at * TOP + k, most)
            left = tl.where(left == most, -1, left)


@jit(do_not_specialize=["R", "s_row"])
def _rows(
    logits, drawn, path, walked, R, best, largest, total, logprob, top, logprobs, s_row, pieces,
    TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a place on a walk."""
    n = tl.program_id(0)
    s = n // R
    if n % R < tl.load(walked + s):
        row, i = s * R + tl.load(path + n), tl.arange(0, BLOCK)
        tops = tl.load(largest + n * pieces + i, mask=i < pieces, other=float("-inf")).to(tl.float64)
        sums = tl.load(total + n * pieces + i, mask=i < pieces, other=0.0)
        base = tl.max(tops, 0)
        norm = base + tl.log(tl.sum(sums * tl.exp(tops - base), 0))
        own = tl.load(logits + row.to(tl.int64) * s_row + tl.load(drawn + row))
        tl.store(logprob + n, own.to(tl.float64) - norm)
        left = tl.load(best + n * pieces * TOP + i, mask=i < pieces * TOP, other=-1)
        for k in range(TOP):
            most = tl.max(left, 0)
            id, x = 2147483647 - most % 2147483648, float_of(most // 2147483648).to(tl.float64)
            tl.store(top + n * TOP + k, tl.where(most < 0, -1, id).to(tl.int32))
            tl.store(logprobs + n * TOP + k, tl.where(most < 0, float("-inf"), x - norm))
            left = tl.where(left == most, -1, left)


def logprobs_twin(logits: Tensor, drawn: Tensor, path: Tensor, walked: Tensor, size: int, out: Logprobs) -> None:
    count, R = min(TOP, size), drawn.shape[1]
    for s, steps in enumerate(walked.tolist()):
        for i, row in enumerate(path[s, :steps].tolist()):
            x = logits[s * R + row, :size].double().log_softmax(-1)
            values, ids = x.sort(descending=True, stable=True)
            out.logprob[s, i] = x[drawn[s, row]]
            out.top[s, i], out.logprobs[s, i] = -1, -torch.inf
            out.top[s, i, :count], out.logprobs[s, i, :count] = ids[:count].int(), values[:count]
