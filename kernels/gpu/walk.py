"""The walk of a round: from a window's row 0 along the guesses that equal what each row's own draw gave.

The path is what is committed. A row whose draw failed (its logits were not finite, drawn < 0) ends the walk before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import jit, launchable, power_of_two, tl


def walk(ids: Tensor, parents: Tensor, drawn: Tensor, counts: Tensor, path: Tensor, walked: Tensor) -> None:
    """ids, parents, drawn int32 [S, R]: of each row its token, the row that it follows and the token drawn behind it;
    counts int32 [S]: rows in use. Writes path int32 [S, R], the rows walked, row 0 first (behind the path its last row,
    or 0), and walked int32 [S], how many they are. Of two equal guesses behind one row the first is taken."""
    S, R = ids.shape
    if launchable(ids):
        _walk[(S,)](ids, parents, drawn, counts, path, walked, R, power_of_two(R), num_warps=1)
    else:
        walk_twin(ids, parents, drawn, counts, path, walked)


def walk_twin(ids: Tensor, parents: Tensor, drawn: Tensor, counts: Tensor, path: Tensor, walked: Tensor) -> None:
    for s, (own, up, draws, count) in enumerate(zip(ids.tolist(), parents.tolist(), drawn.tolist(), counts.tolist())):
        rows, row = [], 0
        while row < count and draws[row] >= 0:
            rows.append(row)
            row = next((r for r in range(row + 1, count) if up[r] == row and own[r] == draws[row]), count)
        last = rows[-1] if rows else 0
        path[s] = torch.tensor([*rows, *[last] * (ids.shape[1] - len(rows))])
        walked[s] = len(rows)


def follow(ids: Tensor, positions: Tensor, rows: Tensor, places: Tensor, drawn: Tensor) -> None:
    """Of windows of one row, what the round that follows is told: all int32, ids, positions, places and drawn [S, 1],
    rows [S]. Each id becomes the token drawn behind it, and the others move on by one. Where none could be drawn it
    becomes 0: that stream has ended."""
    if launchable(ids):
        _follow[(len(rows),)](ids, positions, rows, places, drawn, num_warps=1)
    else:
        follow_twin(ids, positions, rows, places, drawn)


def follow_twin(ids: Tensor, positions: Tensor, rows: Tensor, places: Tensor, drawn: Tensor) -> None:
    ids.copy_(drawn.clamp_min(0))
    for x in (positions, rows, places):
        x += 1


@jit
def _walk(ids, parents, drawn, counts, path, walked, R: tl.constexpr, BLOCK: tl.constexpr):
    """A program a window."""
    s = tl.program_id(0)
    rows = tl.arange(0, BLOCK)
    count = tl.load(counts + s)
    used = rows < count
    own = tl.load(ids + s * R + rows, mask=used, other=-1)
    up = tl.load(parents + s * R + rows, mask=used, other=-1)
    draws = tl.load(drawn + s * R + rows, mask=used, other=-1)
    row, last, taken = count * 0, count * 0, count * 0
    for i in tl.static_range(R):
        here = tl.sum(tl.where(rows == row, draws, 0), 0)
        on = (row < count) & (here >= 0)
        last = tl.where(on, row, last)
        taken += on.to(tl.int32)
        tl.store(path + s * R + i, last)
        fits = used & (rows > row) & (up == row) & (own == here)
        row = tl.where(on, tl.min(tl.where(fits, rows, BLOCK), 0), BLOCK)
    tl.store(walked + s, taken)


@jit
def _follow(ids, positions, rows, places, drawn):
    """A program a window."""
    s = tl.program_id(0)
    tl.store(ids + s, tl.maximum(tl.load(drawn + s), 0))
    tl.store(positions + s, tl.load(positions + s) + 1)
    tl.store(rows + s, tl.load(rows + s) + 1)
    tl.store(places + s, tl.load(places + s) + 1)
