"""A storm over the resident process: chats with pictures, up to 16 streams, cancellations and clients that are killed.

Afterwards every reply is asked for again, cold, alone and undrafted, and must be the same; and the engine's memory must
not have grown.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageDraw

from tests.patience import LONG, PATIENT
from tfmagic.client import connect
from tfmagic.run import Run

ROOT = Path(__file__).parents[2]
CACHE_GIB = 0.02
"""Little, so that states are evicted all the time."""
OUTSTANDING, TURNS = 10, 6
QUESTIONS = (
    "Hello!", "Tell me a story about a cat.", "What is in the picture?", "And then?", "Say that again, please.",
    "Repeat: the red fox runs over the tall hill and the blue fox runs over the low hill.", "What is 2 + 3?", "Why?",
)  # fmt: skip
VICTIM = """
import sys, time
sys.path.insert(0, {root!r})
from tfmagic.client import connect
{patient}
engine = connect(start=False)
own = engine.submit({text!r}, max_tokens=400, temperature=1, seed=1)
kept = engine.submit({text!r}, max_tokens=12, temperature=1, seed={seed}, background=True)
print(own.record.id, kept.record.id, flush=True)
time.sleep(600)
"""


def picture(seed: int) -> Image.Image:
    rng = random.Random(seed)
    image = Image.new("RGB", (64, 48), rng.choice(["white", "black", "navy"]))
    box = [rng.randrange(20), rng.randrange(15), 30 + rng.randrange(30), 25 + rng.randrange(20)]
    ImageDraw.Draw(image).ellipse(box, fill=rng.choice(["red", "green", "yellow"]))
    return image


@dataclass
class Turn:
    """What was asked, and how; enough to ask it again."""

    history: list[dict]
    content: list
    params: dict
    handle: object
    chat: str | None
    cancel_at: float | None = None


@dataclass
class Storm:
    seed: int
    counts: Counter = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)

    def __enter__(self) -> Storm:
        self.rng, self.engine = random.Random(self.seed), connect(prompt_cache_gib=CACHE_GIB)
        self.chats: dict[str, list[dict]] = {}
        self.going: list[Turn] = []
        self.over: list[tuple[Turn, Run]] = []
        self.pid = self.engine.status().pid
        return self

    def __exit__(self, *_) -> None:
        self.engine.stop()

    # The storm -------------------------------------------------------------------------------------

    def rage(self, seconds: float) -> None:
        end, killed, looked = time.monotonic() + seconds, time.monotonic(), 0.0
        while (now := time.monotonic()) < end or self.going:
            while now < end and len(self.going) < OUTSTANDING:
                self.ask()
            if now < end and now - killed > 6:
                self.kill_a_client()
                killed = time.monotonic()
            if now - looked > 0.5:
                self.memory.append(self.engine.status().memory)
                looked = now
            self.collect()
            time.sleep(0.005)

    def ask(self) -> None:
        rng, busy = self.rng, {turn.chat for turn in self.going}
        free = [name for name in self.chats if name not in busy and len(self.chats[name]) < 2 * TURNS]
        name = rng.choice(free) if free and rng.random() < 0.8 else f"chat-{len(self.chats)}"
        history = list(self.chats.setdefault(name, []))
        content: list = [rng.choice(QUESTIONS)]
        seen = sum(len(turn["content"]) - 1 for turn in history if turn["role"] == "user")
        if rng.random() < 0.3 and seen < 4:  # the engine reads no more in one conversation
            content.insert(0, picture(rng.randrange(6)))
        params = {"max_tokens": rng.choice([4, 12, 24]), "temperature": rng.choice([0, 1]), "seed": rng.randrange(9)}
        streams = rng.choice([1, 1, 1, 2, 4])
        if history and rng.random() < 0.15:  # an earlier turn is edited: asked with its messages, outside the chat
            history[0] = {"role": "user", "content": ["Good morning!", *history[0]["content"][1:]]}
            name = None
            handle = self.engine.submit(content, messages=history, streams=streams, **params)
        else:
            handle = self.engine.submit(content, chat=name, streams=streams, **params)
        turn = Turn(history, content, params, handle, name)
        if rng.random() < 0.12:
            turn.cancel_at = time.monotonic() + rng.random()
        self.going.append(turn)

    def collect(self) -> None:
        for turn in list(self.going):
            if turn.cancel_at and time.monotonic() > turn.cancel_at:
                turn.handle.cancel()
                turn.cancel_at = None
            if turn.handle.wait(0):
                self.going.remove(turn)
                self.finished(turn, turn.handle.record)

    def finished(self, turn: Turn, run: Run) -> None:
        assert run.status in ("done", "stopped"), f"run {run.id}: {run.error}"
        self.over.append((turn, run))
        self.counts[run.status] += 1
        self.counts["pictures"] += len(run.pictures)
        self.counts["pictures kept"] += run.images_kept or 0
        self.counts["resumed"] += bool(run.cached_tokens)
        self.counts["settled rows"] += run.settled
        self.counts["explained"] += run.miss is not None
        self.ttft += [run.ttft["total"]] if run.ttft else []
        if turn.chat and (run.status == "done" or run.text):
            asked = {"role": "user", "content": turn.content}
            self.chats[turn.chat] += [asked, {"role": "assistant", "content": run.text}]

    def kill_a_client(self) -> None:
        """A kernel that dies in the middle of a run: that one ends, the one in the background does not."""
        text, seed = self.rng.choice(QUESTIONS), self.rng.randrange(9)
        source = VICTIM.format(root=str(ROOT), patient=PATIENT, text=text, seed=seed)
        victim = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=os.environ)
        own, kept = victim.stdout.readline().split()
        victim.kill()
        victim.wait()
        victim.stdout.close()
        for run in (own, kept):
            handle, whose = self.engine.follow(run), {"max_tokens": 400 if run == own else 12, "temperature": 1}
            assert handle.wait(5 * LONG), f"run {run} of a killed client does not end"
            assert run == own or handle.record.status == "done", handle.record
            turn = Turn([], [text], {**whose, "seed": 1 if run == own else seed}, handle, None)
            self.over.append((turn, handle.record))
        self.counts["kernel deaths"] += 1

    # What must be true afterwards ---------------------------------------------------------------------

    def check(self) -> None:
        status = self.engine.status()
        assert status.pid == self.pid and not status.running and not status.waiting, "the engine must have lived on"
        known: dict[str, list[int]] = {}
        for turn, run in self.over:
            for i, stream in enumerate(run.streams):
                params = {**turn.params, "seed": turn.params["seed"] + i}
                name = repr((turn.history, [str(part)[:40] for part in turn.content], run.id, params))
                if not turn.params["temperature"] and i:
                    name = repr((turn.history, [str(part)[:40] for part in turn.content], run.id, turn.params))
                if not stream.tokens:
                    continue
                if name not in known:
                    params["max_tokens"] = len(stream.tokens) if run.status == "stopped" else params["max_tokens"]
                    cold = self.engine.run(turn.content, messages=turn.history, cache="off", draft="off", **params)
                    assert cold.cached_tokens == 0
                    known[name] = cold.streams[0].token_ids
                    self.counts["checked"] += 1
                said = stream.token_ids
                whole = known[name][: len(said)] if run.status == "stopped" else known[name]
                assert said == whole, f"run {run.id} stream {i} is not what it is cold and alone"

    def growth(self) -> int:
        """Bytes that the engine's memory grew from the storm's middle to its end; of six looks at least."""
        n = len(self.memory)
        return int(statistics.median(self.memory[-n // 6 :]) - statistics.median(self.memory[n // 2 - n // 6 : n // 2]))

    def report(self) -> str:
        counts = ", ".join(f"{value:,} {name}" for name, value in self.counts.items())
        ends = [f"{self.memory[n] / 2**20:.0f}" for n in (0, len(self.memory) // 2, -1)]
        status = self.engine.status()
        return "\n".join([
            counts,
            f"memory {' → '.join(ends)} MiB, {self.growth() / 2**20:+.1f} MiB in the second half",
            f"ttft median {statistics.median(self.ttft):.0f} ms; cache {dict(status.cache_counts)}",
        ])  # fmt: skip
