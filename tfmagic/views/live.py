"""The live panel: a run, drawn while it happens.

    panel = Panel(handle)
    try:
        panel.run()        # draws until the run is finished; KeyboardInterrupt passes through
    finally:
        panel.finish()     # the display becomes the static card

Two channels lead to the page. Frames (custom messages, at most 20 a second) carry what is new since the last frame; the
`state` trait holds the whole panel, bounded, about once a second, for a page that was reloaded or came late. One leads
back: the control comm, which the page opens and on which Python never publishes, because ipykernel routes a comm's
messages to the shell that published on it last, and while a cell runs that shell is busy. What arrives there runs on
another thread and only sets a flag or cancels the run; the answer goes the way of all frames.

Of a round the page may ask what it draws a tree from (`trees`); the answer goes as a message of its own.

When the run ends the same display is updated to the card, without a widget in it, so a saved notebook holds no widget
state. The update is lost on a page that was reloaded in mid-run: the widget, which keeps the card as its last state,
then puts it in place itself. So a widget lives until the page has told that no view of it is left.

`replay(record)` shows a finished run as a panel, to step through its rounds; a page that saves the notebook puts the
card into the file.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import uuid
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import EngineDied
from ..run import Run
from .frames import TREES, Tally, head_of, rounds

FRAME = 0.05
"""Seconds between two frames."""
SNAPSHOT = 1.0
"""Seconds between two states of the whole panel, and the longest silence between two messages."""
GRACE = 0.1
"""A run that ends within these seconds gets its card at once and no panel."""
SNAPSHOT_TEXT = 24_000
"""Characters of reply in a snapshot, all streams together: its beginning and, three times as long, its end."""
REPLAYED = 256
"""Trees that a finished run's panel holds from the start, all streams together."""
ASKED = 24
"""Rounds in the answer to one question of the page, around the one that it asked for."""
KEPT = 16
"""Finished panels that wait for the page's word; the oldest beyond them are closed unasked."""
CONTROL = "tfmagic.control"


def available() -> bool:
    """Whether a live panel can be seen here: anywidget is installed and a page runs the cell.

    A page names the cell in the request's metadata; nbclient, papermill and consoles, which draw no widget, do not.
    """
    try:
        import anywidget  # noqa: F401
        from IPython import get_ipython
    except ImportError:
        return False
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return False
    return bool((kernel.get_parent() or {}).get("metadata")) or "google.colab" in sys.modules


def watch(handle, background: bool = False) -> Panel:
    """Draw the run until it is finished, then put its card in place.

    `background`: return at once and draw from a thread. A KeyboardInterrupt passes through and leaves the panel as it
    is: cancel the run, then call `finish(handle)`.
    """
    panel = Panel(handle, background)
    if background:
        panel.show()
        threading.Thread(target=panel.follow, name=f"tfmagic-live-{handle.record.id}", daemon=True).start()
    else:
        panel.run()
        panel.finish()
    return panel


def finish(handle) -> None:
    """Put the card in the place of this handle's panel; nothing when `watch` has done so."""
    for panel in [panel for panel in _open.values() if panel.handle is handle]:
        panel.finish()


def replay(record: Run) -> None:
    """Display the finished run as a panel that stays: every round can be looked at. `available()` must hold."""
    Panel(SimpleNamespace(record=record, version=0)).replay()


def unload() -> None:
    """Close every panel and stop listening to the page."""
    for panel in [*_open.values(), *_kept.values()]:
        panel.close()
    kernel = _kernel()
    if kernel is not None:
        kernel.comm_manager.targets.pop(CONTROL, None)


class Panel:
    """One run's display. `run`, `update` and `finish` belong to one thread; Stop may come on another."""

    def __init__(self, handle, background: bool = False):
        self.handle, self.background = handle, background
        self.stopping = False
        self.heard = False
        """The control comm works: a message came through it."""
        self.frames = 0
        self.name = f"tfmagic-{uuid.uuid4().hex[:12]}"
        """The display's id, and the panel's name between page and kernel."""
        self._widget = None
        self._finished = False
        self._tallies: list[Tally] = []
        self._sent: dict[str, Any] = {}
        self._said = None
        self._wishes: deque[tuple[int, int]] = deque(maxlen=ASKED)
        """Streams and rounds whose trees the page asked for."""
        self._sent_at = self._snapshot_at = 0.0
        _open[self.name] = self

    def show(self) -> None:
        """Display the panel as the run stands."""
        if self._widget is not None:
            return
        run = self.handle.record.id
        words = f"Run {run} was going on when this was saved. %tfold show {run} shows its record."
        self._frame()
        self._display(self._snapshot(), {"text/html": f"<p>{words}</p>", "text/plain": words})

    def replay(self) -> None:
        """Display the finished run, with what the page puts in the panel's place when the notebook is saved."""
        run, bundle = self.handle.record, self.handle.record._repr_mimebundle_()
        _keep(self)
        self._frame()
        state, trees = self._snapshot(), REPLAYED // max(1, len(run.streams))
        for i, stream in enumerate(run.streams):
            state["streams"][i]["trees"] = rounds(stream, len(stream.rounds) - trees, trees)["trees"]
        self._display(state, bundle)
        card = {"html": bundle["text/html"], "text": bundle["text/plain"], "widget": self._widget.model_id}
        self._widget.card = {**card, "later": True}

    def _display(self, state: dict[str, Any], bundle: dict[str, str]) -> None:
        """Make the widget and display it; `bundle` is what a page without it shows."""
        from IPython.display import display

        _listen()
        self._widget = _widget_class()(state=state)
        self._widget.on_msg(lambda widget, content, buffers: _heard(content, control=False))
        self._snapshot_at = time.monotonic()
        view = dict(self._widget._repr_mimebundle_()[0])
        display({**view, **bundle}, raw=True, display_id=self.name)

    def run(self) -> None:
        """Draw until the run is finished. Raises what `handle.wait` raises, and KeyboardInterrupt."""
        if self._widget is None and self.handle.wait(GRACE):
            return
        self.show()
        while not self.handle.wait(FRAME):
            self.update()

    def follow(self) -> None:
        """`run`, then `finish` whatever happened: the life of a background panel."""
        from . import settle

        try:
            self.run()
        except EngineDied as error:
            settle(self.handle.record, "failed", str(error))
        finally:
            self.finish()

    def update(self) -> None:
        """Send what is new as one frame. When nothing is, a second later say at least that the kernel is there."""
        self.answer()
        now, said = time.monotonic(), (self.handle.version, self.stopping, self.heard)
        if said != self._said:
            self._said, self._sent_at = said, now
            self._widget.send(self._frame())
        elif now - self._sent_at >= SNAPSHOT:
            self._sent_at = now
            self._widget.send({"seq": self.frames, "elapsed": _elapsed(self.handle.record)})
        if now - self._snapshot_at >= SNAPSHOT and self._widget.state["seq"] != self.frames:
            self._snapshot_at = now
            self._widget.state = self._snapshot()

    def answer(self) -> None:
        """Send the rounds that the page asked for."""
        while self._wishes:
            i, k = self._wishes.popleft()
            streams = self.handle.record.streams
            if self._widget is not None and 0 <= i < len(streams):
                asked = rounds(streams[i], k - ASKED // 2, ASKED)
                self._widget.send({"asked": {"stream": i, **asked}})

    def wish(self, stream: Any, round: Any) -> None:
        """Note what the page asks for; nothing when that is no place in the run."""
        if isinstance(stream, int) and isinstance(round, int):
            self._wishes.append((stream, round))

    def resync(self) -> None:
        """Let the next `update` send the whole panel, for a page that missed a part."""
        self._snapshot_at, self._said = 0.0, None

    def finish(self) -> None:
        """The last frame, then the card in the panel's place. A second call does nothing."""
        from IPython.display import display, update_display

        if self._finished:
            return
        self._finished = True
        _open.pop(self.name, None)
        bundle = self.handle.record._repr_mimebundle_()
        if self._widget is None:
            display(bundle, raw=True, display_id=self.name)
            return
        _keep(self)
        self._frame()
        with self._widget.hold_sync():
            self._widget.state = self._snapshot()
            card = {"html": bundle["text/html"], "text": bundle["text/plain"], "widget": self._widget.model_id}
            self._widget.card = card
        update_display(bundle, raw=True, display_id=self.name)

    def close(self) -> None:
        """Give the widget back."""
        _open.pop(self.name, None)
        _kept.pop(self.name, None)
        if self._widget is not None:
            self._widget.close()

    def _frame(self) -> dict[str, Any]:
        """What changed since the last frame: fields of the run, and each stream's new text, rounds and fields."""
        run = self.handle.record
        self._tallies += [Tally() for _ in run.streams[len(self._tallies) :]]
        trees = max(1, TREES // max(1, len(run.streams)))
        news = enumerate(tally.read(stream, trees) for tally, stream in zip(self._tallies, run.streams, strict=True))
        streams = {i: new for i, new in news if new}
        head = head_of(run, self._tallies) | {
            "status": "stopping" if self.stopping and not run.finished else run.status,
            "panel": self.name,
            "heard": self.heard,
            "background": self.background,
        }
        changed = {k: v for k, v in head.items() if k not in self._sent or self._sent[k] != v}
        self._sent = head
        self.frames += 1
        return {"seq": self.frames, "elapsed": _elapsed(run), "head": changed, "streams": streams}

    def _snapshot(self) -> dict[str, Any]:
        limit = SNAPSHOT_TEXT // max(1, len(self._tallies))
        streams = {i: tally.whole(limit) for i, tally in enumerate(self._tallies)}
        return {"seq": self.frames, "elapsed": _elapsed(self.handle.record), "head": self._sent, "streams": streams}


# What the page says --------------------------------------------------------------------------------

_open: OrderedDict[str, Panel] = OrderedDict()
"""Panels that are not finished, by name."""
_kept: OrderedDict[str, Panel] = OrderedDict()
"""Finished panels whose widget a page may still show."""


def _keep(panel: Panel) -> None:
    """The panel waits for the page's word."""
    _open.pop(panel.name, None)
    _kept[panel.name] = panel
    while len(_kept) > KEPT:
        next(iter(_kept.values())).close()


def _kernel():
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None)


def _listen() -> None:
    """Register the control comm's target."""
    kernel = _kernel()
    if kernel is not None and CONTROL not in kernel.comm_manager.targets:
        kernel.comm_manager.register_target(CONTROL, _opened)


def _opened(comm, message) -> None:
    comm.on_msg(lambda message: _heard(message["content"]["data"], control=True))
    _heard(message["content"]["data"], control=True)


def _heard(content: dict[str, Any], control: bool) -> None:
    """`hello`: a page draws this run. `stop`: cancel it. `trees`: it wants to draw older rounds. `gone`: no view of it
    is left."""
    name, op = content.get("panel"), content.get("op")
    panel = _open.get(name)
    if panel is not None and op in ("hello", "stop"):
        panel.heard = panel.heard or control
        if op == "hello":
            panel.resync()
        else:
            panel.stopping = True
            panel.handle.cancel()
    if op == "trees" and (panel or name in _kept):
        (panel or _kept[name]).wish(content.get("stream"), content.get("round"))
        if panel is None:
            _kept[name].answer()
    if op == "gone" and name in _kept:
        _kept[name].close()


def _elapsed(run: Run) -> float:
    """Milliseconds since the submission."""
    return run.total_ms if run.total_ms is not None else 1e3 * (time.time() - run.created)


@functools.cache
def _widget_class():
    """The widget's class, made on first use: it imports ipywidgets."""
    import anywidget
    import traitlets

    class RunPanel(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("live.js")
        _css = Path(__file__).with_name("live.css")
        state = traitlets.Dict().tag(sync=True)
        card = traitlets.Dict().tag(sync=True)

    return RunPanel
