"""The renderers of a run, and the choice between them.

`live` (a panel drawn by the page), `text` and `card` read a `Run`; none of them measures. `live` and `text` share two
functions: `watch(handle, background)` shows a run until it is finished, `finish(handle)` gives it its last word.
"""

from __future__ import annotations

from types import ModuleType

from ..errors import EngineDied, Interrupted, TfmagicError
from . import words


def renderer(view: str) -> ModuleType | None:
    """The module that shows a run: `auto` is the live panel where a page can draw it, else text; None for `off`.

    Raises ValueError when `live` is asked for and cannot be had.
    """
    if view == "off":
        return None
    if view != "text":
        from . import live

        if live.available():
            return live
        if view == "live":
            raise ValueError("the live view needs a notebook page and anywidget; use --view text here")
    from . import text

    return text


def watch(handle, shown_by: ModuleType | None, background: bool = False) -> None:
    """Show a run until it is finished, and its record as it then stands, whatever happened.

    Raises EngineDied when the engine went away, and Interrupted (after the run was cancelled) on a KeyboardInterrupt.
    """
    try:
        if shown_by is not None:
            shown_by.watch(handle, background)
        elif not background:
            while not handle.wait(1.0):
                pass
    except KeyboardInterrupt:
        stop(handle)
        raise interrupted(handle.record) from None
    except EngineDied as error:
        settle(handle.record, "failed", str(error))
        raise
    finally:
        if shown_by is not None and not background:
            shown_by.finish(handle)


def stop(handle, patience: float = 1.0) -> None:
    """Cancel the run and wait at most `patience` seconds for its last numbers."""
    try:
        handle.cancel()
        handle.wait(patience)
    except (TfmagicError, KeyboardInterrupt):
        pass  # the record stands as it is
    settle(handle.record, "stopped")


def settle(record, status: str, error: str | None = None) -> None:
    """Close the record of a run whose end the engine did not tell."""
    if not record.finished:
        record.status, record.error, record.position = status, error, None


def interrupted(record) -> Interrupted:
    tokens = sum(len(stream.tokens) for stream in record.streams)
    return Interrupted(
        f"Run {record.id} was stopped after {words.plural(tokens, 'token')}.",
        "What it had said is kept in _tfold; the engine is ready for the next cell.",
    )
