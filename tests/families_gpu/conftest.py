from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tfmagic.engine import families
from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.drafting.draft import Window
from tfmagic.engine.families.qwen3_5.gpu.model import GREEDY as PLAIN
from tfmagic.engine.sampling import Draw

from ..engine.conftest import pictures  # noqa: F401
from ..families.conftest import GOLDEN, straight

GREEDY = replace(PLAIN, size=256)
SEEDED = replace(GREEDY, temperature=1.0, top_k=20, top_p=0.9)


@pytest.fixture(scope="session")
def tiny():
    """A random model of 4 layers, 256 ids and a 2-layer tower, in bf16 on the kernels' twins."""
    return families.load(Checkpoint(GOLDEN), "cpu", form="bf16")


@pytest.fixture(scope="session")
def tiny_fp8():
    return families.load(Checkpoint(GOLDEN), "cpu", form="bf16", kv="fp8")


@pytest.fixture(scope="session")
def exact():
    return families.load(Checkpoint(GOLDEN), "cpu")


@pytest.fixture(scope="session")
def shipped():
    return families.load(Checkpoint(resolve(None)), "cpu", form="bf16")


@pytest.fixture(scope="session")
def golden():
    return load_file(GOLDEN / "golden.safetensors")


def ids_of(rows: int, size: int = 240, seed: int = 0) -> list[int]:
    return torch.randint(0, size, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()


def same(a: dict, b: dict) -> None:
    """Two whole states, bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert torch.equal(a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8)), name


def cold(model, ids, marks=()):
    """(logits, state, marks' states by name) of a prompt computed in one pass."""
    state = model.new_state()
    logits, kept = model.prompt_pass(state, ids, {}, straight(len(ids)), list(marks))
    return logits, state, {mark: view.named() for mark, view in kept.items()}


class Reply:
    """A stream behind a prompt, drawn round by round."""

    def __init__(self, state, rows: int, pending: int, sampling=GREEDY, seed: int = 7):
        self.state, self.rows, self.ids, self.by = state, rows, [pending], (sampling, seed)

    def window(self, draft: list[int] = (), parents: list[int] = ()) -> tuple:
        return self.state, Window([self.ids[-1], *draft], [-1, *parents]), Draw(*self.by, self.rows + len(self.ids))


def rounds(model, replies: list[Reply], drafts: list[tuple[list[int], list[int]]] | None = None) -> list:
    """One round of all of them; returns the outcomes."""
    drafts = drafts or [((), ())] * len(replies)
    states, windows, draws = zip(*(reply.window(*draft) for reply, draft in zip(replies, drafts)))
    outcomes = model.round(list(states), list(windows), list(draws))
    for reply, outcome in zip(replies, outcomes):
        reply.ids += outcome.walk.ids
    return outcomes
