"""The engine: submissions in, events out, one step after another on one thread.

A step admits, runs prompt slices, delivers first tokens, then runs one round over all decoding streams. A request that
fails, fails alone: its run is told, what it held is given back, and the engine goes on.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from threading import Event, Lock
from typing import Any

from tfmagic import protocol
from tfmagic.errors import Refusal
from tfmagic.run import TTFT_PARTS, Picture

from .cache.store import Store
from .drafting.budget import Curve
from .drafting.drafting import Drafting
from .keeping import Keeping
from .prefill import Rows, begin, later
from .ranges import span
from .rounds import Rounds
from .scheduler import STREAMS, Scheduler
from .settling import Reply, Settler
from .stream import Job, Request, Stream

WAITING = 256
"""Requests that may wait."""


class Engine:
    def __init__(
        self,
        model: Any,
        store: Store,
        emit: Callable[[protocol.Event], None],
        piece: Callable[[int], str],
        memory: int = 1 << 62,
        drafter: Any = None,
        curve: Curve | None = None,
    ):
        """`model`: a family's; `emit` takes every event, in order, on the engine thread; `piece`: one token's text;
        `memory`: bytes that running sequences may take together; `drafter`: the model's `drafting.block.Drafter`;
        `curve`: what its rounds take, None: every guess is verified."""
        self.model, self.store, self.sink, self.piece = model, store, emit, piece
        self.schedule = Scheduler(memory)
        self._lock, self._inbox, self._cancelled = Lock(), deque(), set()
        self._clearing: list[Event] = []
        if drafter is not None:
            model.tap(drafter.layers)
        self.drafting = Drafting(drafter, curve)
        self.keeping, self.settler = Keeping(store), Settler(model, store)
        self.rounds = Rounds(self, self.drafting)

    # Any thread ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Refusal when it can never run or too many wait. Any thread."""
        rows, context, memory = len(request.prompt.ids), self.model.context, self.schedule.memory
        if not 1 <= request.streams <= STREAMS:
            raise Refusal(f"{request.streams} streams were asked for.", f"Ask for 1 to {STREAMS}.")
        if rows < 1 or rows + request.sampling.max_tokens > context:
            reply = f"{request.sampling.max_tokens:,}"
            problem = f"The prompt has {rows:,} tokens and the reply {reply}; the context is {context:,}."
            raise Refusal(problem, "Shorten the prompt, or start a new conversation.")
        if (need := self._need(request)) > memory:
            grown = f"{request.streams} × {rows + request.sampling.max_tokens:,} rows"
            problem = f"The run may need {gib(need)} ({grown})"
            problem += f"; {gib(memory)} are free for runs."
            raise Refusal(problem, "Ask for fewer streams or tokens, or give the prompt cache less.")
        with self._lock:
            if len(self._inbox) + len(self.schedule.waiting) >= WAITING:
                raise Refusal(f"{WAITING} requests are waiting already.", "Try again when some are done.")
            self._inbox.append(request)

    def _need(self, request: Request) -> int:
        """Bytes that the request's sequences may come to take."""
        rows = len(request.prompt.ids) + request.sampling.max_tokens
        drafter = self.drafting.drafter
        return request.streams * (self.model.state_bytes(rows) + (drafter.context_bytes(rows) if drafter else 0))

    def cancel(self, run: str) -> None:
        """Stop a run, wherever it is. Unknown or finished runs are ignored. Any thread."""
        with self._lock:
            self._cancelled.add(run)

    def clear(self) -> Event:
        """Forget the states kept in memory with the next step; the event is set when it is done. Any thread."""
        done = Event()
        with self._lock:
            self._clearing.append(done)
        return done

    def settle(self, prompt: Any, label: str) -> None:
        """While nothing runs, compute and keep what a chat's next prompt will begin with. Any thread.

        `prompt`: an `engine.prompt.Prompt` of those rows; `label`: the turn that they end with, in words.
        """
        if self.store.budget:
            self.settler.waiting.append(Reply(prompt, label))

    def status(self) -> dict[str, Any]:
        """Any thread."""
        with self._lock:
            waiting = len(self.schedule.waiting) + len(self._inbox)
        return {
            "running": len(self.schedule.running),
            "waiting": waiting,
            "cache_states": len(self.store),
            "cache_bytes": self.store.bytes,
            "cache_budget": self.store.budget,
            "cache_note": self.store.note,
            "cache_counts": asdict(self.store.counts),
            "settling": len(self.settler),
            "plan": getattr(self.model, "plan", ""),
        }

    # The engine thread -----------------------------------------------------------------------------

    def emit(self, event: protocol.Event) -> None:
        """Tell; what a round gave before comes first."""
        self.rounds.tell()
        self.sink(event)

    def step(self) -> bool:
        """One iteration. False: nothing is left to do."""
        self._receive()
        for job in self.schedule.admit():
            self._begin(job)
        if self.schedule.busy:
            self.settler.pause()
            self._tell_positions()
            if self.schedule.prefilling():
                self.rounds.land()
                self.keeping.finish()
                self._run_prompts()
            self.rounds.run()
        else:
            self.keeping.finish()
            self.settler.step()
        if self.store.disk is not None:
            self.store.disk.working(self.schedule.busy)
        with self._lock:
            return self.schedule.busy or bool(self._inbox or len(self.keeping) or len(self.settler))

    def _receive(self) -> None:
        with self._lock:
            fresh, self._inbox = self._inbox, deque()
            cancelled, self._cancelled = self._cancelled, set()
            clearing, self._clearing = self._clearing, []
        for done in clearing:
            self.keeping.forget()
            self.store.clear()
            done.set()
        for request in fresh:
            prompt = request.prompt
            pictures = [Picture(i.name, i.width, i.height, i.start, i.tokens) for i in prompt.images]
            self.emit(protocol.Prepared(request.run, len(prompt.ids), pictures))
            self.schedule.waiting.append(Job(request, self._need(request)))
        for run in cancelled:
            if job := self.schedule.find(run):
                self._end(job, "stopped")

    def _begin(self, job: Job) -> None:
        now, request = time.perf_counter(), job.request
        since = 1e3 * (now - request.submitted)
        prepare = min(request.prepare_ms, since)
        job.parts, job.at = {"queue": since - prepare, "prepare": prepare}, now
        job.work = begin(job, self.model, self.store, self.emit, self.piece, self.schedule.decoding)

    def _tell_positions(self) -> None:
        for position, job in enumerate(self.schedule.waiting):
            if job.position != position:
                job.position = position
                self.emit(protocol.Queued(job.run, position))

    def _run_prompts(self) -> None:
        """One prompt pass: a slice of the oldest prompt and, behind it, every prompt that still fits whole.

        A pass that fails as a whole is run again a prompt at a time: who fails again, fails alone.
        """
        pack = self._pack()
        if not pack:
            return
        self.rounds.tell()  # rather than behind a pass
        try:
            with span("prefill"):
                passed = self.model.prompt_passes([job.rows.part(rows) for job, rows in pack])
        except Exception as error:
            if len(pack) == 1:
                return self.fail(pack[0][0], error)
            for job, rows in pack:
                self._prompt_alone(job, rows)
        else:
            self._passed([job for job, _ in pack], passed)

    def _prompt_alone(self, job: Job, rows: int) -> None:
        try:
            passed = self.model.prompt_passes([job.rows.part(rows)])
        except Exception as error:
            self.fail(job, error)
        else:
            self._passed([job], passed)

    def _pack(self) -> list[tuple[Job, int]]:
        """This step's prompts and how many rows of each, first come first; restores and encodes on the way there."""
        slice, room = self.schedule.budget(self.model.packed, getattr(self.model, "slices", None))
        pack: list[tuple[Job, int]] = []
        for job in self.schedule.prefilling():
            if pack and later(job, min(slice, room), [other.rows for other, _ in pack], self.store):
                continue
            room -= self._prepare(job, room)
            if job.rows is not None and room > 0 and (not pack or job.rows.left <= min(slice, room)):
                pack.append((job, job.rows.fit(min(slice, room))))
                room -= pack[-1][1]
            if not pack and job in self.schedule.running:
                break  # the oldest one's pictures took the step
        return pack

    def _prepare(self, job: Job, room: int) -> int:
        """Restore and encode until the job's rows are ready or the room is used; returns the room used."""
        used = 0
        while job.work is not None and used < room:
            try:
                used += next(job.work)
            except StopIteration:
                job.work = None
            except Exception as error:
                self.fail(job, error)
        return used

    def _passed(self, jobs: list[Job], passed: list) -> None:
        """Slices are computed: tell, deliver the first tokens of the prompts that are complete, whose states then wait
        to be kept."""
        now = time.perf_counter()
        complete = []
        for job, (logits, reached, taps) in zip(jobs, passed):
            job.rows.passed(reached, taps)
            if not job.rows.left:
                job.ended("prefill", now)
                complete.append((job, job.rows, logits))
            self.emit(protocol.Prefilled(job.run, job.rows.state.rows))
        for job, rows, logits in complete:
            try:
                self._first_tokens(job, rows, logits)
            except Exception as error:
                self.fail(job, error)
        for job, rows, _ in complete:
            job.rows = None
            if job in self.schedule.running:
                if job.request.cache:
                    self.keeping.add(rows, job.request.name)
                self.finish_streams(job)

    @span("first")
    def _first_tokens(self, job: Job, rows: Rows, logits) -> None:
        """Draw and deliver every stream's first token from the prompt's last row; then give the streams states.

        Nothing is drafted before: the first draft is made by the round that follows.
        """
        request, state = job.request, rows.state
        streams = [Stream(i, request, self.piece) for i in range(request.streams)]
        drawn = self.model.draw(logits, [stream.draws() for stream in streams])
        for i, (stream, (id, likely)) in enumerate(zip(streams, drawn)):
            token = stream.take(id, likely, "first")
            job.streams.append(stream)
            now, ttft = time.perf_counter(), {}
            if i == 0:
                job.ended("first", now)
                ttft = {part: job.parts[part] for part in TTFT_PARTS} | {"total": 1e3 * (now - request.submitted)}
            self.emit(protocol.First(job.run, i, token, 1e3 * (now - request.submitted), ttft))
        going = [stream for stream in job.streams if not stream.finished]
        for stream in going:
            stream.state = state if stream is going[0] else state.fork()
        self.drafting.begin(going, rows.taps, len(self.schedule.decoding()))

    # Ends ------------------------------------------------------------------------------------------

    def finish_streams(self, job: Job) -> None:
        """Tell the ends that came, and the run's own with the last of them."""
        for stream in job.streams:
            if stream.finished and not stream.told:
                self._tell_end(job, stream, stream.finished)
        if job.streams and all(stream.told for stream in job.streams):
            self._close(job, "done")

    def _tell_end(self, job: Job, stream: Stream, reason: str) -> None:
        stream.told, stream.state, stream.guesses.context = True, None, None
        self.emit(protocol.Finished(job.run, stream.index, reason, stream.tail))

    def fail(self, job: Job, error: Exception) -> None:
        """End this run, and no other."""
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
        job.work, job.rows, job.streams = None, None, []
        self.schedule.remove(job)
        self.emit(protocol.Done(job.run, status, 1e3 * (time.perf_counter() - job.request.submitted), error))


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
