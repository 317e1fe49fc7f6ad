"""From a drafter's candidates to the windows of the round that verifies them, without the host.

Which guesses a window holds, and with what chances, is `engine.drafting.tree`'s: always the likeliest that is open is
taken next. Numbers are rounded elsewhere than there, scores being float64 for greedy streams too and a path's sum
float32: of guesses that are as good as equally likely another may come first.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .common import EARLY, jit, launchable, power_of_two, tl
from .packing import ROWS
from .sample import gumbel_of, gumbel_twin

EDGE, NOISE, SHARPNESS = 0.6, 0.7, 1.5
"""Of a score: the pair's part, the noise's, and what all of it is over."""
CHILDREN = 4
"""Guesses behind one at most."""


class Candidates(NamedTuple):
    """K for each of P places behind the pending tokens of S streams, as `engine.drafting.draft.Lattice` has them."""

    ids: Tensor
    """int32 [S, P, K]"""
    logits: Tensor
    """float32 [S, P, K]"""
    edges: Tensor
    """float32 [S, P, K, K]"""


class Seats(NamedTuple):
    """What is known of the streams for as long as they are the same; int32 [S]."""

    widths: Tensor
    """Guesses behind one at most: `CHILDREN` of a tree, 1 of a chain; 0: there is no stream."""
    shifts: Tensor
    """Added to a row's place to give its position for the rotation."""
    ends: Tensor
    """The sequence never has a row at or behind this place."""


class Trees(NamedTuple):
    """What was made for S streams; row 0 is the pending token, row k the k-th guess."""

    guesses: Tensor
    """int32 [S, 16]: ids."""
    behind: Tensor
    """int32 [S, 16]: of each guess the row that it follows; -1 for row 0."""
    chances: Tensor
    """float32 [S, 16]: of each guess, that it will be on the accepted path."""
    made: Tensor
    """int32 [S]: rows made; 0: no stream."""
    verified: Tensor
    """int32 [S]: of them, those in the window."""
    times: Tensor
    """int64 [2], ns: when the round before was done, and when the trees were."""


def grow(
    candidates: Candidates, pending: Tensor, positions: Tensor, done: Tensor, seats: Seats, f: dict[str, Tensor],
    out: Trees,
) -> None:  # fmt: skip
    """pending int32 [S, >= 1], of which the first column counts, and positions int32 [S]: of the pending tokens; done
    int64 [1]: when they were drawn, ns. f holds a round's arrays as `rounds.fields` has them, [S, R] and [S]: those
    that say what is in a window and where are written; `temperature` and `seed` say how its tokens are drawn, which are
    each for the place one behind its row's."""
    S, P, K = candidates.ids.shape
    if not launchable(candidates.ids):
        return grow_twin(candidates, pending, positions, done, seats, f, out)
    names = "temperature", "seed", "ids", "parents", "positions", "places", "counts", "rows"
    _grow[(S,)](
        *candidates, pending, positions, done, *seats, *(f[name] for name in names), *out, pending.stride(0),
        f["ids"].shape[1], P, K, power_of_two(K), ROWS, CHILDREN, EDGE, NOISE, SHARPNESS, EARLY, num_warps=1,
    )  # fmt: skip


def grow_twin(candidates, pending, positions, done, seats, f, out) -> None:
    R = f["ids"].shape[1]
    out.times[0], out.times[1] = done[0], time.perf_counter_ns()
    for s, (width, end, position) in enumerate(zip(*(x.tolist() for x in (seats.widths, seats.ends, positions)))):
        how = float(f["temperature"][s, 0]), int(f["seed"][s, 0]), position + 1
        nodes = nodes_twin(*(x[s].numpy() for x in candidates), width, *how)
        rows = [(int(pending[s, 0]), -1, 1.0 if width else 0.0), *nodes]
        made = len(rows) if width else 0
        kept = max(min(made, R, end - position), 0)
        rows += [(0, row - 1, 0.0) for row in range(len(rows), ROWS)]
        ids, parents, chances = map(list, zip(*rows))
        for to, x in zip(out, (ids, parents, chances, made, kept)):
            to[s] = torch.tensor(x)
        depths = [0]
        for row, parent in enumerate(parents[1:R], 1):
            depths.append(depths[parent] + 1 if row < kept else 0)
        f["counts"][s], f["rows"][s] = kept, position
        f["ids"][s] = torch.tensor(ids[:kept] + [0] * (R - kept))
        f["parents"][s] = torch.tensor(parents[:kept] + list(range(kept - 1, R - 1)))
        depth = torch.tensor(depths)
        f["positions"][s], f["places"][s] = position + seats.shifts[s] + depth, position + 1 + depth


def nodes_twin(
    ids: np.ndarray, logits: np.ndarray, edges: np.ndarray, width: int, temperature: float, seed: int, place: int
) -> list[tuple[int, int, float]]:
    """Of each guess its id, its parent's row and its chance; `place`: of the token drawn at row 0."""
    nodes, opened = [], []  # of what is open: cost, parent's row, rank, place and candidate
    row, depth, behind, before = 0, 0, 0, np.float32(0)
    while len(nodes) < ROWS - 1:
        if depth < len(ids):
            scores = (logits[depth] + np.float32(EDGE) * edges[depth, behind]).astype(np.float64)
            if temperature:
                scores = scores / temperature + NOISE * gumbel_twin(seed, place + depth, ids[depth])
            scores = ((scores - scores.max()) / SHARPNESS).astype(np.float32)
            costs = np.log(np.exp(scores).sum()) - scores
            for rank, one in enumerate(np.argsort(costs, kind="stable")[:width].tolist()):
                if costs[one] < np.inf:
                    opened.append((before + costs[one], row, rank, depth, one))
        if not opened:
            break
        taken = min(opened)
        opened.remove(taken)
        before, row, _, depth, behind = taken
        nodes.append((int(ids[depth, behind]), row, float(np.exp(-before))))
        row, depth = len(nodes), depth + 1
    return nodes


@jit(do_not_specialize=["stride", "R"])
def _grow(
    ids, logits, edges, pending, positions, done, widths, shifts, ends,
    temperature, seed, w_ids, w_parents, w_positions, w_places, w_counts, w_rows,
    guesses, behinds, chances, made, verified, times, stride, R,
    P: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CHILDREN: tl.constexpr,
    EDGE: tl.constexpr, NOISE: tl.constexpr, SHARPNESS: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """A program a stream. What is open is a table: of each row its children by rank, at what they cost."""
    s = tl.program_id(0)
    width, position, end = tl.load(widths + s), tl.load(positions + s), tl.load(ends + s)
    heat, by = tl.load(temperature + s * R), tl.load(seed + s * R).to(tl.uint64)
    k, n, rank = tl.arange(0, BLOCK), tl.arange(0, ROWS), tl.arange(0, CHILDREN)
    cell = n[:, None] * CHILDREN + rank[None, :]
    costs = tl.full([ROWS, CHILDREN], float("inf"), tl.float32)
    ones = tl.zeros([ROWS, CHILDREN], tl.int32)
    own, up = tl.where(n == 0, tl.load(pending + s * stride), 0), n - 1
    depths, sums = n * 0, tl.zeros([ROWS], tl.float32)
    count = tl.where(width > 0, 1, 0)
    place, behind, before = count * 0, count * 0, tl.sum(sums, 0)
    for i in range(ROWS - 1):
        if (count == i + 1) & (place < P):
            at = (s * P + place) * K
            there = k < K
            candidate = tl.load(ids + at + k, mask=there, other=0)
            x = tl.load(edges + (at + behind) * K + k, mask=there, other=0.0)
            score = (tl.load(logits + at + k, mask=there, other=0.0) + EDGE * x).to(tl.float64)
            if heat > 0:
                drawn = (position + 1 + place).to(tl.uint64)
                score = score / heat + NOISE * gumbel_of(by, drawn, candidate.to(tl.uint64))
            score = tl.where(there, score, float("-inf"))
            score = ((score - tl.max(score, 0)) / SHARPNESS).to(tl.float32)
            cost = tl.log(tl.sum(tl.exp(score), 0)) - score
            for j in tl.static_range(CHILDREN):
                least = tl.min(cost, 0)
                one = tl.min(tl.where(cost == least, k, BLOCK), 0)
                fresh = (cell == i * CHILDREN + j) & (j < width)
                costs = tl.where(fresh, before + least, costs)
                ones = tl.where(fresh, one, ones)
                cost = tl.where(k == one, float("inf"), cost)
        best = tl.min(tl.min(costs, 1), 0)
        if (count == i + 1) & (best < float("inf")):
            taken = tl.min(tl.min(tl.where(costs == best, cell, ROWS * CHILDREN), 1), 0)
            row = taken // CHILDREN
            depth = tl.sum(tl.where(n == row, depths, 0), 0)
            behind = tl.sum(tl.sum(tl.where(cell == taken, ones, 0), 1), 0)
            own = tl.where(n == count, tl.load(ids + (s * P + depth) * K + behind), own)
            up = tl.where(n == count, row, up)
            sums = tl.where(n == count, best, sums)
            depths = tl.where(n == count, depth + 1, depths)
            costs = tl.where(cell == taken, float("inf"), costs)
            place, before = depth + 1, best
            count += 1
    to = s * ROWS + n
    tl.store(guesses + to, own)
    tl.store(behinds + to, up)
    tl.store(chances + to, tl.where(n < count, tl.exp(-sums), 0.0))
    kept = tl.maximum(tl.minimum(tl.minimum(count, R), end - position), 0)
    tl.store(made + s, count)
    tl.store(verified + s, kept)
    tl.store(w_counts + s, kept)
    tl.store(w_rows + s, position)
    to, inside, used = s * R + n, n < R, n < kept
    depth = tl.where(used, depths, 0)
    tl.store(w_ids + to, tl.where(used, own, 0), mask=inside)
    tl.store(w_parents + to, tl.where(used, up, n - 1), mask=inside)
    tl.store(w_positions + to, position + tl.load(shifts + s) + depth, mask=inside)
    tl.store(w_places + to, position + 1 + depth, mask=inside)
    if CLOCK:  # noqa: SIM102
        if s == 0:
            tl.store(times, tl.load(done))
            tl.store(times + 1, tl.extra.cuda.globaltimer())
