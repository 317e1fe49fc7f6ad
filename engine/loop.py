"""The engine: submissions in, events out, one step after another on one thread.

A step admits, runs prompt slices, delivers first tokens, then runs one round over all decoding streams. A request that
fails, fails alone: its run is told, what it held is given back, and the engine goes on.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Generator
from threading import Lock

import numpy as np

from tfmagic import protocol
from tfmagic.errors import Refusal
from tfmagic.run import TTFT_PARTS, Picture, Round, Token

from .cache.store import Kept, Store, marks
from .scheduler import STREAMS, Scheduler
from .stream import Job, Request, Stream

WAITING = 256
"""Requests that may wait."""


class Engine:
    def __init__(self, model, store: Store, emit: Callable[[protocol.Event], None], piece: Callable[[int], str]):
        """`model`: a family's; `emit` takes every event, in order, on the engine thread; `piece`: one token's text."""
        self.model, self.store, self.emit, self.piece = model, store, emit, piece
        self.schedule = Scheduler()
        self._lock, self._inbox, self._cancelled = Lock(), deque(), set()
        self._left = 0  # prompt rows that this step may still compute

    # Any thread ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Refusal when it can never run or too many wait. Any thread."""
        rows, context = len(request.prompt.ids), self.model.context
        if not 1 <= request.streams <= STREAMS:
            raise Refusal(f"{request.streams} streams were asked for.", f"Ask for 1 to {STREAMS}.")
        if rows < 1 or rows + request.sampling.max_tokens > context:
            reply = f"{request.sampling.max_tokens:,}"
            problem = f"The prompt has {rows:,} tokens and the reply {reply}; the context is {context:,}."
            raise Refusal(problem, "Shorten the prompt, or start a new conversation.")
        with self._lock:
            if len(self._inbox) + len(self.schedule.waiting) >= WAITING:
                raise Refusal(f"{WAITING} requests are waiting already.", "Try again when some are done.")
            self._inbox.append(request)

    def cancel(self, run: str) -> None:
        """Stop a run, wherever it is. Unknown or finished runs are ignored. Any thread."""
        with self._lock:
            self._cancelled.add(run)

    def status(self) -> dict[str, int]:
        """Any thread."""
        with self._lock:
            waiting = len(self.schedule.waiting) + len(self._inbox)
        return {
            "running": len(self.schedule.running),
            "waiting": waiting,
            "cache_states": len(self.store),
            "cache_bytes": self.store.bytes,
            "cache_budget": self.store.budget,
        }

    # The engine thread -----------------------------------------------------------------------------

    def step(self) -> bool:
        """One iteration. False: nothing is left to do."""
        self._receive()
        for job in self.schedule.admit():
            self._begin(job)
        self._tell_positions()
        self._run_prompts()
        self._run_round()
        with self._lock:
            return self.schedule.busy or bool(self._inbox)

    def _receive(self) -> None:
        with self._lock:
            fresh, self._inbox = self._inbox, deque()
            cancelled, self._cancelled = self._cancelled, set()
        for request in fresh:
            prompt = request.prompt
            pictures = [Picture(i.name, i.width, i.height, i.start, i.tokens) for i in prompt.images]
            self.emit(protocol.Prepared(request.run, len(prompt.ids), pictures))
            self.schedule.waiting.append(Job(request))
        for run in cancelled:
            if job := self.schedule.find(run):
                self._end(job, "stopped")

    def _begin(self, job: Job) -> None:
        now, request = time.perf_counter(), job.request
        since = 1e3 * (now - request.submitted)
        prepare = min(request.prepare_ms, since)
        job.parts, job.at = {"queue": since - prepare, "prepare": prepare}, now
        job.work = self._prompt_pass(job)

    def _tell_positions(self) -> None:
        for position, job in enumerate(self.schedule.waiting):
            if job.position != position:
                job.position = position
                self.emit(protocol.Queued(job.run, position))

    def _run_prompts(self) -> None:
        """Slices of the prompt passes, oldest first, until the step's rows are used up."""
        self._left = self.schedule.budget()
        for job in self.schedule.prefilling():
            while self._left > 0 and job.work is not None:
                try:
                    self._left -= next(job.work)
                except StopIteration as end:
                    job.work = None
                    self._left -= end.value
                except Exception as error:
                    self._fail(job, error)
            if job.work is None and job in self.schedule.running:
                self._finish_streams(job)

    def _prompt_pass(self, job: Job) -> Generator[int, None, int]:
        """Everything up to the first tokens; yields, at last returns, the rows that each piece of work was worth."""
        prompt, run, model = job.request.prompt, job.run, self.model
        rows = len(prompt.ids)
        kept = self.store.find(prompt.key) if job.request.cache else None
        state, source, note = self._restore(kept, prompt.key)
        state.shift = prompt.rope_delta
        job.ended("restore", time.perf_counter())
        self.emit(protocol.Restored(run, state.rows, source, note))

        start, features = state.rows, {}
        spared = [image.start + image.tokens <= start for image in prompt.images]
        for image, spare in zip(prompt.images, spared):
            if not spare:
                features[image.start] = model.tower(image.patches, image.grid)
                yield image.tokens
        job.ended("tower", time.perf_counter())
        self.emit(protocol.Encoded(run, len(features), spared))

        todo, reached = marks(rows, prompt.marks, start, model.grain), {}
        logits = None
        while state.rows < rows:
            low, slice = state.rows, max(self._left // model.grain, 1) * model.grain
            high = min(low + slice, rows)
            here = [mark for mark in todo if low < mark <= high]
            ids, positions = prompt.ids[low:high], prompt.positions[:, low:high]
            logits, at_marks = model.prompt_pass(state, ids, features, positions, here)
            reached |= at_marks
            if high == rows:
                job.ended("prefill", time.perf_counter())
            self.emit(protocol.Prefilled(run, high))
            if high < rows:
                yield high - low
        self._first_tokens(job, state, logits.cpu().numpy())
        if job.request.cache:
            self.store.keep(prompt.key, {mark: view.named for mark, view in reached.items()})
        return high - low

    def _restore(self, kept: Kept | None, key: list[int]):
        """(state, cache source, note): a kept state's copy, or a new state where there is none or it fails."""
        if kept is None:
            return self.model.new_state(), None, None
        try:
            state = self.model.restore(kept.tensors, kept.at)
            return state, "exact" if self.store.exact(kept, key) else "ram", None
        except Exception as error:
            traceback.print_exc()
            self.store.drop(kept)
            note = f"A kept state of {kept.at} rows could not be restored ({error}); computed from row 0."
            return self.model.new_state(), None, note

    def _first_tokens(self, job: Job, state, row: np.ndarray) -> None:
        """Draw and deliver every stream's first token from the prompt's last row; then give the streams states."""
        request = job.request
        for i in range(request.streams):
            stream = Stream(i, request, self.piece)
            token = stream.take(stream.draw(row), row, "first")
            job.streams.append(stream)
            now, ttft = time.perf_counter(), {}
            if i == 0:
                job.ended("first", now)
                ttft = {part: job.parts[part] for part in TTFT_PARTS} | {"total": 1e3 * (now - request.submitted)}
            self.emit(protocol.First(job.run, i, token, 1e3 * (now - request.submitted), ttft))
        going = [stream for stream in job.streams if not stream.finished]
        for stream in going:
            stream.state = state if stream is going[0] else state.fork()

    def _run_round(self) -> None:
        """Draft, verify and commit one window of every decoding stream, all in one pass.

        A pass that fails as a whole is run again a stream at a time: who fails again, fails alone.
        """
        pairs = self.schedule.decoding()
        if not pairs:
            return
        drafts = [stream.drafts() for _, stream in pairs]
        try:
            passed = self._forward(pairs, drafts)
        except Exception as error:
            if len(pairs) == 1:
                return self._fail(pairs[0][0], error)
            for pair, draft in zip(pairs, drafts):
                self._run_alone(pair, draft)
        else:
            self._settle(pairs, drafts, *passed)

    def _run_alone(self, pair: tuple[Job, Stream], draft: list[int]) -> None:
        if pair[0] not in self.schedule.running:
            return
        try:
            passed = self._forward([pair], [draft])
        except Exception as error:
            self._fail(pair[0], error)
        else:
            self._settle([pair], [draft], *passed)

    def _forward(self, pairs: list[tuple[Job, Stream]], drafts: list[list[int]]):
        """Logits rows of every window on the host, and the change to commit. Moves no state."""
        windows = [[stream.ids[-1], *draft] for (_, stream), draft in zip(pairs, drafts)]
        logits, change = self.model.round_pass([stream.state for _, stream in pairs], windows)
        return logits.cpu().numpy(), change

    def _settle(self, pairs: list[tuple[Job, Stream]], drafts: list[list[int]], logits: np.ndarray, change) -> None:
        """Verify and commit; where that fails, nobody's state can be trusted."""
        try:
            self._verify(pairs, drafts, logits, change)
        except Exception as error:
            for job in dict.fromkeys(job for job, _ in pairs):
                if job in self.schedule.running:
                    self._fail(job, error)

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
        self.model.commit(states, change, rows)
        for (job, stream), draft, (tokens, accepted) in zip(pairs, drafts, outcomes):
            if tokens:
                self._committed(job, stream, draft, tokens, accepted)
        for job in dict.fromkeys(job for job, _ in pairs):
            if job in failed:
                self._fail(job, failed[job])
            else:
                self._finish_streams(job)

    def _committed(self, job: Job, stream: Stream, draft: list[int], tokens: list[Token], accepted: int) -> None:
        done = Round(
            ms=1e3 * (time.perf_counter() - job.request.submitted),
            drafted=len(draft),
            accepted=accepted,
            committed=len(tokens),
            draft_source="copy" if draft else "none",
            rejected="".join(map(self.piece, draft[accepted:])),
        )
        self.emit(protocol.Committed(job.run, stream.index, done, tokens))

    # Ends ------------------------------------------------------------------------------------------

    def _finish_streams(self, job: Job) -> None:
        """Tell the ends that came, and the run's own with the last of them."""
        for stream in job.streams:
            if stream.finished and not stream.told:
                self._tell_end(job, stream, stream.finished)
        if job.streams and all(stream.told for stream in job.streams):
            self._close(job, "done")

    def _tell_end(self, job: Job, stream: Stream, reason: str) -> None:
        stream.told, stream.state = True, None
        self.emit(protocol.Finished(job.run, stream.index, reason, stream.tail))

    def _fail(self, job: Job, error: Exception) -> None:
        traceback.print_exception(error)
        self._end(job, "failed", f"The run failed in the engine: {type(error).__name__}: {error}\nSee tfmagic logs.")

    def _end(self, job: Job, status: str, error: str | None = None) -> None:
        """End a run early; what its streams had held back is still shown."""
        for stream in job.streams:
            if not stream.told:
                stream.end()
                self._tell_end(job, stream, "cancelled" if status == "stopped" else "error")
        self._close(job, status, error)

    def _close(self, job: Job, status: str, error: str | None = None) -> None:
        if job.work is not None:
            job.work.close()
        job.work, job.streams = None, []
        self.schedule.remove(job)
        self.emit(protocol.Done(job.run, status, 1e3 * (time.perf_counter() - job.request.submitted), error))
