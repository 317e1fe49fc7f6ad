"""One prompt under several settings: the runs of a sweep, side by side.

A sweep of `draft=on,off` is the shortest receipt that drafting changes no token: the replies have one `token_sha`.
"""

from __future__ import annotations

from argparse import Namespace
from html import escape
from itertools import product
from math import prod
from typing import Any

from IPython.core.error import UsageError

from .run import Run
from .views import words
from .views.progress import Progress
from .views.slot import Slot, in_kernel
from .views.tables import Table
from .views.text import SLOW_FRAME

MOST = 64
"""Runs in one sweep."""


def grid(arguments: Namespace) -> list[dict[str, Any]]:
    """Every combination of a cell's swept values, the last key changing fastest. Raises UsageError."""
    keys, values = zip(*arguments.sweep, strict=True)
    for key in keys:
        if getattr(arguments, key) is not None or keys.count(key) > 1:
            raise UsageError(f"%%tfold --sweep {key.replace('_', '-')} is given twice; give its values once")
    for flag in ("bg", "chat"):
        if getattr(arguments, flag):
            raise UsageError(f"%%tfold --sweep does not go with --{flag}; leave one of them out")
    if (runs := prod(map(len, values))) > MOST:
        raise UsageError(f"%%tfold --sweep makes {runs} runs; it makes at most {MOST}")
    return [dict(zip(keys, point, strict=True)) for point in product(*values)]


class Sweep(Table):
    """The runs of a sweep, in the order of its grid; a list of `Run`."""

    def __init__(self, keys: list[str], runs: list[Run] = ()):
        columns = [*keys, "status", "tokens", "ttft", "total", "cached", "acceptance", "token_sha", "reply"]
        super().__init__(runs, columns, self._cells, "No run was finished.")
        self.keys = keys

    def verdict(self) -> str:
        """Whether the finished replies are the same tokens."""
        shas = [run.stats["token_sha"] for run in self if run.status == "done"]
        if len(shas) < 2:
            return ""
        different = len(set(shas))
        said = "the same tokens" if different == 1 else f"{different} different replies"
        return f"{len(shas)} runs, {said}."

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.verdict()}".rstrip()

    __repr__ = __str__

    def _html(self) -> str:
        return super()._html() + f"<p>{escape(self.verdict())}</p>"

    def _cells(self, run: Run) -> list[str]:
        stats = run.stats
        return [
            *(str(run.params.get(key, words.DASH)) for key in self.keys),
            run.status,
            words.count(sum(len(stream.tokens) for stream in run.streams)),
            words.ms(run.ttft.get("total")),
            words.ms(run.total_ms),
            words.count(run.cached_tokens),
            words.percent(stats["acceptance"]),
            stats["token_sha"] if any(stream.tokens for stream in run.streams) else words.DASH,
            run.text,
        ]


class SweepView:
    """Shows a sweep while it runs: a growing table in a notebook, a line of progress and then the table in a terminal.

    It takes the place of a renderer in `views.watch`, for one run after the other.
    """

    def __init__(self, sweep: Sweep, runs: int):
        self.sweep, self.runs = sweep, runs
        self.slot = Slot() if in_kernel() else None
        self.progress = Progress()

    def watch(self, handle, background: bool = False) -> None:
        self.finish(handle)
        while not handle.wait(SLOW_FRAME):
            self.finish(handle)

    def finish(self, handle) -> None:
        if self.slot is not None:
            self.slot.show(self.sweep._repr_mimebundle_())
        else:
            self.progress(f"run {len(self.sweep)} of {self.runs}")

    def __enter__(self) -> SweepView:
        return self

    def __exit__(self, *error) -> None:
        if self.slot is None:
            self.progress("")
            print(f"\r{self.sweep}")
