"""Log probabilities of a round's rows: the kernel beside its twin and the host's rule, and a row's in any company."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.families_gpu.conftest import GREEDY
from tfmagic.engine.sampling import likeliest
from tfmagic.kernels.gpu import logprobs as module
from tfmagic.kernels.gpu.logprobs import TOP, Logprobs, logprobs, logprobs_twin

SIZE = 210
UNTOUCHED = 7


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE", 128)


def made(S, R):
    shapes = ((S, R), torch.float64), ((S, R, TOP), torch.int32), ((S, R, TOP), torch.float64)
    return Logprobs(*(torch.full(shape, UNTOUCHED, dtype=dtype) for shape, dtype in shapes))


def told(S, R, size=SIZE):
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(S * R, SIZE + 6, generator=g)
    logits[::2] = torch.round(logits[::2])  # many ties
    logits[-1, 3:190] = -torch.inf
    logits[:, size:] = 50  # ids without a token
    drawn = torch.randint(0, size, (S, R), generator=g, dtype=torch.int32)
    path = torch.stack([torch.randperm(R, generator=g) for _ in range(S)]).int()
    return logits, drawn, path, torch.arange(S, dtype=torch.int32) % (R + 1), size


@pytest.mark.parametrize(("S", "R", "size"), [(9, 4, SIZE), (3, 1, SIZE), (4, 2, 12), (2, 1, 128)])
def test_they_are_the_twins_and_the_hosts(S, R, size):
    logits, drawn, path, walked, _ = given = told(S, R, size)
    found, twin = made(S, R), made(S, R)
    logprobs(*given, found)
    logprobs_twin(*given, twin)
    for x, y in zip(found, twin):
        assert torch.allclose(x.double(), y.double(), rtol=0, atol=1e-12)
    by = replace(GREEDY, size=size, logprobs=TOP)
    for s in range(S):
        assert (found.logprob[s, walked[s] :] == UNTOUCHED).all() and (found.top[s, walked[s] :] == UNTOUCHED).all()
        for i, row in enumerate(path[s, : walked[s]].tolist()):
            own, top = likeliest(logits[s * R + row].numpy(), by, int(drawn[s, row]))
            assert math.isclose(own, found.logprob[s, i], rel_tol=1e-12) or own == found.logprob[s, i]
            ids, values = found.top[s, i, : len(top)].tolist(), found.logprobs[s, i, : len(top)].tolist()
            assert ids == [id for id, _ in top]
            assert all(a == b or abs(a - b) < 1e-12 for a, (_, b) in zip(values, top))
            assert (found.top[s, i, len(top) :] == -1).all()


def test_a_rows_are_its_own():
    logits, drawn, path, _, size = told(5, 4)
    walked = torch.full((5,), 4, dtype=torch.int32)
    together, alone = made(5, 4), made(1, 4)
    logprobs(logits, drawn, path, walked, size, together)
    for s in range(5):
        one = slice(s, s + 1)
        logprobs(logits[4 * s : 4 * s + 4], drawn[one], path[one], walked[one], size, alone)
        assert all(torch.equal(x[0], y[s]) for x, y in zip(alone, together))


def test_one_row_may_be_several_streams():
    logits, drawn = told(2, 1)[0][:1], torch.tensor([[3], [9], [3]], dtype=torch.int32)
    out, none = made(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    logprobs(logits.expand(3, -1), drawn, none, torch.ones(3, dtype=torch.int32), SIZE, out)
    assert torch.equal(out.top[0], out.top[1]) and out.logprob[0] == out.logprob[2] != out.logprob[1]
