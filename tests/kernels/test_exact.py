"""Exact sums: the bound that the row law stands on, checked with integers, and against float64 without grids."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmagic.kernels import exact

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300)
@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(8, exact.WIDEST))
def test_a_row_lands_on_one_grid_of_that_many_bits(values, bits):
    x = torch.tensor(values, dtype=torch.float32)[None]
    q = exact.on_grid(x, bits)[0]
    top = float(x.abs().max())
    if not top:
        assert not q.any()
        return
    steps = [Fraction(float(v)) for v in q]
    unit = next(
        Fraction(2) ** e
        for e in range(math.frexp(top)[1], -400, -1)
        if all((s / Fraction(2) ** e).denominator == 1 for s in steps)
    )
    assert max(abs(s / unit) for s in steps) <= 2**bits
    assert float((q - x[0].double()).abs().max()) <= top * 2.0 ** (1 - bits)


@pytest.mark.parametrize("terms", [1, 2, 3, 16, 64, 320, 768, 4096, 17408, 1 << 20])
def test_the_widths_leave_room_for_every_partial_sum(terms):
    left, right = exact.split(terms)
    assert left + right + math.ceil(math.log2(terms)) <= 53
    assert max(left, right) <= exact.WIDEST


def test_sums_too_long_for_a_useful_grid_are_refused():
    with pytest.raises(ValueError, match="products"):
        exact.split(1 << 22)


@pytest.mark.parametrize("k", [64, 320, 768])
def test_a_product_is_the_same_in_any_order_of_its_terms(k):
    g = torch.Generator().manual_seed(k)
    a, b = torch.randn(5, k, generator=g) * torch.logspace(-6, 6, 5)[:, None], torch.randn(k, 7, generator=g)
    y = exact.matmul(a, b)
    for _ in range(5):
        order = torch.randperm(k, generator=g)
        assert torch.equal(exact.matmul(a[:, order], b[order]), y)
    halves = exact.on_grid(a, exact.split(k)[0])
    columns = exact.on_grid(b, exact.split(k)[1], dim=-2)
    assert torch.equal((halves[:, : k // 3] @ columns[: k // 3] + halves[:, k // 3 :] @ columns[k // 3 :]).float(), y)
    assert torch.allclose(y, (a.double() @ b.double()).float(), rtol=0, atol=float(a.abs().max()) * 1e-4)


def test_mixing_ignores_rows_without_weight():
    g = torch.Generator().manual_seed(0)
    p, v = torch.rand(3, 40, generator=g), torch.randn(40, 8, generator=g)
    p[:, 30:] = 0
    loud = v.clone()
    loud[30:] = 1e20
    bits = exact.split(40)
    mixed = [exact.mix(p, *exact.units(x, bits[1]), bits[0]) for x in (v, loud, v[:30])[:2]]
    short = exact.mix(p[:, :30], *exact.units(v[:30], bits[1]), bits[0])
    assert torch.equal(mixed[0], mixed[1]) and torch.equal(mixed[0], short)
    assert torch.allclose(short.float(), p @ v, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 24, 64])
def test_the_tree_adds_every_term_once(n):
    x = torch.arange(1, n + 1).float()[:, None].repeat(1, 3)
    assert torch.equal(exact.tree_sum(x, -2), torch.full((3,), n * (n + 1) / 2))
