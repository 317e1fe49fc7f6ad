"""A run without an engine: scripted protocol events, folded into a record in real time by a thread.

`Handle(name)` gives what `tfmagic.client` would give for a run; the scenarios are `SCENARIOS`. It may be held until a
test has seen what it wants to see, however slow the page is: see `HELD`. Run as a program it writes a page that shows
every scenario's panel in light and dark and at 600 px: `python scripted.py gallery OUT.html`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tfmagic import protocol
from tfmagic.run import Node, Picture, Round, Run, Stream, Token

REPLIES = [
    "The kite on the left is red with a long blue tail, and the one on the right is a small green kite with two "
    "short tails. They are flying over a hill with three trees and a white dog that looks up at them.\n\nThe wind "
    "seems to come from the left: both tails point the same way, and so do the grass and the dog's ears. Nobody "
    "holds the green kite, so it may be tied to the fence behind the hill.",
    "Two kites: a red one with a blue tail and a green one. The red one is higher. Below them are a hill, three "
    "trees and a dog; the sky is clear but for one cloud on the right.",
    "There are two kites in this picture. One is red and has a long blue tail; the other is green, smaller, and has "
    "two short tails. A white dog watches from the hill.",
    "A hill with three trees, a white dog, and two kites above it. I would say it is a windy afternoon, since the "
    "tails of both kites are stretched out flat.",
]
WRONG = [" and", " in", " of", " which", " with", ",", " over", " boat", " a", " sky", " house", " it", "\n", " that"]

Timed = tuple[float, protocol.Event]
"""Seconds to wait before the event, and the event."""


def pieces(text: str) -> list[str]:
    """The text in tokens of a word or a mark, as a tokenizer would cut it."""
    words: list[str] = []
    for word in text.replace("\n", " \n ").split(" "):
        for i, part in enumerate(p for p in (word.rstrip(".,:;"), word[len(word.rstrip(".,:;")) :]) if p):
            words.append(part if i or not words or words[-1] == "\n" or part == "\n" else " " + part)
    if text.startswith(" "):
        words[0] = " " + words[0]
    return words


def rounds(stream: int, text: str, draft: bool, pace: float, ms: float = 60.0) -> Iterator[Timed]:
    """A stream's rounds until its text is said."""
    rng, left, now = random.Random(stream + 7), pieces(text), ms
    while left:
        source = rng.choices(("copy", "tree", "block"), (2, 6, 2))[0] if draft else "none"
        likely = 0.94 if source == "copy" else 0.78
        depth = {"copy": 15, "tree": 7, "block": 5, "none": 0}[source]
        accepted = 0
        while accepted < min(depth, len(left) - 1) and rng.random() < likely:
            accepted += 1
        nodes = grow(rng, left[:accepted], depth, 15 if source == "tree" else depth, likely)
        said, left = left[: accepted + 1], left[accepted + 1 :]
        made = ["draft"] * accepted + ["plain"]
        now += 1e3 * pace
        tokens = [Token(id=hash(p) % 50_000, piece=p, made=m) for p, m in zip(said, made, strict=True)]
        yield pace, protocol.Committed("", stream, timed_round(rng, now, len(said), source, nodes), tokens)


def grow(rng: random.Random, right: list[str], depth: int, rows: int, likely: float) -> list[Node]:
    """A tree of draft rows around the path that is accepted; a chain where it has no more rows than that path."""
    nodes = [Node(piece, k, round(likely ** (k + 1), 3), True) for k, piece in enumerate(right)]
    row = len(nodes)
    while len(nodes) < min(rows, depth):  # the first guess goes on where the model does not
        nodes.append(Node(rng.choice(WRONG), row, round(likely ** (len(nodes) + 1), 3)))
        row = len(nodes)
    while len(nodes) < rows:
        parent = rng.choice([0, 0, 1, 1, 2, 3, *range(depth, len(nodes))])
        chance = 0.4 * (nodes[parent - 1].chance if parent else 1.0) * rng.random()
        nodes.append(Node(rng.choice(WRONG), parent, round(chance, 3)))
    return nodes


def timed_round(rng: random.Random, ms: float, committed: int, source: str, nodes: list[Node]) -> Round:
    """The round with the times of an engine whose pass takes 5 ms and 0.05 ms more a row."""
    draft_ms, verify_ms = (0.7 if source in ("tree", "block") else 0.05), 5.0 + 0.05 * len(nodes)
    planned = draft_ms + verify_ms + 0.1
    jitter = [round(x * (1 + 0.2 * rng.random()), 3) for x in (draft_ms, verify_ms, 0.2)]
    cut = rng.choice((0, 0, 0, 3, 6)) if source == "tree" else 0
    return Round(ms, committed, source, nodes, cut, *jitter, serial_ms=5.2, planned_ms=planned)


def woven(*streams: Iterator[Timed]) -> Iterator[Timed]:
    """The streams' rounds in turn: one wait for each verify pass that they share."""
    for row in itertools.zip_longest(*streams):
        for i, timed in enumerate(t for t in row if t is not None):
            yield (timed[0] if i == 0 else 0.0), timed[1]


def picture(k: int, start: int) -> Picture:
    return Picture(f"kites-{k}.png", 640, 480, start, 300)


TTFT = {"queue": 0.5, "prepare": 1.9, "restore": 2.4, "tower": 0.0, "prefill": 7.4, "first": 2.0, "total": 14.2}
COLD = {"queue": 0.4, "prepare": 21.0, "restore": 0.0, "tower": 51.3, "prefill": 142.8, "first": 5.5, "total": 221.0}


def opening(rows: int, cached: int, kept: list[bool], ttft: dict, streams: int, slow: float = 0.0) -> Iterator[Timed]:
    """Queue, prompt pass and the first tokens."""
    yield 0.02, protocol.Queued("", 0)
    yield 0.02 + slow, protocol.Prepared("", rows, [picture(k + 1, 40 + 380 * k) for k in range(len(kept))])
    miss = "parts from chat “kites”, turn 2 at row 4,170 after “and the”: “cat” here, “dog” there"
    yield 0.02, protocol.Restored("", cached, "ram" if cached else None, None, miss, 128 if cached else 0)
    yield 0.02 + slow, protocol.Encoded("", 0 if all(kept) else 1, kept)
    for reached in range(cached + 512, rows, 512):
        yield 0.03 + slow / 3, protocol.Prefilled("", reached)
    yield 0.02, protocol.Prefilled("", rows)
    for i in range(streams):
        first = Token(0, pieces(REPLIES[i % 4])[0], "first")
        yield 0.0, protocol.First("", i, first, ttft["total"] + i, ttft if i == 0 else {})


def rest(text: str) -> str:
    """What follows the first token."""
    return text[len(pieces(text)[0]) :].lstrip(" ")


def ending(streams: int, status: str = "done", ms: float = 1810.0, error: str | None = None) -> Iterator[Timed]:
    for i in range(streams if status == "done" else 0):
        yield 0.0, protocol.Finished("", i, "stop")
    yield 0.0, protocol.Done("", status, ms, error)


def talk(n: int, repeat: int = 1, draft: bool = True, pace: float = 0.07) -> Iterator[Timed]:
    texts = [" ".join([REPLIES[i % 4]] * repeat) for i in range(n)]
    return woven(*(rounds(i, " " + rest(text), draft, pace) for i, text in enumerate(texts)))


def scenario(name: str) -> tuple[Run, Iterator[Timed]]:
    """The record as it starts, and its events."""
    run = Run(
        "run-" + name,
        time.time(),
        model="Qwen3.5-9B",
        device="cuda:0",
        prompt="Describe the kites.",
        chat="kites",
        turn=3,
        params={"draft": "on", "max_tokens": 400},
    )
    chain = itertools.chain
    if name == "warm":
        run.streams = [Stream(seed=7)]
        return run, chain(opening(4203, 4160, [True, True], TTFT, 1), talk(1), ending(1))
    if name == "cold":
        run.streams, run.turn = [Stream(seed=7)], 1
        return run, chain(opening(4203, 0, [False, False], COLD, 1, slow=0.25), talk(1), ending(1))
    if name in ("four", "two"):
        n = {"four": 4, "two": 2}[name]
        run.streams = [Stream(seed=7 + i) for i in range(n)]
        return run, chain(opening(4203, 4160, [True, False], TTFT, n), talk(n), ending(n))
    if name == "plain":
        run.streams, run.chat, run.params = [Stream()], None, {"draft": "off"}
        return run, chain(opening(31, 0, [], COLD | {"tower": 0.0, "total": 169.7}, 1), talk(1, draft=False), ending(1))
    if name in ("long", "stop"):
        run.streams = [Stream(seed=7)]
        return run, chain(opening(4203, 4160, [True, True], TTFT, 1), talk(1, repeat=40), ending(1))
    if name == "failed":
        run.streams = [Stream(seed=7)]
        some = itertools.islice(talk(1), 6)
        error = "The engine ran out of memory in round 7.\nGive it a smaller context: %tfold restart --context 4096"
        return run, chain(opening(4203, 4160, [True, True], TTFT, 1), some, ending(1, "failed", error=error))
    raise ValueError(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")


SCENARIOS = ("warm", "cold", "two", "four", "plain", "long", "failed")


HELD = {
    protocol.Prepared: "queued", protocol.Encoded: "encode", protocol.First: "prefill", protocol.Finished: "decoding",
}  # fmt: skip
"""The phase that an event ends. A phase that is held goes on until the file `go-PHASE` is there, and behind the last
one that is held everything happens at once."""
SIGNALS = Path(os.environ.get("SCRIPTED_SIGNALS", "."))
"""The folder of such files."""


class Handle:
    """A run's handle, as `tfmagic.client` gives it, over a script. `speed` divides every wait; `hold`: phases."""

    def __init__(self, name: str, speed: float = 1.0, hold: tuple[str, ...] = ()):
        self.record, self._events = scenario(name)
        self._hold = hold
        self.version = 0
        self.asked = None
        """When `cancel` was called, seconds since the submission."""
        self._speed, self._cancelled, self._change = speed, threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Whether the run is finished, after at most `timeout` seconds."""
        with self._change:
            return self._change.wait_for(lambda: self.record.finished, timeout)

    def changed(self, version: int, timeout: float) -> int:
        with self._change:
            self._change.wait_for(lambda: self.version != version, timeout)
            return self.version

    def cancel(self) -> None:
        self.asked = self.asked or time.time() - self.record.created
        self._cancelled.set()

    def _play(self) -> None:
        for wait, event in self._events:
            if self._wait(HELD.get(type(event)), wait / self._speed):
                break
            if isinstance(event, protocol.Done):
                event.ms = 1e3 * (time.time() - self.record.created)
            self._fold(event)
        if not self.record.finished:
            self._fold(protocol.Done("", "stopped", 1e3 * (time.time() - self.record.created)))

    def _wait(self, phase: str | None, seconds: float) -> bool:
        """Until the event that ends `phase` is due; True: the run was cancelled."""
        while phase in self._hold and not (SIGNALS / f"go-{phase}").exists():
            if self._cancelled.wait(0.01):
                return True
        hurry = self._hold and (SIGNALS / f"go-{self._hold[-1]}").exists()
        return self._cancelled.wait(0 if hurry else seconds)

    def _fold(self, event: protocol.Event) -> None:
        with self._change:
            self.record.apply(event)
            self.version += 1
            self._change.notify_all()


def tell_when_heard() -> None:
    """Make the file `heard` once the kernel has heard the page of a panel through the control comm."""
    from tfmagic.views import live

    def look():
        while not any(panel.heard for panel in [*live._open.values()]):
            time.sleep(0.01)
        (SIGNALS / "heard").touch()

    threading.Thread(target=look, daemon=True).start()


def state_after(name: str, events: int | None = None) -> dict:
    """The panel's whole state after so many of the scenario's events (None: all), as a reloaded page gets it."""
    from tfmagic.views.live import Panel

    record, script = scenario(name)
    ms = 0.0
    panel = Panel(type("Still", (), {"record": record, "version": 0})())
    for wait, event in itertools.islice(script, events):
        ms += 1e3 * wait
        if isinstance(event, protocol.Done):
            event.ms = ms
        record.apply(event)
        panel._frame()
    panel._frame()
    return panel._snapshot() | {"elapsed": ms}


GALLERY = [("cold", 2), ("cold", 7), ("warm", 20), ("two", 24), ("four", 30), ("plain", 40), ("long", 400)]
GALLERY += [("failed", None), ("warm", None), ("four", None)]


def literal(value) -> str:
    """The value as JavaScript that may stand in a script element."""
    return json.dumps(value).replace("</", "<\\/")


def gallery() -> str:
    """A page of panels, drawn by the module itself with a model that stands still."""
    views = Path(__file__).parents[2] / "tfmagic/views"
    panels = [{"name": name, "state": state_after(name, events)} for name, events in GALLERY]
    module, style = (views / "live.js").read_text(), (views / "live.css").read_text()
    return f"""<!doctype html><meta charset="utf-8"><title>Live panels</title><style>{style}
body{{margin:0;font:13px system-ui}} main{{padding:16px}} main>div{{margin-bottom:16px}}</style><body><main></main>
<script type="module">
const source = {literal(module)}, panels = {literal(panels)};
const {{default: make}} = await import(URL.createObjectURL(new Blob([source], {{type: "text/javascript"}})));
const ask = new URLSearchParams(location.search);
document.body.dataset.jpThemeLight = String(!ask.has("dark"));
if (ask.has("dark")) document.body.style.background = "#111";
for (const {{name, state}} of panels) {{
  if (ask.has("only") && ask.get("only") !== name) continue;
  const el = document.querySelector("main").appendChild(document.createElement("div"));
  const model = {{get: k => ({{state, card: {{}}}})[k], on() {{}}, off() {{}}, send() {{}}}};
  const widget = make();
  await widget.initialize({{model}});
  await widget.render({{model, el}});
}}
document.body.dataset.ready = "true";
</script>"""


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "gallery":
        sys.exit("usage: python scripted.py gallery OUT.html")
    Path(sys.argv[2]).write_text(gallery())
