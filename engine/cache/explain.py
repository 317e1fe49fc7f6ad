"""Why a prompt did not come from the cache, or not all of it: one line for a person."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .store import Gone, Kept, Store, last_mark

BEFORE, AFTER = 8, 5
"""Tokens shown around the row at which two prompts part."""


def explain(store: Store, prompt: Any, kept: Kept | None, piece: Callable[[int], str]) -> str | None:
    """`kept`: what was found for this `engine.prompt.Prompt`; `piece`: one token's text. None: nothing to explain."""
    rows, at = len(prompt.key), kept.at if kept else 0
    last = last_mark(rows, store.grain)
    if at == last:
        return None if at else f"too short: prompts under {store.grain + 1} rows are not kept"
    if not store.budget:
        return "the prompt cache is off"
    gone, near = store.gone(prompt.key, at), store.nearest(prompt.key, at)
    if gone and (near is None or gone.at >= near[1]):
        return _evicted(gone)
    if near:
        return _parting(prompt, *near, piece)
    return None if kept else "nothing is kept yet"


def _evicted(gone: Gone) -> str:
    by = f", for {gone.by}" if gone.by else ""
    return f"the state of {gone.at:,} rows of {gone.label} was evicted {ago(gone.when)} ago ({gone.why}{by})"


def _parting(prompt: Any, kept: Kept, row: int, piece: Callable[[int], str]) -> str:
    where = f"row {row:,}"
    if row == len(prompt.key):
        return f"ends inside {kept.label}, which has no mark nearer to {where}"
    start = max(0, row - BEFORE)
    before = words(prompt.key[start:row], piece)[-40:]
    here, there = (words(key[row : row + AFTER], piece)[:30] for key in (prompt.key, kept.key))
    after = f" after “{before}”" if before else ""
    return f"parts from {kept.label} at {where}{after}: “{here}” here, “{there}” there"


def words(key: list[int], piece: Callable[[int], str]) -> str:
    """The text of key rows on one line; a picture's rows are one word."""
    pieces: list[str] = []
    for id in key:
        if id >= 0:
            pieces.append(piece(id))
        elif pieces[-1:] != ["[picture]"]:
            pieces.append("[picture]")
    return " ".join("".join(pieces).split())


def ago(when: float) -> str:
    seconds = time.monotonic() - when
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"
