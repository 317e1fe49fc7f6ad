"""Each kernel against its slow, plain float64 twin."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tfmagic.kernels import activation, attention, delta, norm, rotary
from tfmagic.kernels.linear import Weight, linear, linear_twin, rms_linear, rms_linear_twin

from .test_row_law import attention_case, delta_case, random


def close(a, b, tolerance=2e-6):
    assert a.dtype == torch.float32 and a.shape == b.shape
    assert float((a - b).abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.parametrize("k", [48, 320, 768])
def test_linear(k):
    x, matrix, bias = random(20, k), random(30, k, seed=1) * k**-0.5, random(30, seed=2)
    close(linear(x, Weight(matrix[:10], matrix[10:], bias=bias)), linear_twin(x, matrix, bias))
    weight = 1 + 0.2 * random(k, seed=3)
    close(rms_linear(9 * x, Weight(matrix, normed=weight), 1e-6), rms_linear_twin(9 * x, matrix, weight, 1e-6), 5e-7)


def test_a_bf16_weight_stays_itself():
    matrix = (0.02 * random(50, 320)).bfloat16()
    held = Weight(matrix).matrix
    large = matrix.float().abs() > matrix.float().abs().amax(-1, keepdim=True) * 2.0**-12
    assert large.float().mean() > 0.99 and torch.equal(held[large], matrix.double()[large])


def test_the_length_bound_holds_for_the_rows_that_use_it():
    weight = Weight(random(50, 320), normed=torch.ones(320))
    spike = torch.zeros(1, 320)
    spike[0, 3] = -1e4
    for x in (random(64, 320), spike, torch.ones(1, 320)):
        rows = (
            (x * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)).add_(weight.offset).sub_(weight.offset)
        )
        unit = weight.offset / 1.5 / 2**52
        assert torch.equal(torch.round(rows / unit), rows / unit)
        for column in weight.matrix[:5]:
            step = next(2.0**e for e in range(0, -80, -1) if torch.equal(torch.round(column / 2.0**e), column / 2.0**e))
            assert float((rows / unit).norm(dim=-1).max() * (column / step).norm()) <= 2**53


def test_norms():
    x, w, b = 5 * random(9, 320), random(320, seed=1), random(320, seed=2)
    close(norm.rms(x, w, 1e-6), norm.rms_twin(x, w, 1e-6))
    close(norm.layer(x + 3, w, b, 1e-6), norm.layer_twin(x + 3, w, b, 1e-6))
    close(norm.unit(x), (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()).float())
    assert not norm.rms(torch.zeros(1, 8), torch.ones(8), 1e-6).any()


def test_activations():
    x = torch.cat([20 * random(1000), torch.tensor([0.0, -0.0, 100.0, -100.0, 1e-30])])
    for ours, theirs in (
        (activation.sigmoid, torch.sigmoid), (activation.silu, F.silu), (activation.softplus, F.softplus),
        (activation.gelu, F.gelu), (activation.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
    ):  # fmt: skip
        assert torch.allclose(ours(x), theirs(x.double()).float(), rtol=3e-6, atol=1e-6)


def test_attention():
    q, k, v, bits, stored = attention_case()
    for start in (0, 40, None):
        rows, seen = q[start or 0 :], stored
        close(attention.attend(rows, *seen, start, bits), attention.attend_twin(rows, k, v, start), 1e-5)


@pytest.mark.parametrize("rows", [1, 3, 63, 64, 65, 150])
def test_the_delta_rule_in_both_forms(rows):
    S, *inputs = delta_case(rows)
    outs, last = delta.delta_twin(S, *inputs)
    o, state, _ = delta.chunks(S, *inputs, set())
    close(o, outs, 1e-5)
    close(state, last, 1e-5)
    o, journal = delta.steps(S[None], *inputs, delta.plan([list(range(-1, rows - 1))]))
    close(o, outs, 1e-5)
    close(delta.replay(S[None], journal, [list(range(rows))])[0], last, 1e-5)


def test_strong_decay_does_not_overflow():
    S, q, k, v, g, beta = delta_case(130)
    o, state, _ = delta.chunks(S, q, k, v, 100 * g, beta, set())
    outs, last = delta.delta_twin(S, q, k, v, 100 * g, beta)
    close(o, outs, 1e-5)
    close(state, last, 1e-5)


def test_rotary_angles_and_axes():
    inverse = rotary.frequencies(1e7, 64)
    assert torch.allclose(inverse.double(), 1e7 ** (-torch.arange(0, 64, 2).double() / 64))
    axis = rotary.axes([11, 11, 10], 32)
    assert [int((axis == a).sum()) for a in range(3)] == [11, 11, 10] and axis[:6].tolist() == [0, 1, 2, 0, 1, 2]
    positions = torch.stack([torch.full((5,), 7), torch.arange(5), 3 * torch.arange(5)])
    cos, sin = rotary.tables(positions, inverse, axis)
    angles = torch.stack([positions[a].double() * inverse[j].double() for j, a in enumerate(axis.tolist())], -1)
    assert torch.allclose(cos.double(), torch.cat([angles, angles], -1).cos(), atol=1e-6)
    x = random(5, 2, 80)
    turned = rotary.rotate(x, cos, sin)
    assert torch.equal(turned[..., 64:], x[..., 64:])
    pairs = (
        torch.complex(x[..., :32].double(), x[..., 32:64].double())
        * torch.polar(torch.ones(5, 32).double(), angles)[:, None]
    )
    assert torch.allclose(turned[..., :64].double(), torch.cat([pairs.real, pairs.imag], -1), atol=1e-5)
