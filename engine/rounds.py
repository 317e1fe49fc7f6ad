"""Rounds: draft, verify and commit a window of every decoding stream, all in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tfmagic import protocol
from tfmagic.run import Node, Round, Token

from .drafting.draft import Draft, Outcome
from .drafting.drafting import Drafting, Proposal
from .stream import Job, Stream

Pair = tuple[Job, Stream]


class Rounds:
    """What a round gave is told while the next one runs, where the model can be asked to begin it; at the latest before
    anything else is told."""

    def __init__(self, engine: Any, drafting: Drafting):
        """`engine`: the `loop.Engine` whose streams decode; it ends those that fail."""
        self.engine, self.drafting = engine, drafting
        self._untold: list[tuple[Job, Callable[[], protocol.Event]]] = []

    def run(self) -> None:
        """One round. A pass that fails as a whole has moved no state and is run again a stream at a time: who fails
        again, fails alone."""
        pairs = self.engine.schedule.decoding()
        if not pairs:
            return
        began = time.perf_counter()
        proposal = self.drafting.propose([stream for _, stream in pairs])
        draft_ms = since(began)
        try:
            outcomes, parts = self._verify(pairs, proposal.kept)
        except Exception as error:
            if len(pairs) == 1:
                return self.engine.fail(pairs[0][0], error)
            for pair, draft in zip(pairs, proposal.kept):
                self._alone(pair, draft)
        else:
            streams, walks = [stream for _, stream in pairs], [outcome.walk for outcome in outcomes]
            fresh = getattr(self.engine.model, "fresh_round", False)
            self.drafting.learn(streams, proposal, walks, None if fresh else sum(part or 0.0 for part in parts))
            for i, (pair, outcome) in enumerate(zip(pairs, outcomes)):
                self._commit(*pair, proposal.kept[i], outcome, self._times(proposal, i, draft_ms, *parts))
        for job in dict.fromkeys(job for job, _ in pairs):
            if job in self.engine.schedule.running:
                self.engine.finish_streams(job)

    def _alone(self, pair: Pair, draft: Draft) -> None:
        if pair[0] not in self.engine.schedule.running:
            return
        try:
            (outcome,), (verify, commit) = self._verify([pair], [draft])
        except Exception as error:
            self.engine.fail(pair[0], error)
        else:
            self._commit(*pair, draft, outcome, {"verify_ms": verify, "commit_ms": commit})

    def _verify(self, pairs: list[Pair], drafts: list[Draft]) -> tuple[list[Outcome], tuple[float, float | None]]:
        """What every window gave, and the milliseconds of the pass and of moving the states (None: not told)."""
        streams, model = [stream for _, stream in pairs], self.engine.model
        windows = [draft.window(stream.ids[-1]) for stream, draft in zip(streams, drafts)]
        told = [stream.state for stream in streams], windows, [stream.draws() for stream in streams]
        launch = getattr(model, "launch_round", None)
        if launch is None:
            self.tell()
        began = time.perf_counter()
        landed = partial(model.round, *told) if launch is None else launch(*told)
        self.tell()  # while the device is busy
        outcomes = landed()
        whole, commit = since(began), getattr(model, "commit_ms", None)
        return outcomes, (whole - (commit or 0.0), commit)

    @staticmethod
    def _times(proposal: Proposal, i: int, draft_ms: float, verify_ms: float, commit_ms: float | None) -> dict:
        share = proposal.share
        return {
            "cut": proposal.cut(i),
            "draft_ms": draft_ms,
            "verify_ms": verify_ms,
            "commit_ms": commit_ms,
            "serial_ms": share.serial_ms,
            "planned_ms": None if share.planned_ms is None else share.planned_ms + proposal.drafting_ms,
        }

    def _commit(self, job: Job, stream: Stream, draft: Draft, outcome: Outcome, times: dict) -> None:
        """Add a walk's tokens to its stream, to be told; what goes wrong ends this run and no other."""
        if job not in self.engine.schedule.running:
            return
        try:
            if not outcome.walk.rows:
                raise FloatingPointError(outcome.walk.error)
            self.drafting.read(stream, outcome.taps, len(stream.ids) - 1)
            tokens = stream.accept(outcome.walk, outcome.logits)
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


def since(began: float) -> float:
    """Milliseconds."""
    return 1e3 * (time.perf_counter() - began)
