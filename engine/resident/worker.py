"""The engine thread, and the way from any thread back to the socket loop."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from ...errors import TfmagicError
from ...protocol import Committed, Event, Prefilled
from .place import Failure

QUIET = 1.0
"""Seconds without work, after which there is time to look for garbage."""
PROGRESS = (Prefilled, Committed)
"""Events that may wait for company; every other one changes what a person reads and is sent at once."""


class Inbox:
    """Events and calls for the socket loop, in order.

    Waking the loop costs a system call and a switch of threads, so progress wakes it only when no flush is due anyway.
    """

    def __init__(self):
        self.items: deque[Event | Callable[[], None]] = deque()
        self.flush_due = False
        """Set by the loop while a flush is on its clock."""
        self.urgent = False
        self.fd, self._wake = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._wake, False)

    def emit(self, event: Event) -> None:
        self.items.append(event)
        if not isinstance(event, PROGRESS):
            self.urgent = True
            self.wake()
        elif not self.flush_due:
            self.wake()

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the socket loop, after the events emitted so far."""
        self.items.append(action)
        self.urgent = True
        self.wake()

    def wake(self, *_: Any) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the loop has been told often enough
            os.write(self._wake, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)


class Worker(threading.Thread):
    """Opens the model, then steps the engine while there is work."""

    def __init__(self, open: Callable[..., Any], progress: Callable, ready: Callable, failed: Callable):
        """`open()` gives the opened model; `ready(opened)` and `failed(Failure)` are called on this thread."""
        super().__init__(name="engine", daemon=True)
        self.open, self.progress, self.ready, self.failed = open, progress, ready, failed
        self.work = threading.Event()

    def run(self) -> None:
        what = "could not load the model"
        try:
            opened = self.open(self.progress)
            collect_garbage()
            self.ready(opened)
            what = "failed while it ran"
            while True:
                self.work.clear()
                if not opened.engine.step() and not self.work.wait(QUIET):
                    collect_garbage()
                    self.work.wait()
        except TfmagicError as error:
            self.failed(Failure(error.problem, error.fix))
        except BaseException as error:  # whatever it was, clients are to be told
            traceback.print_exc()
            self.failed(Failure(f"The engine {what}: {type(error).__name__}: {_first_line(error)}", ""))


def collect_garbage() -> None:
    """What is there now stays, be it weights or records of runs: looking through it for garbage would hold up a later
    round by tens of milliseconds."""
    gc.collect()
    gc.freeze()


def open_model(model: str | None, device: str, settings: dict[str, Any], emit: Callable, progress: Callable) -> Any:
    """The engine proper; imports torch, on the engine thread."""
    progress("importing torch")
    from ..open import Settings, open

    return open(model, device, Settings(**settings), emit, progress)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
