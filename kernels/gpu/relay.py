"""What a round walked, handed to the drafts that begin behind it without the host.

Of each stream the tapped rows of its walk become rows that wait in its drafter's context, and the token drawn at the
walk's end becomes the pending one, which the block begins with.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from .common import EARLY, cdiv, jit, launchable, power_of_two, tl

COLUMNS = 1024
"""Of tapped rows that a program copies."""


class Blocks(NamedTuple):
    """What a drafter's pass over S blocks of B rows is told; int32 but for the last."""

    ids: Tensor
    """[S, B]: the pending token, then masks."""
    places: Tensor
    """[2, S, B]: of the block's rows, and of those that wait, in the sequence."""
    owners: Tensor
    """[S, B]: of a row that waits, its context's slot; -1: there is none."""
    slots: Tensor
    """[S]"""
    ends: Tensor
    """[S]: the context's rows end before this one."""
    positions: Tensor
    """[S]: of the pending token."""
    done: Tensor
    """int64 [1]: when the round was done, ns."""


def relay(drawn: Tensor, path: Tensor, walked: Tensor, taps: Tensor, waiting: Tensor, to: Blocks) -> None:
    """drawn, path int32 [>= S, R] and walked int32 [>= S], as `walk` leaves them; taps bf16 [>= S · R, W], the round's
    tapped rows; waiting [slots, B, W]: of each context, the rows that wait, of which there are none before. `to.ends`
    are those before the round; they, and all other parts of `to` but `slots`, are written. No walk has more than B
    rows: that is not checked. A stream that walked nothing keeps its pending token, whatever that is."""
    (S, B), R, W = to.ids.shape, path.shape[1], taps.shape[1]
    if not launchable(taps):
        return relay_twin(drawn, path, walked, taps, waiting, to)
    _relay[(S, cdiv(W, COLUMNS))](
        drawn, path, walked, taps, waiting, *to, S, R, W, B, power_of_two(B), COLUMNS, EARLY, num_warps=4
    )


def relay_twin(drawn: Tensor, path: Tensor, walked: Tensor, taps: Tensor, waiting: Tensor, to: Blocks) -> None:
    (S, B), R = to.ids.shape, path.shape[1]
    block = torch.arange(B, dtype=torch.int32, device=taps.device)
    to.done[0] = time.perf_counter_ns()
    for s, (n, slot) in enumerate(zip(walked[:S].tolist(), to.slots.tolist())):
        rows = path[s, :n].long()
        waiting[slot, :n] = taps[s * R + rows].to(waiting.dtype)
        if n:
            to.ids[s, 0] = drawn[s, rows[-1]]
        to.places[1, s] = to.ends[s] + block
        to.ends[s] += n
        to.positions[s] = to.ends[s]
        to.places[0, s] = to.ends[s] + block
        to.owners[s] = torch.where(block < n, slot, -1)


@jit(do_not_specialize=["S", "R"])
def _relay(
    drawn, path, walked, taps, waiting, ids, places, owners, slots, ends, positions, done, S, R, W,
    B: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """A program a stream and columns of its rows; those of the first columns tell of the rest."""
    s, part, i = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    n, slot = tl.load(walked + s), tl.load(slots + s)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    row = s * R + tl.load(path + s * R + i, mask=i < n, other=0)
    there = (i < n)[:, None] & (column < W)[None, :]
    x = tl.load(taps + row.to(tl.int64)[:, None] * W + column[None, :], mask=there)
    to = (slot.to(tl.int64) * B + i)[:, None] * W + column[None, :]
    tl.store(waiting + to, x.to(waiting.dtype.element_ty), mask=there)
    if part == 0:
        if n > 0:
            tl.store(ids + s * B, tl.load(drawn + s * R + tl.load(path + s * R + n - 1)))
        end, inside = tl.load(ends + s), i < B
        tl.store(places + (S + s) * B + i, end + i, mask=inside)
        tl.store(places + s * B + i, end + n + i, mask=inside)
        tl.store(owners + s * B + i, tl.where(i < n, slot, -1), mask=inside)
        tl.store(ends + s, end + n)
        tl.store(positions + s, end + n)
        if CLOCK:
            tl.store(done, tl.extra.cuda.globaltimer())
