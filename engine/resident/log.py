"""The engine's log: whatever the process writes to its standard output and error, in one private file."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from .place import Place

LIMIT = 4 << 20
"""Bytes; then a new file is begun and one old one kept."""
ENDED = "ended in order"
"""The last line of an engine that was not killed."""


def log(text: str) -> None:
    """One line; a full disk is no reason to end."""
    with contextlib.suppress(OSError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)


def cap(place: Place) -> None:
    """Begin a new file when this one is full."""
    if os.fstat(2).st_size < LIMIT:
        return
    with contextlib.suppress(OSError):
        os.replace(place.log, place.log.with_suffix(".log.1"))
        fd = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        for standard in (1, 2):
            os.dup2(fd, standard)
        os.close(fd)
