"""After the warm-up no launch is the first of its kind, which would wait for a compiler: by the keys under which Triton
keeps what it compiled, for a device that is not here."""

from __future__ import annotations

import importlib
import pkgutil
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.driver import driver

from tests.kernels_gpu.test_compiling import Driver
from tfmagic.engine import families
from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.drafting.block import Ask
from tfmagic.engine.drafting.draft import chain
from tfmagic.engine.drafting.static import StaticDrafter
from tfmagic.engine.families.qwen3_5.gpu.drafted import DraftedRound
from tfmagic.engine.families.qwen3_5.gpu.fields import Fields
from tfmagic.engine.families.qwen3_5.gpu.graphs import Graphs
from tfmagic.engine.families.qwen3_5.gpu.rounds import BUCKETS, Bucket, First, Round
from tfmagic.engine.families.qwen3_5.gpu.warmup import one_of_each, warm_up
from tfmagic.engine.sampling import Draw
from tfmagic.kernels import gpu
from tfmagic.kernels.gpu.common import INTERPRETED
from tfmagic.kernels.gpu.compiling import COMPILING, Kernel

from ..families.conftest import straight
from .conftest import GREEDY, SEEDED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="what is interpreted is not compiled")
MODULES = [importlib.import_module(f"{gpu.__name__}.{one.name}") for one in pkgutil.iter_modules(gpu.__path__)]


@pytest.fixture(params=["bf16", "fp8"])
def model(request):
    return families.load(Checkpoint(resolve(None)), "cpu", form="bf16", kv=request.param)


@pytest.fixture
def launched(monkeypatch):
    """Kinds of launches so far; nothing runs."""
    found, kernels = set(), set()

    def run(kernel, *args, grid, warmup, **options):
        kernels.add(kernel)
        *_, bind = kernel.device_caches[0]
        _, kind, options = bind(*args, **options)
        found.add((kernel.__module__, kernel.__name__, str(kind), str(options)))

    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(Kernel, "run", run)
    monkeypatch.setattr(Round, "outcomes", lambda *_: [])
    monkeypatch.setattr(First, "drawn", lambda *_: [])
    for module in MODULES:
        monkeypatch.setattr(module, "launchable", lambda x: True, raising=False)
    yield found
    for kernel in kernels:
        del kernel.device_caches[0]


def work(model, rng: random.Random) -> None:
    """A prompt pass of some prompts, and a round behind it."""
    states = [model.new_state() for _ in range(rng.choice([1, 1, 2, 3, 8, 15]))]
    for state in states:
        state.rows = 64 * rng.randrange(20)
    lengths = [rng.choice([rng.randrange(1, 64), rng.randrange(1, 600)]) for _ in states]
    if len(states) == 1 and rng.random() < 0.4:
        states[0].rows, lengths = 0, [rng.randrange(512, 4097)]
    marks = [[s.rows + n // 64 * 64] if n >= 64 and rng.random() < 0.7 else [] for s, n in zip(states, lengths)]
    parts = zip(states, lengths, marks)
    model.prompt_passes([(state, [0] * n, {}, straight(n), own) for state, n, own in parts])
    windows = [chain([0] * rng.randrange(1, 17)) for _ in states]
    kinds = GREEDY, SEEDED, replace(SEEDED, logprobs=3)
    model.round(states, windows, [Draw(rng.choice(kinds), 3, 100) for _ in states])
    kind = rng.choice(kinds)
    model.draw(torch.zeros(model.vocab), [Draw(kind, 3, 100)] * rng.choice([1, 2, 5, 16]))


def test_nothing_is_the_first_of_its_kind_afterwards(model, launched):
    warm_up(model, GREEDY.size)
    assert not COMPILING.get()
    known, rng = set(launched), random.Random(4)
    assert len(known) > 60
    model.tap([0, 2])
    for _ in range(60):
        work(model, rng)
    for rows, columns in ((2, 2), (2, 34), (14, 10), (64, 26), (30, 2)):
        patches = torch.zeros(rows * columns, 3 * model.preprocessor.frames * model.preprocessor.patch**2)
        model.towers([patches, patches], [(1, rows, columns)] * 2)
        model.tower(patches, (1, rows, columns))
    assert {one for one in launched if one not in known} == set()


@pytest.mark.parametrize("bits", [4, 16])
def test_nor_is_anything_of_the_drafters(shipped, launched, bits):
    folder = Checkpoint(Checkpoint(resolve(None)).path / "drafter")
    drafter = StaticDrafter(folder, shipped, "cpu", GREEDY.size, bits, dtype=torch.bfloat16)
    drafter.warm_up(Graphs(torch.device("cpu")))
    known, rng, width, i32 = set(launched), random.Random(4), drafter.waiting.shape[2], torch.int32
    assert len(known) > 15
    for streams in (1, 2, 3, 7, 16):
        contexts = [drafter.context() for _ in range(streams)]
        for context in contexts:
            for rows in (rng.randrange(1, 900), rng.randrange(1, 12), rng.randrange(1, 60)):
                drafter.extend(context, torch.zeros(rows, width, dtype=torch.bfloat16), context.end)
        drafter.lattices([Ask(context, 1, context.end, 7) for context in contexts])
        for rows in (1, 8):
            shape = -(-streams // 4) * 4, rows
            out = Fields(drafter.device, drawn=(i32, shape), path=(i32, shape), walked=(i32, shape[:1]))
            round = SimpleNamespace(out=out, taps=torch.zeros(shape[0] * rows, width, dtype=torch.bfloat16))
            batch = drafter.batches[next(n for n in BUCKETS if n >= streams)]
            batch.take(contexts, round)
            b = Bucket(batch.streams, 2 * rows, 9, rows == 1)
            rest = SimpleNamespace(device=drafter.device, round=lambda *_: None)
            DraftedRound(b, rest, Graphs(drafter.device), round.taps, batch=batch).launch()
        del context, contexts
    assert {one for one in launched if one not in known} == set()


def test_layers_of_one_structure_are_gone_through_once(model):
    few, all = one_of_each(model.text).w.layers, model.text.w.layers
    assert [type(layer.mixer).__name__ for layer in few] == ["Attention", "Delta"] and len(all) > 4
    assert any(layer is all[0] for layer in few)
