"""Waiting on a machine that may be slow, busy or standing still for a while: for what happens, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LONG = 120.0
"""Seconds until something that ought to happen counts as never happening."""
PATIENT = """
import tfmagic.attach, tfmagic.client, tfmagic.connection, tfmagic.views
from tfmagic.engine.resident import place as _place
tfmagic.attach.ANSWER = tfmagic.client.ANSWER = 120.0
tfmagic.attach.LEAVE = tfmagic.client.LEAVE = tfmagic.connection.HANGING = 60.0
_place.finish.__defaults__ = tfmagic.views.stop.__defaults__ = (60.0,)
"""
"""Source that gives a client process more patience with its engine than a person would want it to have."""

T = TypeVar("T")


def patient() -> None:
    """Give this process's clients more patience."""
    exec(PATIENT, {})


def until(true: Callable[[], T], seconds: float = LONG) -> T:
    """Wait for `true()` and return what it gave."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"it did not come true in {seconds:g} s"
        time.sleep(0.01)
    return found


def best(measure: Callable[[], float], most: float, times: int = 5) -> None:
    """`measure()` takes at most `most` seconds, once in so many times: what a busy machine adds is not always there."""
    took: list[float] = []
    while not took or (min(took) >= most and len(took) < times):
        took.append(measure())
    assert min(took) < most, f"it took {', '.join(f'{t:.2f}' for t in took)} s"
