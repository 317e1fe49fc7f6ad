"""A client without an engine: it plays a script of protocol events for every run that is submitted."""

from __future__ import annotations

import threading

from tfmagic import protocol
from tfmagic.errors import EngineDied, Refusal
from tfmagic.run import Node, Picture, Round, Run, Stream, Token

REPLY = ("The", " red", " kite", " is", " up", ".")
NODES = [Node(" red", 0, 0.9, True), Node(" kite", 1, 0.8, True), Node(" not", 2, 0.3)]


def events(run: str, streams: int = 1, pictures: int = 0):
    """A short run as the engine tells it: two plain rounds around an accepted draft of two."""
    yield protocol.Prepared(run, 80, [Picture(f"p{i}.png", 32, 32, 4 + 8 * i, 8) for i in range(pictures)])
    yield protocol.Restored(run, 64, "ram")
    yield protocol.Encoded(run, 0, [True] * pictures)
    yield protocol.Prefilled(run, 80)
    for i in range(streams):
        yield protocol.First(run, i, Token(0, REPLY[0], "first"), 12.0, {"queue": 1.0, "prefill": 11.0, "total": 12.0})
    for i in range(streams):
        drafted = [Token(n, REPLY[n], "draft" if n < 3 else "plain") for n in (1, 2, 3)]
        yield protocol.Committed(run, i, Round(20.0, 3, "copy", NODES), drafted)
        yield protocol.Committed(run, i, Round(30.0), [Token(4, REPLY[4])])
        yield protocol.Committed(run, i, Round(40.0), [Token(5, REPLY[5])])
        yield protocol.Finished(run, i, "stop")
    yield protocol.Done(run, "done", 41.0)


class Handle:
    """As `tfmagic.client.Handle`: each `wait` that finds the run unfinished folds its next event."""

    def __init__(self, record: Run, script):
        self.record, self.script, self.version, self.cancelled = record, iter(script), 0, False
        self.lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> bool:
        with self.lock:
            if not self.record.finished:
                event = protocol.Done(self.record.id, "stopped", 9.0) if self.cancelled else next(self.script)
                if isinstance(event, BaseException):
                    raise event
                self.record.apply(event)
                self.version += 1
        return self.record.finished

    def cancel(self) -> None:
        self.cancelled = True


class Engine:
    """As `tfmagic.client.Engine`; keeps what was submitted, and plays `script(run id, streams)` for every run."""

    alive = True

    def __init__(self):
        self.asked: list[dict] = []
        self.handles: list[Handle] = []
        self.cancelled: list[str | None] = []
        self.stopped = False
        self.script = events

    def submit(self, prompt, *, system=None, chat=None, new=False, streams=1, background=False, **params):
        asked = {"prompt": prompt, "system": system, "chat": chat, "new": new, "streams": streams, "params": params}
        self.asked.append(asked)
        if prompt == ["refuse this"]:
            raise Refusal("The prompt is refused.", "Write another.")
        run = f"run{len(self.handles)}abc"
        words = "".join(part for part in prompt if isinstance(part, str))
        seeds = [Stream(seed=params.get("seed")) for _ in range(streams)]
        record = Run(run, 1e9, "scripted", "cpu", words, system, chat, params=params, streams=seeds)
        self.handles.append(Handle(record, self.script(run, streams)))
        return self.handles[-1]

    def follow(self, run=None):
        return next(handle for handle in reversed(self.handles) if run in (None, handle.record.id))

    def runs(self):
        return [handle.record for handle in reversed(self.handles)]

    def cancel(self, run=None):
        self.cancelled.append(run)

    def status(self):
        cache = {"cache_states": 3, "cache_bytes": 4096, "cache_budget": 1 << 30}
        return protocol.State(0, 1, "ready", "", 4321, "scripted", "cpu", 1e9, len(self.handles), **cache)

    def cache(self, clear=False):
        if clear:
            return protocol.Holdings(0, [protocol.Shelf("ram", 0, 0, 1 << 30)], [])
        disk = protocol.Shelf("disk", 3, 9000, 32 << 30, "/states", {"read": 2})
        shelves = [protocol.Shelf("ram", 2, 4096, 1 << 30), disk]
        states = [("ram", 128, "chat “sea”, turn 1"), ("ram", 64, ""), ("disk", 128, "chat “sea”, turn 1")]
        return protocol.Holdings(0, shelves, [protocol.KeptState(w, rows, 3000, who, 1e9) for w, rows, who in states])

    def stop(self):
        self.stopped = True


DIED = EngineDied("The engine (process 1) died.", "Run the cell again; a fresh engine starts.")
