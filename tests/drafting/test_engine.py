"""A drafter in the engine: whichever it is and however it was read, the reply is the one without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tfmagic.engine import families
from tfmagic.engine.cache.store import Store
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.block import Drafter
from tfmagic.engine.loop import Engine

from ..engine.conftest import GREEDY, SEEDED, Bench, letter, text_prompt
from .conftest import FIRST, GOLDEN, changed, weights

IDS = [int(i) for i in torch.randint(0, 240, (150,), generator=torch.Generator().manual_seed(2))]
FOR_TINY = {
    "hidden_size": 64,
    "num_target_layers": 4,
    "vocab_size": 256,
    "mask_token_id": 249,
    "target_layer_ids": [0, 2],
    "rope_theta": 1e7,
}
DRAFTERS = {
    "golden": {},
    "golden, 4 bits": {"bits": 4},
    "second": FOR_TINY | {"block_size": 8},
    "second, 4 bits": FOR_TINY | {"block_size": 8, "bits": 4},
    "second, a window of 4, causal": FOR_TINY | {"sliding_window": 4, "is_causal": True, "block_size": 16},
    "first": FOR_TINY | FIRST | {"layer_types": ["sliding_attention"] * 2},
    "few ids": FOR_TINY | {"vocab_size": 100},
}


@pytest.fixture(scope="module")
def model():
    """A target of our own, for tapping it is for good."""
    return families.load(Checkpoint(GOLDEN / "qwen3_5_tiny"), "cpu")


@pytest.fixture
def bench(model):
    """Makes benches whose engines draft by a drafter, or by none."""

    def bench(drafter: Drafter | None) -> Bench:
        model.tap([])
        made = Bench(model)
        made.engine = Engine(model, Store(1 << 30, model.grain), made.take, letter, drafter=drafter)
        return made

    yield bench
    model.tap([])


@pytest.fixture
def drafter(model, write):
    def drafter(kind: str) -> Drafter:
        changes = dict(DRAFTERS[kind])
        bits = changes.pop("bits", 16)
        c = changed(**changes)
        folder = write(c, weights(c)) if changes else GOLDEN / "dflash_tiny"
        return Drafter(Checkpoint(folder), model, bits=bits)

    return drafter


def replies(bench: Bench, sampling, streams: int) -> list[list[list[int]]]:
    """Token ids of a first turn, and of a second that resumes from what the first has kept."""
    first = bench.run(text_prompt(IDS[:100]), sampling, streams)
    second = bench.run(text_prompt(IDS), sampling, streams)
    assert second.cached_tokens == 64
    return [[[token.id for token in stream.tokens] for stream in run.streams] for run in (first, second)]


@pytest.fixture(scope="module")
def serial(model):
    """The replies without a draft, by sampling."""
    model.tap([])
    return [replies(Bench(model), replace(sampling, draft="off"), 2) for sampling in (GREEDY, SEEDED)]


@pytest.mark.parametrize(
    ("kind", "draft"), [*((kind, "tree") for kind in DRAFTERS), ("second", "block"), ("second", "on")]
)
def test_no_drafter_changes_a_token(bench, drafter, serial, kind, draft):
    for sampling, expected in zip((GREEDY, SEEDED), serial):
        drafting = bench(drafter(kind))
        assert replies(drafting, replace(sampling, draft=draft), 2) == expected
        rounds = [r for run in drafting.runs.values() for stream in run.streams for r in stream.rounds]
        assert any(r.draft_source in ("tree", "block") and r.drafted for r in rounds)


def test_no_drafter_changes_a_token_of_the_bf16_form(write):
    target, c = families.load(Checkpoint(GOLDEN / "qwen3_5_tiny"), "cpu", form="bf16"), changed(**DRAFTERS["second"])
    said = []
    for drafter in (None, Drafter(Checkpoint(write(c, weights(c))), target)):
        made = Bench(target)
        made.engine = Engine(target, Store(1 << 30, target.grain), made.take, letter, drafter=drafter)
        for sampling in (GREEDY, SEEDED):
            short = replace(sampling, draft="tree" if drafter else "off", max_tokens=8)
            run = made.run(text_prompt(IDS[:70]), short, 2)
            said.append([[token.id for token in stream.tokens] for stream in run.streams])
    assert said[:2] == said[2:] and any(r.drafted for r in run.streams[0].rounds)


def test_a_drafter_that_fails_costs_no_token(bench, drafter, serial, monkeypatch):
    failing = drafter("second")
    calls = iter(range(1000))

    def lattices(asks):
        if next(calls) >= 2:
            raise RuntimeError("out of memory")
        return Drafter.lattices(failing, asks)

    monkeypatch.setattr(failing, "lattices", lattices)
    assert replies(bench(failing), replace(GREEDY, draft="tree"), 2) == serial[0]
