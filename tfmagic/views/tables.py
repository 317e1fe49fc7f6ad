"""Small tables for `%tfold status`, `runs` and `models`: a list that shows itself as text and as HTML."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

from . import words


class Table(list):
    """Items, and how a row of each reads."""

    def __init__(self, items: Iterable, columns: list[str], row: Callable[[Any], list[str]], empty: str = ""):
        super().__init__(items)
        self.columns, self.row, self.empty = columns, row, empty

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self._html(), "text/plain": str(self)}

    def __str__(self) -> str:
        if not self:
            return self.empty
        rows = [list(map(_line, self.row(item))) for item in self]
        rows = [self.columns, *rows] if any(self.columns) else rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    __repr__ = __str__

    def _html(self) -> str:
        if not self:
            return f"<p>{escape(self.empty)}</p>"
        rows = [_row("th", self.columns)] if any(self.columns) else []
        return f"<table>{''.join([*rows, *(_row('td', self.row(item)) for item in self)])}</table>"


def status(state) -> Table:
    """The engine's state (`protocol.State`); None: no engine runs."""
    if state is None:
        return Table([], [], list, "No engine is running. %tfold start starts one; so does %%tfold.")
    rows = [
        ("engine", state.phase if state.phase == "ready" else f"{state.phase}: {state.detail}"),
        ("process", str(state.pid)),
        ("model", state.model or words.DASH),
        ("device", state.device or words.DASH),
        ("drafter", state.drafter or words.DASH),
        ("up for", words.ms(1e3 * max(0.0, time.time() - state.started))),
        ("runs", f"{state.runs:,} kept, {state.running} running, {state.waiting} waiting"),
        *zip(("prompt cache", "", "", ""), words.cache(state).split(" · ")),
        ("memory", words.size(state.memory)),
        *([("of the device", state.plan)] if state.plan else []),
        ("context", words.DASH if state.context is None else f"{state.context:,} tokens"),
    ]
    return Table(rows, ["", ""], list)


def cache(held) -> Table:
    """What is kept where (`protocol.Holdings`): a line a place, then its states, the most recently used first."""
    rows = []
    for shelf in held.shelves:
        states = [state for state in held.states if state.where == shelf.where]
        more = f", the last {len(states)} of them here" if len(states) < shelf.states else ""
        total = f"{words.size(shelf.bytes)} of {words.size(shelf.budget)}"
        counts = [f"{n:,} {name}" for name, n in shelf.counts.items() if n and name != "bytes_written"]
        shared = ["what they share is there once"] * (sum(s.bytes for s in states) > shelf.bytes)
        about = " · ".join([shelf.directory, *counts] if shelf.directory else shared)
        rows.append([shelf.where, words.plural(shelf.states, "state") + more, total, "", about])
        rows += [["", f"{s.rows:,} rows", words.size(s.bytes), _ago(s.made), s.label] for s in states]
    return Table(rows, ["where", "what", "size", "kept", "whose"], list)


def runs(records: list) -> Table:
    """Records of kept runs, newest first."""
    columns = ["id", "when", "status", "chat", "streams", "ttft", "total", "cached", "prompt"]
    return Table(records, columns, _run, "The engine keeps no run yet.")


def models(found: list) -> Table:
    """Models of this machine (`models.Model`)."""
    columns = ["model", "family", "size"]
    return Table(found, columns, lambda m: [m.name, m.family, words.size(m.size)], "No model was found.")


def _row(tag: str, cells: list[str]) -> str:
    """Only the last cell, the longest, may wrap."""
    style = "text-align:left;vertical-align:top"
    *short, last = (escape(_line(text)) for text in cells)
    html = "".join(f'<{tag} style="{style};white-space:nowrap">{text}</{tag}>' for text in short)
    return f'<tr>{html}<{tag} style="{style}">{last}</{tag}></tr>'


def _run(run) -> list[str]:
    return [
        run.id,
        _ago(run.created),
        run.status,
        f"{run.chat}, turn {run.turn}" if run.chat else words.DASH,
        str(len(run.streams) or words.DASH),
        words.ms(run.ttft.get("total")),
        words.ms(run.total_ms),
        words.count(run.cached_tokens),
        run.prompt,
    ]


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    if seconds < 3600:
        return f"{words.ms(1e3 * seconds)} ago"
    return f"{seconds / 3600:.1f} h ago" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days ago"


def _line(text: str, limit: int = 48) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
