"""A scripted engine behind the real process: `python fake_engine.py --runtime-dir ...` is a resident engine.

The prompt tells it what to do: `slow N` gives N tokens at 20 a second, `fast N` N tokens at once, `forever` tokens
until it is stopped, `stubborn` even then, `refuse` is refused while it is prepared, `fail` fails as a run, `crash` ends
the engine thread with an exception, `abort` the process, `misfit` emits an event of a stream that there is not,
`gated` waits while it is prepared; any other text comes back word by word. A model named `broken` raises, `missing` is
refused, `gated` waits while it is loaded. FAKE_GRACE: seconds that runs have to stop in when the engine ends.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfmagic.errors import Refusal
from tfmagic.protocol import (
    Committed,
    Done,
    Encoded,
    Finished,
    First,
    ImageRef,
    Prefilled,
    Prepared,
    Queued,
    Restored,
)
from tfmagic.run import TTFT_PARTS, Picture, Round, Token


def gate(name: str) -> None:
    """Say that `name` is reached, and wait until the test says `name.open`."""
    folder = Path(os.environ["FAKE_GATES"])
    (folder / name).touch()
    while not (folder / f"{name}.open").exists():
        time.sleep(0.01)


@dataclass
class Request:
    run: str
    prompt: Any
    sampling: Any
    streams: int
    submitted: float
    prepare_ms: float
    detokenizer: Any
    cache: bool = True
    label: str = ""


@dataclass
class Prompt:
    text: str
    ids: list[int]
    images: list[Picture]
    turns: list[str]


class Sampling(types.SimpleNamespace):
    pass


@dataclass
class Job:
    request: Request
    words: list[str]
    pause: float
    at: int = 0
    due: float = 0.0


@dataclass
class Engine:
    emit: Any
    waiting: list[Request] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    lock: Any = field(default_factory=threading.Lock)

    def submit(self, request: Request) -> None:
        with self.lock:
            self.waiting.append(request)

    def cancel(self, run: str) -> None:
        with self.lock:
            self.cancelled.add(run)

    def status(self) -> dict[str, int]:
        return {
            "running": len(self.jobs),
            "waiting": len(self.waiting),
            "cache_states": 3,
            "cache_bytes": 4096,
            "cache_budget": 1 << 30,
        }

    def step(self) -> bool:
        with self.lock:
            waiting, self.waiting = self.waiting, []
            cancelled, self.cancelled = self.cancelled, set()
        for request in waiting:
            self.begin(request)
        for job in list(self.jobs.values()):
            if job.request.run in cancelled and job.request.prompt.text != "stubborn":
                self.end(job, "stopped", "cancelled")
            else:
                self.advance(job)
        if self.jobs:
            soonest = min(job.due for job in self.jobs.values())
            time.sleep(min(0.05, max(0.0, soonest - time.monotonic())))
        return bool(self.jobs)

    def begin(self, request: Request) -> None:
        run, prompt = request.run, request.prompt
        order, _, rest = prompt.text.partition(" ")
        if order == "crash":
            raise RuntimeError("the script says crash")
        if order == "abort":
            os.abort()
        self.emit(Queued(run, 0))
        self.emit(Prepared(run, len(prompt.ids), prompt.images))
        self.emit(Restored(run, 0))
        if prompt.images:
            self.emit(Encoded(run, 1, [False] * len(prompt.images)))
        self.emit(Prefilled(run, len(prompt.ids)))
        if order == "misfit":
            self.emit(Committed(run, 5, Round(1.0), []))
        if order == "fail":
            self.emit(Done(run, "failed", 1.0, "The script says fail.\nSay something else."))
            return
        words = prompt.text.split(" ")
        pause = 0.0
        if order in ("slow", "fast"):
            words, pause = [f"w{i}" for i in range(int(rest))], 0.05 * (order == "slow")
        elif order in ("forever", "stubborn"):
            words, pause = ["on"] * 10**6, 0.01
        elif order == "turns":
            words = prompt.turns
        self.jobs[run] = Job(request, words, pause)

    def advance(self, job: Job) -> None:
        if time.monotonic() < job.due:
            return
        run, ms = job.request.run, 1e3 * (time.perf_counter() - job.request.submitted)
        for stream in range(job.request.streams):
            token = Token(job.at, ("" if job.at == 0 else " ") + job.words[job.at], "plain" if job.at else "first")
            if job.at == 0:
                self.emit(First(run, stream, token, ms, dict.fromkeys(TTFT_PARTS, ms / 6) | {"total": ms}))
            else:
                self.emit(Committed(run, stream, Round(ms), [token]))
        job.at += 1
        job.due = time.monotonic() + job.pause
        if job.at == len(job.words):
            self.end(job, "done", "stop")

    def end(self, job: Job, status: str, reason: str) -> None:
        run = job.request.run
        del self.jobs[run]
        for stream in range(job.request.streams):
            self.emit(Finished(run, stream, reason, tail="!" if status == "done" else ""))
        self.emit(Done(run, status, 1e3 * (time.perf_counter() - job.request.submitted)))


class Opened:
    name, device, context, drafter = "fake", "cpu", 1000, "none"
    text = types.SimpleNamespace(detokenizer=lambda: None)

    def __init__(self, emit):
        self.engine = Engine(emit)

    def close(self, seconds):
        pass

    def settle(self, messages, encoded, label):
        pass

    def prepare(self, messages, encoded) -> Prompt:
        parts = messages[-1].parts
        text = "".join(part.text for part in parts if not isinstance(part, ImageRef))
        if text == "refuse":
            raise Refusal("The script refuses.", "Say something else.")
        if text == "gated":
            gate("prepare")
        images, turns = [], []
        for message in messages:
            turns.append(f"{message.role}:")
            for part in message.parts:
                if isinstance(part, ImageRef):
                    assert hashlib.sha256(encoded[part.digest]).hexdigest() == part.digest
                    images.append(Picture(part.name, 2, 2, len(images), 1))
                    turns.append(f"<{part.name}>")
                else:
                    turns.append(part.text)
        return Prompt(text, list(range(10)), images, turns)

    def sampling(self, params, prompt) -> Sampling:
        if params.temperature is not None and params.temperature < 0:
            raise Refusal("temperature is -1.0.", "Give 0 or more.")
        values = {name: getattr(params, name) for name in params.__struct_fields__}
        return Sampling(**values | {"temperature": params.temperature or 0.0, "max_tokens": params.max_tokens or 99})


def open(model, device, settings, emit, progress) -> Opened:
    from tfmagic.engine.resident import server

    server.GRACE = float(os.environ.get("FAKE_GRACE", server.GRACE))
    progress("reading weights 1 of 2")
    if model == "gated":
        gate("load")
    if model == "broken":
        print("the weights are upside down", file=sys.stderr, flush=True)
        raise OSError("no such tensor")
    if model == "missing":
        raise Refusal("The folder missing does not exist.", "Give a folder with config.json.")
    progress("reading weights 2 of 2")
    return Opened(emit)


if __name__ == "__main__":
    sys.modules["tfmagic.engine.stream"] = types.SimpleNamespace(Request=Request)  # the real one imports torch
    from tfmagic.engine.resident.__main__ import main

    main(open=open)
