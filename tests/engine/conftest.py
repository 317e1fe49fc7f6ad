from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from tfmagic.engine import families
from tfmagic.engine.cache.store import Store
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.loop import Engine
from tfmagic.engine.prompt import PreparedImage, Prompt
from tfmagic.engine.sampling import Sampling
from tfmagic.engine.stream import Request
from tfmagic.run import Run, Stream

from .drafters import Clock

GOLDEN = Path(__file__).parent.parent / "golden" / "qwen3_5_tiny"
GREEDY = Sampling(
    max_tokens=24, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, draft="on", logprobs=0, stop=[],
    stop_ids=frozenset({250}), size=256,
)  # fmt: skip
SEEDED = replace(GREEDY, temperature=1.0, top_k=20, top_p=0.9, seed=11)


class Letters:
    """A detokenizer without a tokenizer: each id is one character."""

    def push(self, id: int) -> str:
        return letter(id)

    def flush(self) -> str:
        return ""


def letter(id: int) -> str:
    return chr(0x100 + id)


def text_prompt(ids: list[int], marks=()) -> Prompt:
    return Prompt(list(ids), list(ids), [], torch.arange(len(ids)).expand(3, -1), 0, list(marks))


class Bench:
    """An engine with its events folded into runs as a client would."""

    def __init__(
        self, model, budget: int = 1 << 30, memory: int = 1 << 40, store: Store | None = None, drafter=None, curve=None
    ):
        self.events, self.runs, self.numbers = [], {}, count()
        store = Store(budget, model.grain) if store is None else store
        self.engine = Engine(model, store, self.take, letter, memory, drafter, curve)

    def take(self, event) -> None:
        self.events.append(event)
        self.runs[event.run].apply(event)

    def submit(self, prompt: Prompt, sampling: Sampling = GREEDY, streams: int = 1, cache: bool = True) -> Run:
        run = Run(f"run-{next(self.numbers):04}", 0.0, streams=[Stream() for _ in range(streams)])
        self.runs[run.id] = run
        self.engine.submit(Request(run.id, prompt, sampling, streams, time.perf_counter(), 0.0, Letters, cache))
        return run

    def drain(self) -> None:
        for _ in range(10_000):
            if not self.engine.step():
                return
        raise AssertionError("the engine does not come to an end")

    def run(self, prompt: Prompt, sampling: Sampling = GREEDY, streams: int = 1, cache: bool = True) -> Run:
        run = self.submit(prompt, sampling, streams, cache)
        self.drain()
        return run

    @property
    def kept(self) -> dict:
        """Kept states by their key."""
        return {kept.key: kept for kept in self.engine.store._kept.values()}


class Oracle:
    """A drafter that knows the reply (`known`: whole contexts), and errs now and then."""

    known: list[list[int]] = []

    def __init__(self, ids: list[int]):
        self.ids = ids

    def propose(self, limit: int) -> list[int]:
        here = len(self.ids)
        right = next((full[here : here + limit] for full in self.known if full[:here] == self.ids), [])
        wrong = 5 * here % 21
        return [id if i != wrong else (id + 1) % 240 for i, id in enumerate(right)]

    def near(self) -> bool:
        """Often: rounds then begin one behind the other, or wait for guesses."""
        return len(self.ids) % 4 > 0


@pytest.fixture
def oracle(monkeypatch):
    """Streams draft by `Oracle`; returns its list of known contexts, to be filled."""
    monkeypatch.setattr("tfmagic.engine.drafting.copy.Copier", Oracle)
    monkeypatch.setattr(Oracle, "known", [])
    return Oracle.known


@pytest.fixture
def clock(monkeypatch):
    """The clock that tells what drafts take."""
    clock = Clock()
    monkeypatch.setattr("tfmagic.engine.drafting.drafting.time", clock)
    return clock


@pytest.fixture(scope="session")
def tiny():
    return families.load(Checkpoint(GOLDEN), "cpu")


@pytest.fixture
def bench(tiny):
    return Bench(tiny)


@pytest.fixture(scope="session")
def pictures():
    """Two images for `tiny`, 6 prompt rows each, to be placed by `picture_prompt`."""
    g = torch.Generator().manual_seed(3)
    shapes = [("one.png", (1, 4, 6)), ("two.png", (1, 6, 4))]
    return [
        PreparedImage(name, name, 24, 16, 0, 6, grid, torch.randn(24, 96, generator=g), name.encode() * 4)
        for name, grid in shapes
    ]


def picture_prompt(model, parts: list) -> Prompt:
    """Parts are lists of ids and images in order."""
    from tfmagic.engine.prompt.build import key

    ids, images = [], []
    for part in parts:
        if isinstance(part, list):
            ids += part
        else:
            images.append(replace(part, start=len(ids) + 1))
            ids += [242, *[model.image_token_id] * part.tokens, 243]
    positions, delta = model.positions(ids, images)
    return Prompt(ids, key(ids, images), images, positions, delta, [])
