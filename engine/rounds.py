"""Rounds: draft, verify and commit a window of every decoding stream, all in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tfmagic import protocol
from tfmagic.run import Node, Round, Token

from .drafting.draft import ENDED, NOTHING, Draft, Outcome
from .drafting.drafting import Drafting, Proposal
from .ranges import span
from .stream import Job, Stream

Pair = tuple[Job, Stream]


@dataclass
class Pending:
    """A round that is proposed, or under way."""

    pairs: list[Pair]
    proposal: Proposal | None
    """None: it drafts for itself, and has not landed."""
    draft_ms: float = 0.0
    landing: Callable[[], list[Outcome]] | None = None
    """The model's, once it is launched: waits for the round and moves the states."""

    @property
    def streams(self) -> list[Stream]:
        return [stream for _, stream in self.pairs]

    @property
    def going(self) -> set[int]:
        """Which of them still decode: the round before may have ended some."""
        return {i for i, pair in enumerate(self.pairs) if alive(pair)}


class Rounds:
    """What a round gave is told while the next one runs, where the model can be asked to begin it; at the latest before
    anything else is told.

    Where no stream will bring guesses to the next round, and the model can give it the tokens itself, that round begins
    before they are here (overlapped or asynchronous scheduling, elsewhere): the device then never waits for the host. A
    stream that they end computes a row more, which nobody takes. Where all streams will ask their drafter, the round
    behind begins likewise, and drafts for itself.
    """

    def __init__(self, engine: Any, drafting: Drafting):
        """`engine`: the `loop.Engine` whose streams decode; it ends those that fail."""
        self.engine, self.drafting = engine, drafting
        does = "launch", "follow", "draft"
        self._launch, self._follow, self._draft = (getattr(engine.model, f"{one}_round", None) for one in does)
        self._untold: list[tuple[Job, Callable[[], protocol.Event]]] = []
        self._next: Pending | None = None
        """Under way, and nothing behind it."""
        self._landed: float | None = None
        """When the last round was here, by `time.perf_counter()`, if nothing but rounds has run since."""

    def run(self) -> None:
        """One round of every decoding stream."""
        pairs = self.engine.schedule.decoding()
        if pairs:
            self._complete(self._next or self._proposed(pairs))

    def land(self) -> None:
        """Complete the round that is under way, if there is one, before anything else runs."""
        if self._next is not None:
            self._complete(self._next)
        self._landed = None

    @span("draft")
    def _proposed(self, pairs: list[Pair]) -> Pending:
        waited_ms = since(self._landed) if self._follow and self._landed else 0.0
        began = time.perf_counter()
        proposal = self.drafting.propose([stream for _, stream in pairs], waited_ms)
        return Pending(pairs, proposal, since(began))

    def _complete(self, round: Pending) -> None:
        """A pass that fails as a whole has moved no state and is run again a stream at a time: who fails again, fails
        alone."""
        self._next = None
        if not any(map(alive, round.pairs)):
            return
        try:
            outcomes, parts = self._verify(round)
        except Exception as error:
            self._failed(round, error)
        else:
            going, streams = round.going, round.streams
            walks = [outcome.walk if i in going else ENDED for i, outcome in enumerate(outcomes)]
            ms = None if fresh(round) or fresh(self._next) else sum(part or 0.0 for part in parts)
            self.drafting.learn(streams, round.proposal, walks, ms)
            with span("commit"):
                for i, (pair, outcome) in enumerate(zip(round.pairs, outcomes)):
                    self._commit(*pair, round.proposal.kept[i], outcome, self._times(round, i, *parts))
        for job in dict.fromkeys(job for job, _ in round.pairs):
            if job in self.engine.schedule.running:
                self.engine.finish_streams(job)
        if self._next is not None and not any(map(alive, self._next.pairs)):
            self._next = None  # nobody waits for it

    def _failed(self, round: Pending, error: Exception) -> None:
        self._next = None
        if len(round.pairs) == 1:
            return self.engine.fail(round.pairs[0][0], error)
        kept = round.proposal.kept if round.proposal else [NOTHING] * len(round.pairs)
        for pair, draft in zip(round.pairs, kept):
            if alive(pair):
                self._alone(pair, draft)

    def _alone(self, pair: Pair, draft: Draft) -> None:
        try:
            (outcome,), (verify, commit) = self._verify(Pending([pair], Proposal.of([draft])))
        except Exception as error:
            self.engine.fail(pair[0], error)
        else:
            self._commit(*pair, draft, outcome, {"verify_ms": verify, "commit_ms": commit})

    @span("verify")
    def _verify(self, round: Pending) -> tuple[list[Outcome], tuple[float, float | None]]:
        """What every window gave, and the milliseconds of the pass and of moving the states (None: not told)."""
        if self._launch is None:
            self.tell()
        began = time.perf_counter()
        if round.landing is None:
            round.landing = self._launched(round)
        else:
            began = self._landed or began  # from then on it had the device
        self._next = self._behind(round)
        self.tell()  # while the device is busy
        self.engine.keeping.step()
        outcomes = round.landing()
        self._landed = time.perf_counter()
        if round.proposal is None:
            round.proposal, round.draft_ms = self.drafting.made(round.streams, round.going, round.landing)
            began = min(began + 1e-3 * round.draft_ms, self._landed)
        whole, commit = 1e3 * (self._landed - began), getattr(self.engine.model, "commit_ms", None)
        return outcomes, (whole - (commit or 0.0), commit)

    def _launched(self, round: Pending) -> Callable[[], list[Outcome]]:
        windows = [draft.window(stream.ids[-1]) for stream, draft in zip(round.streams, round.proposal.kept)]
        told = [stream.state for stream in round.streams], windows, [stream.draws() for stream in round.streams]
        return partial(self.engine.model.round, *told) if self._launch is None else self._launch(*told)

    def _behind(self, round: Pending) -> Pending | None:
        """The round behind, begun before this one's tokens are here; None where they decide who takes part in it, or
        with what, and where a prompt's next slice comes before it."""
        schedule = self.engine.schedule
        if self._follow is None or schedule.prefilling() or round.pairs != schedule.decoding():
            return None
        return self._following(round) or self._drafted(round)

    def _following(self, round: Pending) -> Pending | None:
        """The round behind, if it is one of single tokens."""
        streams = round.streams
        if any(stream.room < 2 for stream in streams) or not self.drafting.idle(streams):
            return None
        try:
            landing = self._follow(round.landing)
        except Exception:
            return None  # what is wrong is told where the round is begun as usual
        return None if landing is None else Pending(round.pairs, self.drafting.rest(streams), landing=landing)

    def _drafted(self, round: Pending) -> Pending | None:
        """The round behind, if it drafts for itself."""
        streams, drafter = round.streams, self.drafting.drafter
        rows = self.drafting.ahead(streams, round.proposal and round.proposal.kept)
        if not rows:
            return None
        told = ((one.guesses.context, one.room, one.guesses.width) for one in streams)
        contexts, rooms, widths = map(list, zip(*told))
        try:
            landing = self._draft(round.landing, drafter, contexts, rooms, widths, rows)
        except Exception as error:
            return self.drafting.failed(streams, error)
        return None if landing is None else Pending(round.pairs, None, landing=landing)

    @staticmethod
    def _times(round: Pending, i: int, verify_ms: float, commit_ms: float | None) -> dict:
        proposal, share = round.proposal, round.proposal.share
        return {
            "cut": proposal.cut(i),
            "draft_ms": round.draft_ms,
            "verify_ms": verify_ms,
            "commit_ms": commit_ms,
            "serial_ms": share.serial_ms,
            "planned_ms": None if share.planned_ms is None else share.planned_ms + proposal.drafting_ms,
        }

    def _commit(self, job: Job, stream: Stream, draft: Draft, outcome: Outcome, times: dict) -> None:
        """Add a walk's tokens to its stream, to be told; what goes wrong ends this run and no other."""
        if not alive((job, stream)):
            return
        try:
            if not outcome.walk.rows:
                raise FloatingPointError(outcome.walk.error)
            self.drafting.read(stream, outcome, self._next is not None and self._next.proposal is None)
            tokens = stream.accept(outcome.walk, outcome.likely)
        except Exception as error:
            return self.engine.fail(job, error)
        times["ms"] = since(job.request.submitted)
        told = partial(self._committed, job, stream, draft, outcome.walk.rows, tokens, times)
        self._untold.append((job, told))

    def tell(self) -> None:
        """Tell what the last round gave."""
        untold, self._untold = self._untold, []
        for job, committed in untold:
            if job not in self.engine.schedule.running:
                continue  # it failed just now
            try:
                self.engine.emit(committed())
            except Exception as error:
                self.engine.fail(job, error)

    def _committed(
        self, job: Job, stream: Stream, draft: Draft, rows: list[int], tokens: list[Token], times: dict
    ) -> protocol.Committed:
        taken = {row for row, token in zip(rows[1:], tokens) if token.made == "draft"}
        guesses = enumerate(zip(draft.ids, draft.parents, draft.chances), 1)
        done = Round(
            committed=len(tokens),
            draft_source=draft.source,
            nodes=[Node(self.engine.piece(id), parent, chance, row in taken) for row, (id, parent, chance) in guesses],
            **times,
        )
        return protocol.Committed(job.run, stream.index, done, tokens)


def alive(pair: Pair) -> bool:
    """Whether this stream still decodes."""
    return pair[1].state is not None and not pair[1].finished


def fresh(round: Pending | None) -> bool:
    """Whether its launch had to be captured, which took the host longer than others will."""
    return round is not None and getattr(round.landing, "fresh", False)


def since(began: float) -> float:
    """Milliseconds."""
    return 1e3 * (time.perf_counter() - began)
