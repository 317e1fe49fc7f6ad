"""A stand-in for the block drafter: it knows the replies, and is as good, bad or broken as it is told."""

from __future__ import annotations

import random
from copy import copy

import numpy as np
import torch

from tfmagic.engine.drafting.budget import Curve
from tfmagic.engine.drafting.draft import Lattice

K = 6
"""Candidates a place."""
REPLY = 70
"""The longest reply that it knows."""
GOOD = ("right", "near", "late")
BAD = ("noise", "wild", "same", "end", "short", "none")
BROKEN = ("raise", "nan", "foreign", "shape")


class Fixed(Curve):
    """A curve that does not follow the clock."""

    def learn(self, *_) -> None:
        pass


class Clock:
    """What drafts take: for `time` in `engine.drafting.drafting`, so that nothing follows this machine's clock."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def slow(self, drafter, seconds: float) -> None:
        """Let every batch of this drafter take so long."""
        make = drafter.lattices

        def lattices(asks):
            self.now += seconds
            return make(asks)

        drafter.lattices = lattices


class Context:
    """The tapped rows that were read, and the place of the first."""

    def __init__(self):
        self.start, self.rows = 0, torch.empty(0, 0)

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def fork(self) -> Context:
        return copy(self)


class Drafter:
    """As `drafting.block.Drafter`. `ways`: what each draft is like, drawn by chance."""

    layers, block, name = [0, 2], 8, "fake"

    def __init__(self, ways, seed: int = 0, ends: int = 250):
        self.ways, self.rng, self.ends = list(ways), random.Random(seed), ends
        self.known: list[list[int]] = []
        """Whole contexts."""
        self.batches: list[int] = []
        self.contexts: list[Context] = []
        self.width = 0

    def knows(self, contexts: list[list[int]]) -> None:
        self.known.extend(contexts)

    def context(self) -> Context:
        self.contexts.append(Context())
        return self.contexts[-1]

    def context_bytes(self, rows: int) -> int:
        return 8 * rows

    def extend(self, context: Context, taps, start: int) -> None:
        if not len(context.rows) or start != context.end:
            context.start, context.rows = start, taps[:0]
        context.rows = torch.cat([context.rows, taps])
        self.width = taps.shape[1]

    def lattices(self, asks) -> list[Lattice]:
        self.batches.append(len(asks))
        for ask in asks:
            assert ask.context.end == ask.position and 1 <= ask.places < self.block
        return [self.lattice(ask, self.rng.choice(self.ways)) for ask in asks]

    def lattice(self, ask, way: str) -> Lattice:
        rng, here = self.rng, ask.position
        places = {"short": min(ask.places, 1), "none": 0}.get(way, ask.places)
        full = [f for f in self.known if here < len(f) <= here + REPLY and f[here] == ask.anchor]
        truth = (rng.choice(full)[here + 1 :] if full else [])[:places]
        truth += [rng.randrange(240) for _ in range(places - len(truth))]
        ids = np.array([[id, *self.others(id)] for id in truth], np.int64).reshape(places, K)
        logits = np.tile(np.linspace(4.0, 0.0, K, dtype=np.float32), (places, 1))
        edges = np.zeros((places, K, K), np.float32)
        if way == "near":  # the truth is second now and then
            for row in ids:
                if rng.random() < 0.4:
                    row[[0, 1]] = row[[1, 0]]
        elif way == "late" and places > 1:
            ids[places // 2 :, 0] = (ids[places // 2 :, 0] + 1) % 240
        elif way == "noise":
            ids = np.array([[rng.randrange(240) for _ in range(K)] for _ in range(places)], np.int64)
        elif way == "wild":
            ids[:, 0] = (ids[:, 0] + 7) % 240
            logits *= 1e6
            edges[:] = np.array([rng.uniform(-1e6, 1e6) for _ in range(edges.size)]).reshape(edges.shape)
        elif way == "same":
            ids[:] = ids[:, :1]
        elif way == "end" and places:
            ids[:, 1] = self.ends
        elif way == "raise":
            raise RuntimeError("the drafter broke")
        elif way == "nan":
            logits[0, 0] = np.nan
        elif way == "foreign":
            ids[0, 0] = 10**6
        elif way == "shape":
            edges = edges[:, :1]
        return Lattice(ids, logits, edges)

    def others(self, id: int) -> list[int]:
        return [(id + step) % 240 for step in self.rng.sample(range(1, 200), K - 1)]
