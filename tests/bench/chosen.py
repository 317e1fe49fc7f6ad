"""A drafter whose guesses are as good as is asked, at the cost of a real one: what drafting gains at each rate of
acceptance, before there is a drafter that reaches it."""

from __future__ import annotations

import random
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tfmagic.engine.drafting.block import Ask
from tfmagic.engine.drafting.draft import Lattice
from tfmagic.engine.drafting.tree import SHARPNESS

CLAIMED = 0.8
"""The chance that it gives every guess, whatever they are worth."""


class Chosen:
    """`drafter` runs its whole pass; then, of each place, the first candidate is replaced by the token that really
    follows, with the chance `rate`, or else by a wrong one. No other candidate is right."""

    def __init__(self, drafter: Any, size: int):
        """`size`: ids that may be drawn."""
        self.drafter, self.size = drafter, size
        self.known: list[list[int]] = []
        """Whole contexts: prompts with their serial replies."""
        self.begin(0.0)

    def begin(self, rate: float) -> None:
        self.rate, self._random = rate, random.Random(1)
        self._following: WeakKeyDictionary[Any, list[list[int]]] = WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def lattices(self, asks: list[Ask]) -> list[Lattice]:
        return [self._chosen(ask, lattice) for ask, lattice in zip(asks, self.drafter.lattices(asks))]

    def behind(self, contexts: list[Any], flight: Any) -> Any:
        begun = self.drafter.behind(contexts, flight)
        if begun is not None:
            really = begun.lattices
            begun.lattices = lambda asks: [self._chosen(ask, lattice) for ask, lattice in zip(asks, really(asks))]
        return begun

    def _chosen(self, ask: Ask, lattice: Lattice) -> Lattice:
        at = ask.position
        mine = [
            context
            for context in self._following.get(ask.context, self.known)
            if at < len(context) and context[at] == ask.anchor
        ]
        self._following[ask.context] = mine
        right = mine[0][at + 1 :] if mine else []
        places, k = lattice.ids.shape
        first = [
            id if id is not None and self._random.random() < self.rate else ((id or 0) + 1) % self.size
            for id in (right[place] if place < len(right) else None for place in range(places))
        ]
        # Behind a wrong id, one above the right one, come those two and more above it: never the right one.
        ids = (np.array(first, np.int64)[:, None] + np.array([0, *range(2, k + 1)])) % self.size
        chances = np.array([CLAIMED] + [(1 - CLAIMED) / max(k - 1, 1)] * (k - 1))
        logits = np.tile((SHARPNESS * np.log(chances)).astype(np.float32), (places, 1))
        return Lattice(ids, logits, np.zeros((places, k, k), np.float32))
