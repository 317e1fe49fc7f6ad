"""Drafting: what each stream brings to a round, and what is learnt from how it went.

A stream copies where its context repeats; elsewhere the block drafter, if the model has one, is asked, for all such
streams at once. The row budget then says how much of it is verified. A drafter that fails costs its streams their
drafts, nothing else.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from statistics import median_low
from typing import Any, TypeVar

import numpy as np
import torch

from tfmagic.engine.resident.log import log

from ..sampling import Draw
from . import budget, tree
from .budget import Calibration, Curve, Share, Worth, crowd
from .copy import Copies
from .draft import NOTHING, ROWS, Draft, Lattice, Outcome, Walk

T = TypeVar("T")
HELD = 4096
"""Tapped rows that are held for a drafter at most; it then goes without the oldest."""
BLOCKS = {"on": tree.tree, "tree": tree.tree, "block": tree.block}
"""By the request's `draft`: what is made of a block drafter's candidates."""
WIDTHS = {"on": tree.CHILDREN, "tree": tree.CHILDREN, "block": 1}
"""Likewise, guesses behind one at most: that says it all to a round that drafts for itself."""
LATELY = 4
"""Drafts of the last so many rounds foretell what the next are worth."""
COPYING = ("on", "copy")


class Taps:
    """Tapped rows of one sequence that follow each other, waiting to be read by a drafter."""

    def __init__(self, start: int = 0):
        self.start, self.rows, self._parts = start, 0, deque()

    def add(self, taps: Any, start: int) -> None:
        """The rows start, start + 1, ...: taps [n, taps · D]."""
        if start != self.start + self.rows:
            self.start, self.rows = start, 0
            self._parts.clear()
        self._parts.append(taps)
        self.rows += len(taps)
        while self.rows - len(self._parts[0]) >= HELD:
            self.rows -= len(self._parts[0])
            self.start += len(self._parts.popleft())

    def take(self) -> list[tuple[Any, int]]:
        """Every part with the row that it starts at; they are then gone."""
        taken = []
        while self._parts:
            part = self._parts.popleft()
            taken.append((part, self.start))
            self.start, self.rows = self.start + len(part), self.rows - len(part)
        return taken


class Guesses:
    """One stream's means to guess what comes next."""

    def __init__(self, ids: list[int], draft: str):
        """`ids`: the context, shared with the stream; `draft`: the request's."""
        self.copies = Copies(ids) if draft in COPYING else None
        self.make: Callable[[Lattice, Draw], Draft] | None = BLOCKS.get(draft)
        self.width = WIDTHS.get(draft, 0)
        self.context: Any = None
        """The drafter's, of this sequence; None: it is not asked."""
        self.taps = Taps()
        """What the context does not have yet."""


class Proposal:
    """What all streams bring to one round."""

    def __init__(
        self, drafts: list[Draft], raw: list[Draft], asked: set[int], share: Share, drafting_ms: float,
        rows: int | None = None,
    ):  # fmt: skip
        """`rows`: computed in all; None: as many as what is kept takes."""
        self.drafts, self.raw, self.asked, self.share, self.drafting_ms = drafts, raw, asked, share, drafting_ms
        self.rows = rows
        self.kept = [draft.first(n) for draft, n in zip(drafts, share.kept)]
        """What is verified, by stream."""

    @classmethod
    def of(cls, drafts: list[Draft], curve: Curve | None = None) -> Proposal:
        """Drafts that were not made for this round, all of which are verified."""
        return cls(drafts, drafts, set(), budget.share(drafts, curve), 0.0)

    def cut(self, i: int) -> int:
        return len(self.drafts[i].ids) - len(self.kept[i].ids)


class Drafting:
    def __init__(self, drafter: Any = None, curve: Curve | None = None):
        """`drafter`: a `block.Drafter`, None where the model has none; `curve`: None: every guess is verified."""
        self.drafter, self.curve = drafter, curve
        self._calibrations: dict[tuple, Calibration] = defaultdict(Calibration)
        self._worths: dict[tuple, Worth] = defaultdict(Worth)
        self._costs: dict[tuple, deque[float]] = defaultdict(lambda: deque(maxlen=budget.RECENT))
        self._promised: dict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=LATELY))
        """Of rounds of about so many streams, what one's guesses were to give by size of window, on average."""

    def begin(self, streams: list[Any], taps: Taps, decoding: int) -> None:
        """A prompt's streams begin to decode, their first tokens delivered; `taps`: the prompt's, as far as they were
        computed now; `decoding`: streams that decode then, these among them."""
        mine = [stream for stream in streams if stream.guesses.make is not None]
        if self.drafter is None or not mine or not taps.rows:
            return
        try:
            context = self.drafter.context()
            self._read(context, taps)
            for stream in mine:
                stream.guesses.context = context if stream is mine[0] else context.fork()
                self._worths[crowd(decoding), kind(stream)].begin()
        except Exception as error:
            self.failed(mine, error)

    def propose(self, streams: list[Any], waited_ms: float = 0.0) -> Proposal:
        """Drafts for the next round of these streams, cut to what is worth its rows. `waited_ms`: for how long a round
        without drafts would have been under way by now."""
        began = time.perf_counter()
        limits = [min(ROWS, stream.room) - 1 for stream in streams]
        raw = [self._copied(stream, limit) for stream, limit in zip(streams, limits)]
        asking = self._asking(streams, [i for i, draft in enumerate(raw) if not draft.ids and limits[i] > 0])
        for i, draft in self._blocks(streams, limits, asking):
            raw[i] = draft
        drafts = self._corrected(streams, raw)
        now = waited_ms + 1e3 * (time.perf_counter() - began)
        usual = 0.0
        if asking:
            usual = self._usual_cost(len(asking), "host", now)
            self._foretell(len(streams), [drafts[i] for i in asking])
        return Proposal(drafts, raw, set(asking), budget.share(drafts, self.curve, usual), usual)

    def _corrected(self, streams: list[Any], raw: list[Draft]) -> list[Draft]:
        """With the chances that the drafter's have turned out to be."""
        return [
            self._calibrations[kind(stream)].corrected(draft) if draft.source in ("tree", "block") else draft
            for stream, draft in zip(streams, raw)
        ]

    def _usual_cost(self, asked: int, by: str, now: float | None = None) -> float:
        """What drafts for about so many streams usually take, milliseconds, asked for by the "host" or by the "round"
        that they are made for; 0 where that is not known. `now`: these."""
        costs = self._costs[crowd(asked - 1), by]
        if now is not None:
            costs.append(now)
        return median_low(costs) if costs else 0.0

    def ahead(self, streams: list[Any], kept: list[Draft] | None) -> int:
        """Rows of a stream's window in the round behind one that is under way, if that one is to draft for itself; 0:
        it is proposed as usual, once it is known what this one gave. `kept`: what this one verifies; None: it drafts
        for itself too."""
        if not getattr(self.drafter, "within_rounds", False):
            return 0
        if any(one.guesses.context is None or one.guesses.taps.rows or one.room < 2 for one in streams):
            return 0
        if any(draft.source == "copy" for draft in kept or ()):
            return 0  # it may be walked further than a block has rows
        if any(worth.resting for worth in self._asked(streams)) or any(map(self._near, streams)):
            return 0
        return self._window(len(streams))

    def _window(self, streams: int) -> int:
        """Rows of a window that the rounds before let expect most of; 0: no guess is worth its row."""
        if self.curve is None:
            return ROWS
        promised = self._promised[crowd(streams)]
        if not self.curve.windows or not promised:
            return 0
        usual = self._usual_cost(streams, "round") or self._usual_cost(streams, "host")
        best = budget.window(streams, streams * np.mean(promised, 0), self.curve, usual)
        return self.curve.windows[best] if best else 0

    def _foretell(self, streams: int, drafts: list[Draft]) -> None:
        if self.curve is not None and self.curve.windows and drafts:
            gained = budget.by_window(drafts, self.curve.windows)[1] / len(drafts)
            self._promised[crowd(streams)].append(gained)

    def made(self, streams: list[Any], going: set[int], flight: Any) -> tuple[Proposal, float]:
        """What a round that has landed drafted for itself, and how long that took, milliseconds. `going`: streams that
        the round before has not ended; `flight`: as the family's `draft_round` gave it."""
        made, rows = flight.made, flight.round.bucket.rows * len(streams)
        raw = [
            Draft(*map(list, zip(*guesses)), "block" if stream.guesses.width == 1 else "tree")
            if guesses else NOTHING
            for stream, guesses in zip(streams, made.drafts)
        ]  # fmt: skip
        drafts, kept = self._corrected(streams, raw), [max(verified - 1, 0) for verified in made.verified]
        self._foretell(len(streams), [drafts[i] for i in going])
        usual = self._usual_cost(len(streams), "round", made.ms) or self._usual_cost(len(streams), "host")
        proposal = Proposal(drafts, raw, going, budget.planned(kept, self.curve, rows), usual, rows)
        return proposal, usual if made.ms is None else made.ms

    def failed(self, streams: list[Any], error: Exception) -> None:
        """The drafter has; these streams go on without."""
        log(f"the drafter failed, and {len(streams)} streams go on without: {type(error).__name__}: {error}")
        for stream in streams:
            stream.guesses.context, stream.guesses.taps = None, Taps()

    def idle(self, streams: list[Any]) -> bool:
        """Whether the round behind the next is one without guesses, whatever tokens the next one gives: nobody may copy
        then, and the drafter is not asked."""
        return all(worth.resting for worth in self._asked(streams)) and not any(map(self._near, streams))

    def rest(self, streams: list[Any]) -> Proposal:
        """What idle streams bring to that round."""
        for worth in self._asked(streams):
            worth.rests()
        return Proposal.of([NOTHING] * len(streams), self.curve)

    def _asked(self, streams: list[Any]) -> list[Worth]:
        """Of the streams that have a drafter to ask, each kind's."""
        able = [i for i, stream in enumerate(streams) if stream.guesses.context is not None]
        return [self._worths[crowd(len(streams)), alike] for alike in grouped(streams, able)]

    def learn(self, streams: list[Any], proposal: Proposal, walks: list[Walk], ms: float | None) -> None:
        """How the round went, which took `ms`; None: longer than others of its kind will."""
        kept = [len(draft.ids) for draft in proposal.kept]
        if self.curve is not None and ms is not None:
            self.curve.learn(len(streams), proposal.rows or self.curve.rows(kept), ms)
        accepted = [max(len(walk.rows) - 1, 0) for walk in walks]
        for i, (stream, draft, walk) in enumerate(zip(streams, proposal.raw, walks)):
            if draft.source == "copy":
                stream.guesses.copies.learn(kept[i], accepted[i])
            elif draft.ids and not walk.error:
                self._calibrations[kind(stream)].learn(draft, kept[i], walk.rows)
        if self.curve is not None:
            self._weigh(streams, proposal, kept, accepted)

    def _weigh(self, streams: list[Any], proposal: Proposal, kept: list[int], accepted: list[int]) -> None:
        """What the drafts that were made for this round were worth, by kind."""
        for alike, asked in grouped(streams, proposal.asked).items():
            tokens, guesses = (sum(of[i] for i in asked) for of in (accepted, kept))
            part = proposal.drafting_ms * len(asked) / len(proposal.asked)
            gained = budget.gain(tokens, guesses, proposal.share, kept, part)
            worth = self._worths[crowd(len(streams)), alike]
            paused = worth.paused
            worth.learn(gained / len(streams), len(asked))
            if worth.paused and not paused:
                self._calibrations[alike].fade(budget.STALE)

    def read(self, stream: Any, outcome: Outcome, taken: bool) -> None:
        """What a round gave the stream, which has not taken it yet: tapped rows are read with its next draft. Where the
        device has handed them on, they wait in the context; `taken`: the next draft, which is under way, takes them."""
        context, start, rows = stream.guesses.context, len(stream.ids) - 1, len(outcome.walk.rows)
        if context is None:
            return
        if outcome.taps is not None:
            stream.guesses.taps.add(outcome.taps, start)
        else:
            context.end, context.waiting = start + rows, 0 if taken else rows

    def _read(self, context: Any, taps: Taps) -> None:
        """All at once: after a pause there may be hundreds of parts."""
        parts = taps.take()
        if parts:
            rows = parts[0][0] if len(parts) == 1 else torch.cat([rows for rows, _ in parts])
            self.drafter.extend(context, rows, parts[0][1])

    def _copied(self, stream: Any, limit: int) -> Draft:
        return NOTHING if limit < 1 else self._of_copies(stream, lambda copies: copies.draft(limit), NOTHING)

    def _near(self, stream: Any) -> bool:
        return self._of_copies(stream, Copies.near, False)

    @staticmethod
    def _of_copies(stream: Any, ask: Callable[[Copies], T], none: T) -> T:
        """What a stream's copies answer; `none` where it has none, or has none any more."""
        if stream.guesses.copies is None:
            return none
        try:
            return ask(stream.guesses.copies)
        except Exception as error:
            log(f"copying failed, and its stream goes on without: {type(error).__name__}: {error}")
            stream.guesses.copies = None
            return none

    def _asking(self, streams: list[Any], free: list[int]) -> list[int]:
        """Of the streams of these places, those that have a drafter to ask whose drafts do not pause."""
        able = [i for i in free if streams[i].guesses.context is not None]
        kinds = grouped(streams, able).items()
        asked = [own for alike, own in kinds if not self._worths[crowd(len(streams)), alike].rests()]
        return sorted(i for own in asked for i in own)

    def _blocks(self, streams: list[Any], limits: list[int], asking: list[int]) -> list[tuple[int, Draft]]:
        """The drafter's drafts for the streams of these places, all in one batch; none where it fails."""
        if not asking:
            return []
        from .block import Ask

        try:
            asks = []
            for i in asking:
                guesses, ids = streams[i].guesses, streams[i].ids
                self._read(guesses.context, guesses.taps)
                asks.append(Ask(guesses.context, ids[-1], len(ids) - 1, min(limits[i], self.drafter.block - 1)))
            lattices = self.drafter.lattices(asks)
            return [(i, self._draft(streams[i], lattice)) for i, lattice in zip(asking, lattices, strict=True)]
        except Exception as error:
            self.failed([streams[i] for i in asking], error)
            return []

    @staticmethod
    def _draft(stream: Any, lattice: Lattice) -> Draft:
        ids = lattice.ids
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < stream.sampling.size:
            raise ValueError(f"guesses from {ids.min()} to {ids.max()} of {stream.sampling.size} tokens")
        return stream.guesses.make(lattice, stream.draws())


def kind(stream: Any) -> tuple:
    """Streams whose drafts are alike in what they are worth."""
    return stream.sampling.draft, stream.sampling.greedy


def grouped(streams: list[Any], places: Iterable[int]) -> dict[tuple, list[int]]:
    """Places by the kind of their streams."""
    groups: dict[tuple, list[int]] = defaultdict(list)
    for i in places:
        groups[kind(streams[i])].append(i)
    return groups
