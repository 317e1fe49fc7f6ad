"""Norms: the forms against their twins, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch

from tests.kernels_gpu.test_linear import close, random
from tfmagic.kernels.gpu import norm

D = 200


def rowwise():
    """Name -> (a function of rows [M, D], its twin)."""
    w, b = 1 + 0.1 * random(D, seed=1), random(D, seed=2)
    h, heads = random(64, D, seed=3).bfloat16(), w[:40].bfloat16()
    return {
        "rms": (lambda x: norm.rms(x, w, 1e-6), lambda x: norm.rms_twin(x, w, 1e-6)),
        "layer": (lambda x: norm.layer(x, w, b, 1e-6), lambda x: norm.layer_twin(x, w, b, 1e-6)),
        "add_rms": (
            lambda x: norm.add_rms(x, h[:1].expand(len(x), -1), w, 1e-6)[1],
            lambda x: norm.rms_twin((x.float() + h[:1].float()).bfloat16(), w, 1e-6),
        ),
        "gated_rms": (
            lambda x: norm.gated_rms(x.unflatten(1, (5, 40)), x, heads, 1e-6),
            lambda x: norm.gated_rms_twin(x.unflatten(1, (5, 40)), x, heads, 1e-6),
        ),
    }


@pytest.mark.parametrize("name", rowwise())
def test_rows_say_what_the_twin_says_in_any_company(name):
    f, twin = rowwise()[name]
    x = (3 * random(9, D)).bfloat16()
    whole = f(x)
    assert close(whole, twin(x).double())
    for rows in (slice(0, 1), slice(4, 5), slice(2, 9)):
        assert torch.equal(f(x[rows]), whole[rows])


def test_strided_rows_and_places_for_results():
    x, w = random(7, 3 * D).bfloat16(), 1 + random(D, seed=1)
    part, out = x[:, D : 2 * D], torch.empty(7, D, dtype=torch.bfloat16)
    assert norm.rms(part, w, 1e-6, out=out) is out
    assert torch.equal(out, norm.rms(part.contiguous(), w, 1e-6))
    o = random(7, 4, 50, seed=5).bfloat16()
    gate = norm.gated_rms(o, part, w[:50].bfloat16(), 1e-6)
    assert torch.equal(gate, norm.gated_rms(o, part.contiguous(), w[:50].bfloat16(), 1e-6))


def test_the_residual_is_rounded_before_its_norm():
    x, h, w = random(5, D).bfloat16(), random(5, D, seed=1).bfloat16(), torch.ones(D)
    total, out = norm.add_rms(x, h, w, 1e-6, total=x.clone())
    assert torch.equal(total, (x.float() + h.float()).bfloat16())
    assert torch.equal(out, norm.rms(total, w, 1e-6))
    assert norm.rms(x[:0], w, 1e-6).shape == (0, D)
