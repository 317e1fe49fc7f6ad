"""Short prompt passes of one sequence, by bucket of rows: what a resumed turn and a prompt beside decoding streams come
to. Their launches are many and small, so on a GPU each bucket is captured, as rounds are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tfmagic.kernels.gpu.packing import CHUNK, Prompts
from tfmagic.kernels.gpu.pages import PAGE
from tfmagic.kernels.gpu.sample import embed

from ..model import lay
from .fields import Fields
from .forward import Forward, Kept, Places
from .graphs import Graphs
from .state import State

BUCKETS = (64, 128, 256, 512, 768, 1024)
MARKS = 2
"""Marks of a short pass at most."""


class Passed(NamedTuple):
    logits: Tensor  # float32 [V], the last row's
    kept: Kept
    taps: Tensor | None  # [rows, taps · D]


class Pass:
    """A bucket's arrays, and its launch. Rows behind the sequence's own stand for nothing: they lie in page 0."""

    def __init__(self, rows: int, forward: Forward, graphs: Graphs):
        self.rows, self.forward = rows, forward
        device, whole, one = forward.device, torch.int32, (torch.int32, (1,))
        self.into = Fields(
            device, ids=(whole, (rows,)), positions=(whole, (3, rows)), slots=(whole, (rows,)), rows=(whole, (rows,)),
            slot=one, start=one, length=one, keep=(whole, (rows // CHUNK,)), last=one,
        )  # fmt: skip
        self.order = np.arange(rows, dtype=np.int32)
        self.x = torch.zeros(rows, forward.t.hidden, dtype=torch.bfloat16, device=device)
        f = self.into.device
        packed = Prompts(f["slot"], f["start"], f["length"], f["keep"], rows, MARKS)
        self.places = Places(packed, f["positions"], f["slots"], f["rows"])
        self.into.send()
        self.launch = graphs.captured(self._run)

    def _run(self) -> None:
        x, self.kept, self.taps = self.forward.prompt(self.x, self.places)
        self.logits = self.forward.logits(x, self.into.device["last"])

    def __call__(
        self, state: State, ids: list[int], features: dict[int, Tensor], at: Tensor, marks: list[int]
    ) -> Passed:
        f, n = self.into.numpy, len(ids)
        self.into.wait()  # the pass before may be under way
        f["ids"][:n], f["positions"][:, :n], f["last"][0] = ids, at.numpy(), n - 1
        f["slots"][:n], f["slots"][n:] = state.slot.index, 0
        f["rows"][:n], f["rows"][n:] = state.rows + self.order[:n], n % PAGE + self.order[: self.rows - n]
        f["slot"][0], f["start"][0], f["length"][0] = state.slot.index, state.rows, n
        f["keep"][:] = -1
        for place, mark in enumerate(marks):
            f["keep"][(mark - state.rows) // CHUNK - 1] = place
        self.into.send()
        x = embed(self.into.device["ids"][:n], self.forward.w.embed, out=self.x[:n])
        lay(x, state.rows, features)
        self.launch()
        return Passed(self.logits[0].clone(), self.kept, None if self.taps is None else self.taps[:n].clone())


class Short:
    """Passes of every bucket, made when they are first needed."""

    def __init__(self, forward: Forward, graphs: Graphs):
        self.forward, self.graphs = forward, graphs
        self._made: dict[int, Pass] = {}

    def fits(self, parts: list) -> bool:
        return len(parts) == 1 and len(parts[0][1]) <= BUCKETS[-1] and len(parts[0][4]) <= MARKS

    def tap(self) -> None:
        """The forward's taps have changed."""
        self._made = {}

    def run(self, state: State, ids: list[int], features: dict[int, Tensor], at: Tensor, marks: list[int]) -> Passed:
        """The next rows of a sequence whose pages are reserved. Its slot moves; `rows` does not."""
        rows = next(b for b in BUCKETS if b >= len(ids))
        if rows not in self._made:
            self._made[rows] = Pass(rows, self.forward, self.graphs)
        return self._made[rows](state, ids, features, at, marks)
