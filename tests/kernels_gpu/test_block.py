"""A block drafter's kernels against their twins."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.drafting.conftest import FIRST, Target, changed, taps, weights
from tests.kernels_gpu.test_linear import random
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.block import Ask
from tfmagic.engine.drafting.static import StaticDrafter
from tfmagic.kernels.gpu import block, linear, norm
from tfmagic.kernels.gpu.block import Ring, Seen
from tfmagic.kernels.gpu.rope import tables

INVERSE = 1e4 ** (-torch.arange(0, 24, 2).float() / 24)


def turns(*places: int):
    return tables(torch.tensor(places, dtype=torch.int32), INVERSE, None)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def close(found: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    """Within so many roundings to bf16 of the largest number."""
    assert found.isfinite().all()
    assert float((found.double() - expected.double()).abs().max()) <= roundings * 2**-8 * float(expected.abs().max())


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("added", [False, True])
def test_convolution(K, side, added):
    R, groups, group = 5, 6, 7
    u = random(3 * R, groups * group).bfloat16()
    dynamic, base = random(3 * R, 2 * K * groups, seed=1).bfloat16(), random(2, K, groups, group, seed=2).bfloat16()
    residual = random(3 * R, groups * group, seed=3).bfloat16() if added else None
    expected = block.convolve_twin(u, dynamic, base, side, R, residual)
    found = block.convolve(u, dynamic, base, side, R, residual)
    assert found is residual or not added
    close(found, expected)


def test_heads():
    y, norms = random(4, 5 * 24 + 8).bfloat16()[:, : 5 * 24], (1 + 0.1 * random(3, 24, seed=1)).bfloat16()
    cos, sin = turns(0, 1, 700, 50000)
    expected = block.turned_twin(y[:, : 3 * 24].unflatten(1, (3, 24)), norms, cos, sin, 1e-6)
    close(block.turned(y, norms, cos, sin, 1e-6), expected)


def test_rows_of_the_ring(monkeypatch):
    layers, heads, W, d = 2, 3, 64, 24
    kv, norms = random(6, layers * 2 * heads * d).bfloat16(), (1 + 0.1 * random(layers, d, seed=1)).bfloat16()
    places = (3, 63, 64, 128, 1000, 9)
    told = kv, norms, *turns(*places), 1e-6
    where = ints(1, 1, 2, 3, 2, -1), ints(*places)
    rings = [Ring(*(torch.full((4, layers, heads, W, d), 7.0).bfloat16() for _ in range(2))) for _ in range(2)]
    block.keep(*told, rings[0], *where)
    monkeypatch.setattr(block, "launchable", lambda x: False)
    block.keep(*told, rings[1], *where)
    for ours, expected in zip(*rings):
        close(ours, expected.double())
        assert bool((ours[0] == 7.0).all()), "the row without a slot went nowhere"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4, 70])
@pytest.mark.parametrize(("heads", "kv", "R"), [(4, 2, 5), (3, 1, 8)])
def test_attention(heads, kv, R, window, causal):
    S, W, d, slots = 5, 192, 24, 6
    ring = Ring(*(random(slots, 2, kv, W, d, seed=seed).bfloat16() for seed in (1, 2)))
    # An empty context, a young one, one that began late, and two whose ring went round.
    seen = Seen(ints(0, 3, 1, 5, 2), ints(0, 0, 500, 0, 64), ints(0, 9, 530, 1000, 384), ints(40, 9, 530, 1000, 384))
    qk, v = random(S * R, heads + kv, d, seed=3).bfloat16(), random(S * R, 2 * kv * d, seed=4).bfloat16()[:, kv * d :]
    told = qk, v, ring, 1, seen, window, causal
    close(block.attend(*told), block.attend_twin(*told), 2)


@pytest.mark.parametrize(("V", "count"), [(80, 16), (4096, 16), (9001, 5)])
def test_the_likeliest(V, count):
    logits = random(3, V + 7)[:, :V]
    logits[0, 40:] = logits[0, 0]
    logits[1, :40], logits[1, 50] = float("nan"), float("inf")
    best, ids = block.likeliest(logits, count)
    known = logits.masked_fill(logits.isnan(), -torch.inf)
    expected = torch.sort(known, dim=1, descending=True, stable=True)
    assert torch.equal(best, expected.values[:, :count]) and torch.equal(ids, expected.indices[:, :count])


@pytest.mark.parametrize(("K", "rank"), [(16, 32), (5, 100)])
def test_edges(K, rank):
    S, P, vocab = 3, 4, 60
    ids = torch.randint(0, vocab, (S, P, K), generator=torch.Generator().manual_seed(1))
    anchors = torch.tensor([[5, 1], [60, 1], [59, 1]], dtype=torch.int32)[:, 0]
    projected, *books = (random(n, rank, seed=n).bfloat16() for n in (S * P, vocab, vocab))
    projected[5] = 1e38
    told = ids, anchors, projected, *books
    out = torch.full((S, P, K, K), float("nan"))
    found, expected = block.edges(*told, out), block.edges_twin(*told)
    assert bool(found.isfinite().all()) and not found[1, 0].any() and not found[:, 0, 1:].any()
    keep = torch.arange(S * P) != 5
    close(found.flatten(0, 1)[keep], expected.flatten(0, 1)[keep], 2)
    assert bool((found.abs() <= block.LARGEST).all())


@pytest.mark.parametrize("changes", [{}, FIRST], ids=["second", "first"])
def test_a_whole_draft(tmp_path, changes, monkeypatch):
    """Every launch of a draft for three streams, one of which has rows that wait, against the twins of all."""
    c = changed(hidden_size=64, **changes)
    (tmp_path / "config.json").write_text(json.dumps(c))
    save_file(weights(c), tmp_path / "model.safetensors")
    found = []
    for twins in (False, True):
        if twins:
            for module in (block, norm, linear):
                monkeypatch.setattr(module, "launchable", lambda x: False)
        drafter = StaticDrafter(Checkpoint(tmp_path), Target(hidden=64), bits=4, dtype=torch.bfloat16, kept=64)
        asks = []
        for i, rows in enumerate((3, 0, 80)):
            context = drafter.context()
            drafter.extend(context, taps(rows, i, 128), 5)
            asks.append(Ask(context, 9 + i, context.end, 5))
        found.append(drafter.lattices(asks))
    for ours, expected in zip(*found):
        error = np.linalg.norm(ours.logits - expected.logits) / np.linalg.norm(expected.logits)
        assert error < 0.03, "two layers of roundings to bf16"
        assert (ours.ids == expected.ids).mean() > 0.7, "but for candidates that are nearly as good"
