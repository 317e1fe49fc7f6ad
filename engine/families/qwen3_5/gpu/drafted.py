"""Rounds that draft for themselves: a drafter's pass, the windows made of it, their verification and the commit are one
launch, which begins behind the last round before the host knows what that one gave.

From each to the next the drafter's own arrays hold, on the device, what its pass begins with: last tokens, where they
are, and the tapped rows of the walks. The host only decides how many rows the windows have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tfmagic.kernels.gpu.packing import ROWS
from tfmagic.kernels.gpu.tree import Candidates, Seats, Trees, grow

from .rounds import BUCKETS, Bucket, Flight, Kinds, Made, Round, Rounds
from .state import State


class DraftedRound(Round):
    """`batch`: the `drafting.static.Batch` of as many streams, whose pass it begins with.

    When it is captured, its first run may find a batch that is in use. That run projects the rows that wait there,
    which then wait no more; for the rest it has no streams, and leaves the batch as it was.
    """

    def __init__(self, *told: Any, batch: Any):
        self.batch = batch
        self.seats: Seats | None = None
        """Those that it was told last."""
        super().__init__(*told)

    def told(self) -> Kinds:
        return super().told() | dict.fromkeys(Seats._fields, (torch.int32, (self.bucket.streams,)))

    def given(self) -> Kinds:
        each, trees = (self.bucket.streams,), (self.bucket.streams, ROWS)
        dtypes = torch.int32, torch.int32, torch.float32, torch.int32, torch.int32, torch.int64
        shapes = trees, trees, trees, each, each, (2,)
        return super().given() | dict(zip(Trees._fields, zip(dtypes, shapes)))

    def run(self) -> None:
        given, f, out = self.batch.into.device, self.into.device, self.out.device
        self.batch.draft()
        candidates = Candidates(*(self.batch.out.device[name] for name in Candidates._fields))
        seats, trees = (kind(*(x[name] for name in kind._fields)) for kind, x in ((Seats, f), (Trees, out)))
        grow(candidates, given["ids"], given["positions"], given["done"], seats, f, trees)
        super().run()
        self.batch.relay(self)

    def sit(self, seats: Seats, *told: Any) -> None:
        """For as long as the streams are the same; `told`: see `seat`."""
        if self.seats is seats:
            return
        self.into.wait()
        self.seat(*told)
        for name, numbers in seats._asdict().items():
            x = self.into.numpy[name]
            x[: len(numbers)], x[len(numbers) :] = numbers, 0
        self.into.send()
        self.seats = seats

    def tapped(self) -> None:
        """They wait in the batch's contexts."""

    def windows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        f = self.out.numpy
        return f["guesses"], f["behind"], f["verified"]

    def drafts(self, streams: int) -> Made:
        f = self.out.numpy
        columns = (f[name].tolist() for name in ("guesses", "behind", "chances", "made"))
        drafts = [list(zip(*(x[1:n] for x in own))) for *own, n in zip(*columns)]
        begun, done = f["times"].tolist()
        return Made(drafts[:streams], f["verified"][:streams].tolist(), 1e-6 * (done - begun))


class Drafted:
    """Such rounds of every bucket, made when they are first needed."""

    def __init__(self, rounds: Rounds):
        self.rounds = rounds

    def launch(
        self, flight: Flight, drafter: Any, contexts: list[Any], rooms: list[int], widths: list[int], rows: int
    ) -> Flight | None:
        """Begin one behind a round that has not landed, with the same streams. None where that cannot be; else what
        the round gives of tapped rows stays on the device.

        drafter: a `drafting.static.StaticDrafter`; contexts: its own, of every stream. rooms: tokens that each stream
        could still take before the flight, or before the first that this one follows without a gap. widths: as `Seats`
        has them. rows: of a window, at most 16.
        """
        states = self.rounds.going(flight)
        if states is None:
            return None
        batch = drafter.batches[self._streams(len(states))]
        goes_on = getattr(flight.round, "batch", None) is batch
        if not goes_on and (flight.round.bucket.streams < batch.streams or not batch.ready(contexts)):
            return None
        b = flight.round.bucket._replace(streams=batch.streams, rows=next(n for n in BUCKETS if n >= rows))
        seats = flight.seats or Seats(
            widths, [state.shift for state in states], [state.rows + room for state, room in zip(states, rooms)]
        )
        if not reserved(states, seats.ends, flight.round.bucket.rows + b.rows):
            return None
        flight.fetch(tapped=False)
        if not goes_on:
            batch.take(contexts, flight.round)
        round, fresh = self._round(b, batch)
        round.sit(seats, states, flight.draws)
        round.launch()
        begun = Flight(round, states, flight.draws, fresh)
        begun.seats = seats
        return self.rounds.launched(begun)

    def _streams(self, streams: int) -> int:
        """The same for windows of any number of rows, so that the drafter's arrays are."""
        return next(b for b in BUCKETS if b >= streams and 2 * b >= self.rounds.least)

    def _round(self, b: Bucket, batch: Any) -> tuple[DraftedRound, bool]:
        """And whether it is new."""
        rounds, held = self.rounds, batch.rounds.get(b)
        if held is not None and held[0] is rounds.taps:
            return held[1], False
        made = DraftedRound(b, rounds.forward, rounds.graphs, rounds.tapped(b), batch=batch)
        batch.rounds[b] = rounds.taps, made
        return made, True


def reserved(states: list[State], ends: list[int], rows: int) -> bool:
    """Whether each has pages for so many rows more, none of them behind its end. Who has none is told so where the
    round is begun as usual."""
    try:
        for state, end in zip(states, ends):
            state.reserve(min(state.rows + rows, end))
    except MemoryError:
        return False
    return True
