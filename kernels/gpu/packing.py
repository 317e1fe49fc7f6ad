"""How rows of several sequences lie in one pass: prompts one after another, windows side by side.

A prompt pass packs its rows; each sequence is cut into tiles that start at its own first row, so a tile never holds
rows of two sequences and a row's place in its tile does not depend on its neighbours. A round pass holds S windows of
R rows; `Windows` says once a round, for every kernel of every layer, which rows each row follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .common import jit, launchable, tl

CHUNK = 64
"""Rows of a Gated DeltaNet chunk; a prompt pass starts at a multiple of it."""
ROWS = 16
"""Rows of a window at most."""
STREAMS = 64
"""Prompts of a prompt pass, or windows of a round, at most."""


class Prompts(NamedTuple):
    """Rows of a prompt pass: the next `lengths[i]` rows of sequence i, sequence after sequence."""

    slots: Tensor
    """int32 [S]: where each sequence's state lies."""
    starts: Tensor
    """int32 [S]: the absolute row of its first row here, a multiple of 64."""
    lengths: Tensor
    """int32 [S]"""
    keep: Tensor
    """int32 [chunks]: of each 64-row chunk, the place of the state behind it among those kept; -1: it is not kept."""
    rows: int
    """Rows in all."""
    kept: int
    """States kept in all."""

    @property
    def sequences(self) -> int:
        return len(self.slots)

    @property
    def chunks(self) -> int:
        return len(self.keep)

    def parts(self) -> list[tuple[int, int, slice]]:
        """(slot, start, its rows here) of each sequence; reads the device."""
        parts, row = [], 0
        for slot, start, length in zip(self.slots.tolist(), self.starts.tolist(), self.lengths.tolist()):
            parts.append((slot, start, slice(row, row + length)))
            row += length
        return parts


def prompts(
    slots: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    marks: Sequence[Sequence[int]],
    device: torch.device | str,
) -> Prompts:
    """`marks`: of each sequence, the absolute rows to keep a state at, multiples of 64 within (start, start + length].
    States are kept in the order of the sequences and their marks. Raises ValueError for rows off the grid and for
    more than 64 sequences."""
    if len(slots) > STREAMS:
        raise ValueError(f"a prompt pass takes {STREAMS} prompts at most, not {len(slots)}")
    keep: list[int] = []
    kept = 0
    for start, length, wanted in zip(starts, lengths, marks, strict=True):
        if start % CHUNK or length < 1:
            raise ValueError(f"a prompt pass takes rows from a multiple of {CHUNK} on, not {length} from row {start}")
        places = [-1] * (-(-length // CHUNK))
        for mark in wanted:
            if mark % CHUNK or not start < mark <= start + length:
                raise ValueError(f"no state can be kept at row {mark} of rows {start} to {start + length}")
            places[(mark - start) // CHUNK - 1] = kept
            kept += 1
        keep += places
    data = torch.tensor([*slots, *starts, *lengths, *keep], dtype=torch.int32)
    data = data.to(device, non_blocking=True)
    n = len(slots)
    return Prompts(data[:n], data[n : 2 * n], data[2 * n : 3 * n], data[3 * n :], sum(lengths), kept)


class Windows(NamedTuple):
    """The trees of a round's windows. Rows from `counts` on stand for nothing: kernels give zeros there."""

    counts: Tensor
    """int32 [S]: rows in use; 0: no stream."""
    depths: Tensor
    """int32 [S, R]: rows between row 0 and each row."""
    ancestors: Tensor
    """int32 [S, R, 16]: the row i generations up, itself for i = 0; -1 from before the window on."""
    order: Tensor
    """int32 [S, R]: the rows depth first: each behind its parent or, where that is not so, behind a leaf."""


def windows(parents: Tensor, counts: Tensor) -> Windows:
    """parents int32 [S, R], R <= 16: of each row the earlier row that it follows, -1 for row 0; counts int32 [S]."""
    S, R = parents.shape
    if R > ROWS:
        raise ValueError(f"a window has {ROWS} rows at most, not {R}")
    if not launchable(parents):
        return windows_twin(parents, counts)
    depths, order = torch.empty_like(parents), torch.empty_like(parents)
    ancestors = parents.new_empty(S, R, ROWS)
    _windows[(S,)](parents, counts, depths, ancestors, order, R, ROWS, num_warps=1)
    return Windows(counts, depths, ancestors, order)


def windows_twin(parents: Tensor, counts: Tensor) -> Windows:
    S, R = parents.shape
    depths, order = torch.zeros_like(parents), torch.zeros_like(parents)
    ancestors = parents.new_full((S, R, ROWS), -1)
    for s, (up, n) in enumerate(zip(parents.tolist(), counts.tolist())):
        paths: list[list[int]] = []
        for r in range(R):
            paths.append([*(paths[up[r]] if r and up[r] >= 0 else []), r])
            depths[s, r] = len(paths[r]) - 1
            ancestors[s, r, : len(paths[r])] = torch.tensor(paths[r][::-1])
        order[s] = torch.tensor([*sorted(range(n), key=lambda r: paths[r]), *range(n, R)])
    return Windows(counts, depths, ancestors, order)


@jit(do_not_specialize=["R"])
def _windows(parents, counts, depths, ancestors, order, R, ROWS: tl.constexpr):
    """A program a window. Rows sort depth first by their paths, read as numbers of 4 bits a row from row 0 down."""
    s = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    there = rows < R
    row = rows
    depth, key = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int64)
    for i in range(R):
        tl.store(ancestors + (s * R + rows) * ROWS + i, row, mask=there)
        # The path so far moves down by a place; row 0, which all paths begin with, has none.
        key = tl.where(row > 0, (key >> 4) + (row.to(tl.int64) << 4 * (ROWS - 2)), key)
        up = tl.load(parents + s * R + row, mask=there & (row > 0), other=-1)
        depth += tl.where(up >= 0, 1, 0)
        row = up
    for i in range(R, ROWS):
        tl.store(ancestors + (s * R + rows) * ROWS + i, tl.full([ROWS], -1, tl.int32), mask=there)
    tl.store(depths + s * R + rows, depth, mask=there)
    count = tl.load(counts + s)
    used = rows < count
    # Unused rows come last, in their own order: a path never reaches bit 60.
    key = tl.where(used, key, (rows + ROWS).to(tl.int64) << 56)
    before = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (rows[None, :] < rows[:, None]))
    rank = tl.sum((before & there[None, :]).to(tl.int32), 1)
    tl.store(order + s * R + rank, rows, mask=there)


@jit
def locate(lengths, n, tile, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """Of the `tile`-th tile of BLOCK rows over sequences packed by `lengths` [n]: (sequence, its first packed row, its
    rows, the tile's number in it). The sequence is n for a tile past the last. n <= MOST, a power of two."""
    i = tl.arange(0, MOST)
    rows = tl.load(lengths + i, mask=i < n, other=0)
    tiles = (rows + BLOCK - 1) // BLOCK
    sequence = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    sequence = tl.minimum(sequence, n)
    first = tl.sum(tl.where(i < sequence, rows, 0), 0)
    own = tl.sum(tl.where(i == sequence, rows, 0), 0)
    return sequence, first, own, tile - tl.sum(tl.where(i < sequence, tiles, 0), 0)
