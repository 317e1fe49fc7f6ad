"""From a block drafter's candidates to a draft: the best chain through them, or the best tree.

A candidate's score behind the one before it: its own logit and 0.6 of the pair's, over the temperature; when tokens
are sampled, 0.7 of the very noise that the target will add to that token at that place; all over 1.5. The log-softmax
of the scores of a place's candidates is what a step costs, and the exponential of a path's sum its chance. The
constants are TensorFold's, fitted on traced rounds.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from ..sampling import COLDEST, Draw, gumbel
from .draft import NOTHING, ROWS, Draft, Lattice

EDGE, NOISE, SHARPNESS = 0.6, 0.7, 1.5
CHILDREN, NODES = 4, ROWS - 1


def tree(lattice: Lattice, by: Draw) -> Draft:
    """The likeliest 15 nodes, at most four behind one: always the likeliest that is open is taken next. `by`: how the
    target draws at the pending token's row. Raises ValueError for a lattice that makes no sense."""
    chances = steps(lattice, by)
    if not len(chances):
        return NOTHING
    best = np.argsort(-chances, -1, kind="stable")[..., :CHILDREN]
    ids, parents, gained = [], [], []
    number, open_nodes = count(), []

    def grow(row: int, place: int, behind: int, gain: float) -> None:
        for one in best[place, behind] if place < len(chances) else ():
            one_gain = gain + float(chances[place, behind, one])
            heapq.heappush(open_nodes, (-one_gain, next(number), row, place, int(one)))

    grow(0, 0, 0, 0.0)
    while open_nodes and len(ids) < NODES:
        cost, _, parent, place, one = heapq.heappop(open_nodes)
        ids.append(int(lattice.ids[place, one]))
        parents.append(parent)
        gained.append(-cost)
        grow(len(ids), place + 1, one, -cost)
    return Draft(ids, parents, np.exp(gained).tolist(), "tree")


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
    """float64 [places, K, K]: the log of each candidate's chance behind each one of the place before."""
    places, k = lattice.ids.shape
    if lattice.logits.shape != (places, k) or lattice.edges.shape != (places, k, k):
        raise ValueError(f"a lattice of shapes {lattice.ids.shape}, {lattice.logits.shape}, {lattice.edges.shape}")
    if not (np.isfinite(lattice.logits).all() and np.isfinite(lattice.edges).all()):
        raise ValueError("a lattice with numbers that are not finite")
    scores = lattice.logits[:, None].astype(np.float64) + EDGE * lattice.edges
    s = by.sampling
    if places and not s.greedy:
        noise = gumbel(by.seed, by.position + np.arange(places)[:, None], lattice.ids)
        scores = scores / max(s.temperature, COLDEST) + NOISE * noise[:, None]
    scores /= SHARPNESS
    scores -= scores.max(-1, keepdims=True, initial=-np.inf)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))
