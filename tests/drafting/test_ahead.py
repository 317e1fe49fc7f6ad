"""Drafts that begin behind a round, before the host knows what it gave: they are those that are made afterwards."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

from tfmagic.engine import families
from tfmagic.engine.cache.store import Store
from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.drafting.static import CONTEXTS, StaticDrafter
from tfmagic.engine.loop import Engine

from ..bench.chosen import Chosen
from ..engine.conftest import GREEDY, SEEDED, Bench, letter, text_prompt
from .conftest import GOLDEN, changed, weights
from .test_engine import DRAFTERS, IDS

PROMPTS = [text_prompt(IDS[:n]) for n in (70, 100, 131)]
WIDE = {"head_dim": 64, "conv_group_size": 16, "intermediate_size": 768}
"""Of the drafter on a GPU, whose kernels take no narrower heads."""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def target(request):
    where = GOLDEN / "qwen3_5_tiny" if request.param == "cpu" else resolve(None)
    return families.load(Checkpoint(where), request.param, form="bf16")


class Noting(Chosen):
    """Keeps what the drafter really gave."""

    def begin(self, rate: float) -> None:
        super().begin(rate)
        self.gave = []

    def _chosen(self, ask, lattice):
        self.gave.append((ask.position, ask.anchor, *lattice))
        return super()._chosen(ask, lattice)


@pytest.fixture
def drafter(write, target):
    """One whose guesses are right more often than not, once it knows the replies."""
    vocab, hidden = target.embedding().shape
    fits = {"hidden_size": hidden, "vocab_size": vocab, "num_target_layers": target.depth}
    c = changed(**DRAFTERS["second"] | fits | (WIDE if target.device.type == "cuda" else {}))
    return Noting(StaticDrafter(Checkpoint(write(c, weights(c))), target, target.device), GREEDY.size)


def bench(target, drafter=None) -> Bench:
    made = Bench(target)
    made.engine = Engine(target, Store(0, target.grain), made.take, letter, drafter=drafter)
    return made


def noted(drafter) -> list[int]:
    """Grows with each draft that begins behind a round, by its streams."""
    found, begin = [], drafter.behind

    def behind(contexts, flight):
        begun = begin(contexts, flight)
        found.append(len(contexts) if begun is not None else 0)
        return begun

    drafter.behind = behind
    return found


def known(target, drafter, asked) -> list:
    """The replies without drafts, which the drafter then knows."""
    plain = bench(target)
    runs = [plain.run(prompt, replace(sampling, draft="off"), streams) for prompt, sampling, streams in asked]
    drafter.known = [prompt.ids + stream.token_ids for (prompt, *_), run in zip(asked, runs) for stream in run.streams]
    return [[stream.token_ids for stream in run.streams] for run in runs]


def rounds(runs) -> list:
    return [
        [[(r.draft_source, [(node.piece, node.parent) for node in r.nodes], r.committed) for r in stream.rounds]
         for stream in run.streams]
        for run in runs
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("draft", ["tree", "block", "on"])
def test_they_are_those_made_afterwards(target, drafter, sampling, draft):
    asked = [(prompt, replace(sampling, draft=draft), streams) for prompt, streams in zip(PROMPTS, (1, 3, 2))]
    expected, told, gave = known(target, drafter, asked), [], []
    for ahead in (True, False):
        drafter.begin(0.7)
        found = noted(drafter) if ahead else []
        if not ahead:
            drafter.behind = None
        made = bench(target, drafter)
        runs = [made.submit(*one) for one in asked]
        made.drain()
        assert [[stream.token_ids for stream in run.streams] for run in runs] == expected
        told.append(rounds(runs))
        gave.append(drafter.gave)
        if ahead:
            assert sum(n > 0 for n in found) > (0 if draft == "on" else 3), "but where a stream may copy"
    assert told[0] == told[1]
    assert [one[:2] for one in gave[0]] == [one[:2] for one in gave[1]]
    # But for the last bits, which may differ with the company, and candidates that are as good as equal.
    assert np.mean([(one[2] == other[2]).mean() for one, other in zip(*gave)]) > 0.98
    assert max(np.abs(one[3] - other[3]).max() for one, other in zip(*gave)) < 0.05
    assert any(r.accepted for run in runs for stream in run.streams for r in stream.rounds)
    del made
    gc.collect()
    assert len(drafter.free) == CONTEXTS


def test_streams_come_and_go_meanwhile(target, drafter):
    """Some end, one is stopped, and a prompt comes between."""
    ends = replace(GREEDY, draft="tree")
    asked = [(prompt, ends, 3) for prompt in PROMPTS]
    expected = known(target, drafter, asked)
    drafter.begin(0.6)
    found, made = noted(drafter), bench(target, drafter)
    runs = [made.submit(*asked[0]), made.submit(PROMPTS[1], replace(ends, max_tokens=5), 3)]
    while not found:
        made.engine.step()
    stopped = made.submit(*asked[2])
    made.engine.step()
    made.engine.cancel(stopped.id)
    runs.append(made.submit(*asked[2]))
    made.drain()
    assert [run.status for run in runs] == ["done"] * 3 and stopped.status == "stopped"
    for run, whole, most in zip(runs, expected, (99, 5, 99)):
        assert [stream.token_ids for stream in run.streams] == [ids[:most] for ids in whole]
    del made
    gc.collect()
    assert len(drafter.free) == CONTEXTS, "every context came back"


class Failing:
    """A round that never ran."""

    def __init__(self, round):
        self.round = round

    def fetch(self, tapped: bool = True) -> None:
        """It has nothing to give; `round` holds what the one before gave."""

    def __call__(self):
        raise RuntimeError("the device is busy elsewhere")


def test_a_round_that_fails_takes_its_drafts_along(target, drafter, monkeypatch):
    asked = [(PROMPTS[0], replace(GREEDY, draft="tree"), 2)]
    expected = known(target, drafter, asked)
    drafter.begin(0.7)
    made, launch, flights = bench(target, drafter), target.launch_round, []
    found = noted(drafter)

    def launched(*told):
        flights.append(launch(*told) if len(flights) != 2 else Failing(flights[-1].round))
        return flights[-1]

    monkeypatch.setattr(made.engine.rounds, "_launch", launched)
    run = made.submit(*asked[0])
    made.drain()
    assert [stream.token_ids for stream in run.streams] == expected[0]
    assert len(found) == len(flights) > 5 and all(found), "also behind the one that failed, and those after it"


def test_a_drafter_that_cannot_begin_costs_no_token(target, drafter, capfd):
    asked = [(PROMPTS[0], replace(GREEDY, draft="tree"), 2)]
    expected = known(target, drafter, asked)
    drafter.begin(0.7)
    drafter.behind = lambda contexts, flight: flight.fetch(tapped=False) or 1 / 0
    made = bench(target, drafter)
    run = made.submit(*asked[0])
    made.drain()
    assert [stream.token_ids for stream in run.streams] == expected[0]
    assert "the drafter failed, and 2 streams go on without" in capfd.readouterr().err
