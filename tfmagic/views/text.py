"""A run as plain text: streamed while it happens, and as a summary of a few aligned lines.

In a terminal the pieces go to stdout as they come. In a notebook kernel the text grows in one display, which the static
card replaces at the end, so that a saved notebook holds text/html and text/plain only.
"""

from __future__ import annotations

import sys
import threading

from ..errors import EngineDied, TfmagicError
from ..run import Run
from . import words
from .slot import Slot, in_kernel

FRAME = 0.05
"""Seconds between two looks at a run in a terminal."""
SLOW_FRAME = 0.25
"""Seconds between two updates of a display: each carries the whole text again."""
TAIL = 4_000
"""Characters of each reply that a growing display shows, so that an update stays small."""


def render(run: Run) -> str:
    """The replies, then the numbers. A number that was not measured is a dash; `run.STATS` defines the names."""
    return f"{replies(run)}\n\n{summary(run)}" if any(s.tokens for s in run.streams) else summary(run)


def replies(run: Run, tail: int | None = None) -> str:
    """The text of every stream, each under its heading when there are several; `tail`: its last characters only."""
    shown = [_tail(stream.text, tail) for stream in run.streams]
    if len(shown) == 1:
        return shown[0]
    return "\n\n".join(f"{heading(run, i)}\n{text}" for i, text in enumerate(shown))


def heading(run: Run, i: int) -> str:
    return f"── stream {i + 1} · {words.stream_line(run.streams[i])}"


def summary(run: Run) -> str:
    """The status line, the numbers in columns, and what went wrong or is worth a note."""
    facts = words.facts(run)
    names, values = max(len(f.name) for f in facts), max(len(f.value) for f in facts)
    lines = [f"{f.name:<{names}}  {f.value:<{values}}  {f.note}".rstrip() for f in facts]
    if len(run.streams) == 1:
        lines.insert(0, words.stream_line(run.streams[0]))
    notes = [run.note] if run.note else []
    return "\n".join([*(run.error or "").splitlines(), words.status_line(run), *lines, *notes])


def progress(run: Run) -> str:
    """What a run does now, in words."""
    if run.status == "queued":
        return f"queued, {run.position} before it" if run.position else "queued"
    if run.status == "prefill":
        return f"prefill, {run.prefilled:,} of {words.count(run.prompt_tokens)} rows"
    if run.status == "decoding":
        return f"decoding, {words.plural(sum(len(stream.tokens) for stream in run.streams), 'token')}"
    return run.status


def watch(handle, background: bool = False) -> None:
    """Show the run while it happens, until it is finished. Raises what `handle.wait` raises; then call `finish`.

    `background`: return at once; a notebook's display grows from a thread, a terminal shows nothing.
    """
    if not in_kernel():
        if not background:
            _follow(handle, Terminal(handle))
        return
    view = Display(handle)
    if background:
        threading.Thread(target=_follow_to_the_end, args=(handle, view), daemon=True).start()
    else:
        _follow(handle, view)


def finish(handle) -> None:
    """The last word on a run that `watch` was interrupted in; nothing when it had its last word."""
    view = _open.get(handle.record.id)
    if view is not None:
        view.finish()


class Terminal:
    """Pieces to stdout as they come. Streams are shown in order, each under its heading when there are several: the
    first unfinished one grows, the others wait for their turn."""

    frame = FRAME

    def __init__(self, handle):
        self.handle = handle
        self.stream = 0
        self.shown = 0
        """Characters of the current stream on the screen."""
        _open[self.handle.record.id] = self

    def update(self) -> None:
        streams = self.handle.record.streams
        while self.stream < len(streams):
            stream = streams[self.stream]
            over, text = stream.finish_reason is not None, stream.text
            if len(streams) > 1 and not self.shown and text:
                self._write(f"── stream {self.stream + 1}\n")
            self._write(text[self.shown :])
            self.shown = len(text)
            if not over:
                return
            if text:
                self._write("\n")
            self.stream, self.shown = self.stream + 1, 0

    def finish(self) -> None:
        _open.pop(self.handle.record.id, None)
        self.update()
        run = self.handle.record
        lines = [heading(run, i) for i in range(len(run.streams))] if len(run.streams) > 1 else []
        self._write("\n".join(["\n" * bool(self.shown), *lines, summary(run), ""]))

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class Display:
    """One display of a notebook: the growing text, then the static card."""

    frame = SLOW_FRAME

    def __init__(self, handle):
        self.handle, self.slot = handle, Slot()
        _open[self.handle.record.id] = self
        self.update()

    def update(self) -> None:
        run = self.handle.record
        limit = TAIL if len(run.streams) == 1 else TAIL // 8
        self.slot.show({"text/plain": f"{replies(run, limit)}\n\n{progress(run)}".strip()})

    def finish(self) -> None:
        _open.pop(self.handle.record.id, None)
        self.slot.show(self.handle.record._repr_mimebundle_())


_open: dict[str, Terminal | Display] = {}
"""Views that have not had their last word, by run id."""


def _follow(handle, view: Terminal | Display) -> None:
    """Update the view until the run is finished, then finish it; an exception leaves it open for `finish`."""
    while not handle.wait(view.frame):
        view.update()
    view.finish()


def _follow_to_the_end(handle, view: Display) -> None:
    """For a background run: nobody waits for its errors, so they go onto its card."""
    from . import settle

    try:
        _follow(handle, view)
    except EngineDied as error:
        settle(handle.record, "failed", str(error))
        view.finish()
    except TfmagicError:  # the connection was closed; the run goes on
        view.finish()


def _tail(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else "…" + text[-limit:]
