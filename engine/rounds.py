"""Rounds: draft, verify and commit a window of every decoding stream, all in one pass."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tfmagic import protocol
from tfmagic.run import Round, Token

from .stream import Job, Stream


class Rounds:
    def __init__(self, engine: Any):
        """`engine`: the `loop.Engine` whose streams decode; it ends those that fail."""
        self.engine = engine

    def run(self) -> None:
        """Draft, verify and commit one window of every decoding stream, all in one pass.

        A pass that fails as a whole is run again a stream at a time: who fails again, fails alone.
        """
        drafted = [
            (pair, draft) for pair in self.engine.schedule.decoding() if (draft := self._draft(*pair)) is not None
        ]
        # A draft that failed has ended its whole run.
        drafted = [(pair, draft) for pair, draft in drafted if pair[0] in self.engine.schedule.running]
        if not drafted:
            return
        pairs, drafts = map(list, zip(*drafted))
        try:
            passed = self._forward(pairs, drafts)
        except Exception as error:
            if len(pairs) == 1:
                return self.engine.fail(pairs[0][0], error)
            for pair, draft in zip(pairs, drafts):
                self._alone(pair, draft)
        else:
            self._conclude(pairs, drafts, *passed)

    def _draft(self, job: Job, stream: Stream) -> list[int] | None:
        """None: it failed, and with it its run."""
        if job not in self.engine.schedule.running:
            return None
        try:
            return stream.drafts()
        except Exception as error:
            self.engine.fail(job, error)

    def _alone(self, pair: tuple[Job, Stream], draft: list[int]) -> None:
        if pair[0] not in self.engine.schedule.running:
            return
        try:
            passed = self._forward([pair], [draft])
        except Exception as error:
            self.engine.fail(pair[0], error)
        else:
            self._conclude([pair], [draft], *passed)

    def _forward(self, pairs: list[tuple[Job, Stream]], drafts: list[list[int]]):
        """Logits rows of every window on the host, and the change to commit. Moves no state."""
        windows = [[stream.ids[-1], *draft] for (_, stream), draft in zip(pairs, drafts)]
        logits, change = self.engine.model.round_pass([stream.state for _, stream in pairs], windows)
        return logits.cpu().numpy(), change

    def _conclude(self, pairs: list[tuple[Job, Stream]], drafts: list[list[int]], logits: np.ndarray, change) -> None:
        """Verify and commit; where that fails, nobody's state can be trusted."""
        try:
            self._verify(pairs, drafts, logits, change)
        except Exception as error:
            for job in dict.fromkeys(job for job, _ in pairs):
                if job in self.engine.schedule.running:
                    self.engine.fail(job, error)

    def _verify(self, pairs: list[tuple[Job, Stream]], drafts: list[list[int]], logits: np.ndarray, change) -> None:
        outcomes, failed, row = [], {}, 0
        for (job, stream), draft in zip(pairs, drafts):
            try:
                outcomes.append(stream.verify(logits[row : row + 1 + len(draft)], draft))
            except Exception as error:
                outcomes.append(([], 0))
                failed[job] = error
            row += 1 + len(draft)
        states, rows = [stream.state for _, stream in pairs], [max(1, len(tokens)) for tokens, _ in outcomes]
        self.engine.model.commit(states, change, rows)
        for (job, stream), draft, (tokens, accepted) in zip(pairs, drafts, outcomes):
            if tokens:
                self._committed(job, stream, draft, tokens, accepted)
        for job in dict.fromkeys(job for job, _ in pairs):
            if job in failed:
                self.engine.fail(job, failed[job])
            else:
                self.engine.finish_streams(job)

    def _committed(self, job: Job, stream: Stream, draft: list[int], tokens: list[Token], accepted: int) -> None:
        done = Round(
            ms=1e3 * (time.perf_counter() - job.request.submitted),
            drafted=len(draft),
            accepted=accepted,
            committed=len(tokens),
            draft_source="copy" if draft else "none",
            rejected="".join(map(self.engine.piece, draft[accepted:])),
        )
        self.engine.emit(protocol.Committed(job.run, stream.index, done, tokens))
