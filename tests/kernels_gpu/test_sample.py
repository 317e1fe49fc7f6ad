"""Drawing tokens: the device's rule is the host's, and a row's draw does not depend on its neighbours."""

from __future__ import annotations

import pytest
import torch

from tfmagic.engine.sampling import Sampling, draw
from tfmagic.kernels.gpu import sample as module
from tfmagic.kernels.gpu.sample import Rules, embed, sample, sample_twin, scatter_features

SIZE = 210
CASES = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "hot": (1.2, 0, 1.0, 0.0),
    "top-k": (0.9, 7, 1.0, 0.0),
    "top-p": (0.9, 0, 0.7, 0.0),
    "all": (1.1, 40, 0.9, 0.02),
    "one": (1.0, 1, 1.0, 0.0),
}


def rules_of(names, seeds=None):
    heat, k, p, m = zip(*(CASES[name] for name in names))
    f64, i32 = torch.float64, torch.int32
    seeds = torch.arange(len(names)) * 12345678901 if seeds is None else seeds
    position = torch.arange(len(names), dtype=i32) + 1000
    made = (torch.tensor(x, dtype=t) for x, t in ((heat, f64), (k, i32), (p, f64), (m, f64)))
    return Rules(*made, seeds, position, SIZE)


def rows_of(n):
    x = 2 * torch.randn(n, 220, generator=torch.Generator().manual_seed(0))
    x[:, SIZE:] = 50  # ids without a token
    return x


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE", 128)


@pytest.mark.parametrize("name", CASES)
def test_the_device_draws_what_the_host_draws(name):
    rules, logits = rules_of([name, name]), rows_of(2)
    logits[1] = torch.round(logits[1])  # many ties
    drawn = sample(logits, rules)
    assert torch.equal(drawn, sample_twin(logits, rules))
    heat, k, p, m = CASES[name]
    host = Sampling(1, heat, p, k, m, 0, "on", 0, [], frozenset(), SIZE)
    for row, id, seed, position in zip(logits, drawn.tolist(), rules.seed.tolist(), rules.position.tolist()):
        assert id == draw(row.numpy(), host, seed, position)


def test_a_draw_is_its_rows_own():
    names, logits = [*CASES][1:4], rows_of(3)
    rules = rules_of(names)
    together = sample(logits, rules)
    assert torch.equal(sample(logits[1:2], Rules(*(part[1:2] for part in rules[:6]), SIZE)), together[1:2])


def test_greedy_alone_and_beside_draws():
    logits = torch.round(rows_of(4))
    rules = rules_of(["greedy"] * 4)
    best = logits[:, :SIZE].argmax(1).int()
    assert torch.equal(sample(logits, rules, greedy=True), best)
    mixed = rules_of(["greedy", "greedy", "one", "one"])
    assert torch.equal(sample(logits, mixed)[:2], best[:2])


def test_rows_that_are_not_finite_give_no_token():
    logits = rows_of(5)
    logits[0, 17], logits[1, 200], logits[2], logits[3, 4] = float("nan"), float("inf"), float("-inf"), float("-inf")
    for name in ("greedy", "hot"):
        drawn = sample(logits, rules_of([name] * 5))
        assert drawn[:3].tolist() == [-1, -1, -1] and (drawn[3:] >= 0).all()


def test_embeddings():
    table, ids = torch.randn(9, 8).bfloat16(), torch.tensor([3, 3, 0], dtype=torch.int32)
    rows = embed(ids, table)
    assert torch.equal(rows, table[[3, 3, 0]])
    assert scatter_features(rows, torch.ones(1, 8), torch.tensor([1])) is rows and (rows[1] == 1).all()
