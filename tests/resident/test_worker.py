"""The engine thread: garbage is looked for when it is quiet, and not while there is work."""

from __future__ import annotations

import threading
import types

from tfmagic.engine.resident import worker
from tfmagic.engine.resident.worker import Worker


def test_garbage_is_looked_for_once_it_is_quiet(monkeypatch):
    stepped, settled, left = threading.Semaphore(0), threading.Semaphore(0), [3]

    def step() -> bool:
        if left[0] < 0:
            raise SystemExit
        left[0] -= 1
        stepped.release()
        return left[0] > 0

    monkeypatch.setattr(worker, "QUIET", 0.05)
    monkeypatch.setattr(worker, "collect_garbage", settled.release)
    opened, failed = types.SimpleNamespace(engine=types.SimpleNamespace(step=step)), []
    thread = Worker(lambda progress: opened, print, lambda opened: None, failed.append)
    thread.start()
    assert settled.acquire(timeout=10)  # what was loaded
    assert all(stepped.acquire(timeout=10) for _ in range(3))
    assert settled.acquire(timeout=10) and not settled.acquire(timeout=0.3)  # once, however long it is quiet
    left[0] = 2
    thread.work.set()
    assert all(stepped.acquire(timeout=10) for _ in range(2)) and settled.acquire(timeout=10)
    left[0] = -1
    thread.work.set()
    thread.join(10)
    assert len(failed) == 1
