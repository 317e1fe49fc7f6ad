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
    used, budget = words.size(state.cache_bytes), words.size(state.cache_budget)
    rows = [
        ("engine", state.phase if state.phase == "ready" else f"{state.phase}: {state.detail}"),
        ("process", str(state.pid)),
        ("model", state.model or words.DASH),
        ("device", state.device or words.DASH),
        ("up for", words.ms(1e3 * max(0.0, time.time() - state.started))),
        ("runs", f"{state.runs:,} kept, {state.running} running, {state.waiting} waiting"),
        ("prompt cache", f"{words.plural(state.cache_states, 'state')}, {used} of {budget}"),
        ("memory", words.size(state.memory)),
        ("context", words.DASH if state.context is None else f"{state.context:,} tokens"),
    ]
    return Table(rows, ["", ""], list)


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
        words.ms(1e3 * max(0.0, time.time() - run.created)) + " ago",
        run.status,
        f"{run.chat}, turn {run.turn}" if run.chat else words.DASH,
        str(len(run.streams) or words.DASH),
        words.ms(run.ttft.get("total")),
        words.ms(run.total_ms),
        words.count(run.cached_tokens),
        run.prompt,
    ]


def _line(text: str, limit: int = 48) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
