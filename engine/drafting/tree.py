"""From a block drafter's candidates to a draft: the best chain through them, or the best tree.

A candidate's score behind the one before it: its own logit and 0.6 of the pair's, over the temperature; when tokens
are sampled, 0.7 of the very noise that the target will add to that token at that place; all over 1.5. The log-softmax
of the scores of a place's candidates is what a step costs, and the exponential of a path's sum its chance. The
constants are TensorFold's, fitted on traced rounds. `kernels.gpu.tree` makes the same trees on a device.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from tfmagic.kernels.gpu.tree import CHILDREN, EDGE, NOISE, SHARPNESS

from ..sampling import COLDEST, Draw, gumbel
from .draft import NOTHING, ROWS, Draft, Lattice

NODES = ROWS - 1


def tree(lattice: Lattice, by: Draw) -> Draft:
    """The likeliest 15 nodes, at most four behind one: always the likeliest that is open is taken next. `by`: how the
    target draws at the pending token's row. Raises ValueError for a lattice that makes no sense.

    Every stream's tree is made while the device waits: of the candidates behind a node, the next one opens when the one
    before it is taken, for it is no likelier.
    """
    costs = -steps(lattice, by)
    if not len(costs):
        return NOTHING
    best = np.argsort(costs, -1, kind="stable")[..., :CHILDREN]
    least = np.take_along_axis(costs, best, -1)
    taken, parents, sums = [], [], []
    # An open node: its cost, a number that no other has, its parent's row and its place; its parent's candidates, what
    # each costs, and which of them it is; and the cost of its parent.
    number, open_nodes = count(), []

    def grow(row: int, place: int, behind: int, cost: float) -> None:
        """Open the first candidate behind a node."""
        if place < len(best):
            ones, own = best[place, behind].tolist(), least[place, behind].tolist()
            heapq.heappush(open_nodes, (cost + own[0], next(number), row, place, ones, own, 0, cost))

    grow(0, 0, 0, 0.0)
    while open_nodes and len(taken) < NODES:
        cost, _, row, place, ones, own, i, before = open_nodes[0]
        taken.append((place, ones[i]))
        parents.append(row)
        sums.append(cost)
        if i + 1 < len(ones):
            following = (before + own[i + 1], next(number), row, place, ones, own, i + 1, before)
            heapq.heapreplace(open_nodes, following)
        else:
            heapq.heappop(open_nodes)
        grow(len(taken), place + 1, ones[i], cost)
    return Draft(lattice.ids[tuple(zip(*taken))].tolist(), parents, np.exp(np.negative(sums)).tolist(), "tree")


def block(lattice: Lattice, by: Draw) -> Draft:
    """The chain that takes the best candidate at every place."""
    ids, gains, behind, gain = [], [], 0, 0.0
    for place, chances in enumerate(steps(lattice, by)[:NODES]):
        one = int(chances[behind].argmax())
        gain += float(chances[behind, one])
        ids.append(int(lattice.ids[place, one]))
        gains.append(gain)
        behind = one
    return Draft(ids, list(range(len(ids))), np.exp(gains).tolist(), "block") if ids else NOTHING


def steps(lattice: Lattice, by: Draw) -> np.ndarray:
    """float32 [places, K, K]: the log of each candidate's chance behind each one of the place before."""
    places, k = lattice.ids.shape
    if lattice.logits.shape != (places, k) or lattice.edges.shape != (places, k, k):
        raise ValueError(f"a lattice of shapes {lattice.ids.shape}, {lattice.logits.shape}, {lattice.edges.shape}")
    if not (np.isfinite(lattice.logits).all() and np.isfinite(lattice.edges).all()):
        raise ValueError("a lattice with numbers that are not finite")
    scores = lattice.logits[:, None] + np.float32(EDGE) * lattice.edges
    s = by.sampling
    if places and not s.greedy:
        noise = gumbel(by.seed, by.position + np.arange(places)[:, None], lattice.ids)
        scores = scores.astype(np.float64) / max(s.temperature, COLDEST) + NOISE * noise[:, None]
    scores -= scores.max(-1, keepdims=True, initial=-np.inf)
    scores = (scores / SHARPNESS).astype(np.float32, copy=False)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))
