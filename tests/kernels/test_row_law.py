"""The row law, kernel by kernel: a row's bits do not depend on how many rows share the call, where it stands among
them, or how many threads there are."""

from __future__ import annotations

import pytest
import torch

from tfmagic.kernels import activation, attention, delta, norm, rotary
from tfmagic.kernels.linear import Weight, linear, rms_linear

ROWS = range(1, 257)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rowwise():
    """Name -> a function of rows [M, 96]."""
    matrix, weight = random(200, 96, seed=1), 1 + 0.1 * random(96, seed=2)
    plain, folded = Weight(matrix, bias=random(200, seed=3)), Weight(matrix, normed=weight)
    cos, sin = rotary.doubled(random(1, 8))
    return {
        "linear": lambda x: linear(x, plain),
        "rms_linear": lambda x: rms_linear(x, folded, 1e-6),
        "rms": lambda x: norm.rms(x, weight, 1e-6),
        "rms by head": lambda x: norm.rms(x.view(-1, 6, 16), weight[:16], 1e-6).flatten(1),
        "unit": norm.unit,
        "layer": lambda x: norm.layer(x, weight, weight, 1e-6),
        "sigmoid": activation.sigmoid,
        "silu": activation.silu,
        "softplus": activation.softplus,
        "gelu": activation.gelu,
        "gelu_tanh": activation.gelu_tanh,
        "rotate": lambda x: rotary.rotate(x.view(-1, 3, 32), cos.expand(len(x), -1), sin.expand(len(x), -1)).flatten(1),
        "angles": lambda x: torch.cat(rotary.doubled(100 * x), -1),
    }


@pytest.mark.parametrize("name", rowwise())
def test_rows_keep_their_bits_in_any_company(name):
    f, x = rowwise()[name], 3 * random(256, 96)
    alone = torch.cat([f(x[i : i + 1]) for i in range(len(x))])
    for rows in ROWS:
        for start in {0, 1, 7, len(x) - rows} & set(range(len(x) - rows + 1)):
            assert torch.equal(f(x[start : start + rows]), alone[start : start + rows]), (rows, start)
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(9))
    assert torch.equal(f(x[shuffled]), alone[shuffled])


@pytest.mark.parametrize("name", ["linear", "rms_linear", "rms", "layer", "silu"])
def test_threads_change_nothing(name):
    f, x, before = rowwise()[name], 3 * random(1024, 96), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = f(x)
        torch.set_num_threads(2)
        assert torch.equal(f(x), one)
    finally:
        torch.set_num_threads(before)


def attention_case(rows=90, heads=4, groups=2, d=32):
    bits = attention.Bits(d, 4096)
    q, k, v = 2 * random(rows, heads, d), 2 * random(rows, groups, d, seed=1), random(rows, groups, d, seed=2)
    return q, k, v, bits, attention.prepare(k, v, bits)


def test_attention_rows_keep_their_bits_in_any_window():
    q, _, _, bits, (k, v, scale) = attention_case()
    whole = attention.attend(q, k, v, scale, 0, bits)
    for start in (0, 1, 5, 63, 64, 80):
        for rows in (1, 2, 7, 10):
            end = start + rows
            part = attention.attend(q[start:end], k[:, :end], v[:, :end], scale[:, :end], start, bits)
            assert torch.equal(part, whole[start:end]), (start, rows)


def test_stored_keys_and_values_fit_float32():
    _, k, v, bits, stored = attention_case()
    narrow = attention.prepare(k[..., :4], v[..., :4], attention.Bits(4, 16))
    for x in (*stored, *narrow, *attention.prepare(1e6 * k, 0 * v, bits)):
        assert torch.equal(x.float().double(), x)


def delta_case(rows, heads=6, dk=16, dv=24, seed=0):
    q, k, v = (random(rows, heads, n, seed=seed + i) for i, n in enumerate((dk, dk, dv)))
    g, beta = (
        -2 * torch.rand(rows, heads, generator=torch.Generator().manual_seed(seed + 7)),
        activation.sigmoid(random(rows, heads, seed=seed + 8)),
    )
    return 0.1 * random(heads, dk, dv, seed=seed + 9), norm.unit(q) * dk**-0.5, norm.unit(k), v, g, beta


def test_chunked_rows_keep_their_bits_however_the_prompt_is_cut():
    S, *rows = delta_case(300)
    whole, last, kept = delta.chunks(S, *rows, {64, 192, 256})
    for cuts in ([64], [128, 192], [64, 128, 192, 256]):
        state, outs = S, []
        for a, b in zip([0, *cuts], [*cuts, 300]):
            o, state, _ = delta.chunks(state, *(x[a:b] for x in rows), set())
            outs.append(o)
            if b in kept:
                assert torch.equal(state, kept[b])
        assert torch.equal(torch.cat(outs), whole) and torch.equal(state, last)


def test_a_chunk_row_does_not_see_the_rows_behind_it():
    S, *rows = delta_case(64)
    whole, _, _ = delta.chunks(S, *rows, set())
    for n in (1, 2, 31, 63):
        assert torch.equal(delta.chunks(S, *(x[:n] for x in rows), set())[0], whole[:n])
        changed = [torch.cat([x[:n], 50 * y[n:]]) for x, y in zip(rows, delta_case(64, seed=50)[1:])]
        assert torch.equal(delta.chunks(S, *changed, set())[0][:n], whole[:n])


def test_steps_keep_their_bits_in_any_batch_and_window():
    cases = [delta_case(16, seed=100 * i) for i in range(5)]
    alone = []
    for S, *rows in cases:
        outs, state = [], S[None]
        for t in range(16):
            o, state, _ = delta.steps(state, *(x[None, t : t + 1] for x in rows))
            outs.append(o[0])
        alone.append((torch.cat(outs), state[0]))
    batch = [torch.stack(parts) for parts in zip(*cases)]
    o, after, journal = delta.steps(*batch)
    for i, (S, *rows) in enumerate(cases):
        assert torch.equal(o[i], alone[i][0]) and torch.equal(after[i], alone[i][1])
        for n in (1, 5, 16):
            _, state, _ = delta.steps(S[None], *(x[None, :n] for x in rows))
            assert torch.equal(delta.replay(S, journal, i, n), state[0])


def test_the_convolution_keeps_its_bits():
    m, taps = random(103, 40), random(4, 40, seed=1)
    whole = delta.convolve(m, taps)
    for start, end in ((0, 1), (5, 6), (17, 50), (0, 100)):
        assert torch.equal(delta.convolve(m[start : end + 3], taps), whole[start:end])
    assert torch.equal(delta.convolve(torch.stack([m, m]), taps)[1], whole)
