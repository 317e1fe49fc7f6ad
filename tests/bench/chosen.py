"""A drafter whose guesses are as good as is asked, at the cost of a real one: what drafting gains at each rate of
acceptance, before there is a drafter that reaches it."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from tfmagic.engine.drafting.static import CONTEXTS, StaticDrafter
from tfmagic.kernels.gpu.tree import SHARPNESS

CLAIMED = 0.8
"""The chance that it gives every guess, whatever they are worth."""


class Chosen(StaticDrafter):
    """Runs the whole pass; then, on the device, the first candidate of each place is replaced by the token that really
    follows, with the chance `rate`, or else by a wrong one. No other candidate is right.

    What it `knows` are whole contexts: prompts with their serial replies. A stream is one of those that had its pending
    tokens at their places so far."""


    MOST, LONGEST = 16, 4096
    """Contexts that it may know, and their rows."""

    @cached_property
    def tables(self) -> SimpleNamespace:
        whole, yes = {"dtype": torch.int32, "device": self.device}, {"dtype": torch.bool, "device": self.device}
        return SimpleNamespace(
            known=torch.full((self.MOST, self.LONGEST), -1, **whole),
            alike=torch.ones(CONTEXTS + 1, self.MOST, **yes),
            right=torch.zeros(self.MOST, self.LONGEST, self.block - 1, **yes),
        )

    def knows(self, contexts: list[list[int]]) -> None:
        rows = np.full((self.MOST, self.LONGEST), -1, np.int32)
        for row, ids in zip(rows, contexts[-self.MOST :]):
            row[: len(ids)] = ids
        self.tables.known.copy_(torch.from_numpy(rows))

    def begin(self, rate: float) -> None:
        chance = torch.rand(self.tables.right.shape, generator=torch.Generator().manual_seed(1))
        self.tables.right.copy_(chance < rate)

    def take(self) -> int:
        slot = super().take()
        self.tables.alike[slot] = True
        return slot

    def draft(self, f: dict[str, Tensor], out: dict[str, Tensor]) -> None:
        super().draft(f, out)
        self.replace(f, out)

    def replace(self, f: dict[str, Tensor], out: dict[str, Tensor]) -> None:
        which, at, id, there = self.following(f)
        place, k = torch.arange(self.block - 1, device=self.device), self.config.candidates
        size = self.config.guessed
        first = torch.where(there & self.tables.right[which[:, None], at[:, None], place], id, (id + 1) % size)
        # Behind a wrong id, one above the right one, come those two and more above it: never the right one.
        beside = torch.arange(k, device=self.device)
        out["ids"].copy_((first[:, :, None] + beside + (beside > 0)) % size)
        wrong = SHARPNESS * float(np.log((1 - CLAIMED) / max(k - 1, 1)))
        out["logits"].copy_(torch.where(beside > 0, wrong, SHARPNESS * float(np.log(CLAIMED))))
        out["edges"].zero_()

    def following(self, f: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each of S streams which context it is, and where; and [S, places] what follows there, if anything."""
        t, slots, at, places = self.tables, f["slots"].long(), f["positions"].long(), self.block - 1
        at = at.clamp(0, self.LONGEST - places - 1)
        alike = t.alike[slots] & (f["ids"][:, :1] == t.known[:, at].T)
        t.alike[slots] = alike
        which, place = alike.int().argmax(1), torch.arange(places, device=self.device)
        following = t.known[which[:, None], at[:, None] + 1 + place]
        there = alike.any(1)[:, None] & (following >= 0)
        return which, at, torch.where(there, following, 0), there
