"""The row law, kernel by kernel: a row's bits do not depend on how many rows share the call, where it stands among
them, or how many threads there are."""

from __future__ import annotations

from random import Random as Python

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


def one_by_one(S, rows, path):
    """The rows of a path in single steps: their outputs, and the state after them."""
    outs, state = [], S[None]
    for t in path:
        o, journal = delta.steps(state, *(x[t : t + 1] for x in rows), delta.plan([[-1]]))
        state = delta.replay(state, journal, [[0]])
        outs.append(o[0])
    return torch.stack(outs), state[0]


def test_steps_keep_their_bits_in_any_batch_and_window():
    cases, lengths = [delta_case(16, seed=100 * i) for i in range(5)], [16, 3, 16, 1, 7]
    windows = [list(range(-1, n - 1)) for n in lengths]
    joined = [torch.cat(parts) for parts in zip(*([x[:n] for x in rows] for (_, *rows), n in zip(cases, lengths)))]
    before = torch.stack([S for S, *_ in cases])
    o, journal = delta.steps(before, *joined, delta.plan(windows))
    first = 0
    for i, ((S, *rows), n) in enumerate(zip(cases, lengths)):
        assert torch.equal(o[first : first + n], one_by_one(S, rows, range(n))[0])
        for part in {1, n // 2, n} - {0}:
            moved = delta.replay(before[i : i + 1], journal, [list(range(first, first + part))])[0]
            assert torch.equal(moved, one_by_one(S, rows, range(part))[1])
        first += n
    after = delta.replay(before, journal, [[sum(lengths[:i]) + t for t in range(n)] for i, n in enumerate(lengths)])
    assert torch.equal(after, torch.stack([one_by_one(S, rows, range(n))[1] for (S, *rows), n in zip(cases, lengths)]))


def random_tree(rng, rows):
    """Parents, chains and bushes by turns."""
    spread = rng.choice([1, 3, 16])
    return [-1, *(rng.randrange(max(0, row - spread), row) for row in range(1, rows))]


def path_to(parents, row):
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def test_rows_of_trees_keep_the_bits_of_their_paths():
    rng = Python(5)
    for trial in range(12):
        lengths = [rng.randint(1, 16) for _ in range(rng.choice([1, 2, 5]))]
        windows = [random_tree(rng, n) for n in lengths]
        cases = [delta_case(n, seed=100 * trial + i) for i, n in enumerate(lengths)]
        before = torch.stack([S for S, *_ in cases])
        o, journal = delta.steps(before, *map(torch.cat, zip(*(rows for _, *rows in cases))), delta.plan(windows))
        first, paths, ends = 0, [], []
        for (S, *rows), parents in zip(cases, windows):
            for row in range(len(parents)):
                outs = one_by_one(S, rows, path_to(parents, row))[0]
                assert torch.equal(o[first + row], outs[-1]), (trial, parents, row)
            row = rng.randrange(len(parents))
            paths.append([first + r for r in path_to(parents, row)])
            ends.append(one_by_one(S, rows, path_to(parents, row))[1])
            first += len(parents)
        assert torch.equal(delta.replay(before, journal, paths), torch.stack(ends))


def test_attention_over_a_tree_keeps_the_bits_of_its_paths():
    rng = Python(6)
    for trial in range(12):
        q, _, _, bits, stored = attention_case()
        start, parents = rng.choice([0, 1, 40, 74]), random_tree(rng, rng.randint(2, 16))
        rows = slice(start, start + len(parents))
        paths = [path_to(parents, row) for row in range(len(parents))]
        sees = torch.tensor([[other in path for other in range(len(parents))] for path in paths])
        seen = [x[:, : rows.stop] for x in stored]
        tree = attention.attend(q[rows], *seen, start, bits, sees)
        for row, path in enumerate(paths):
            keys = [*range(start), *(start + r for r in path)]
            query, own = q[start + row : start + row + 1], [x[:, keys] for x in stored]
            alone = attention.attend(query, *own, len(keys) - 1, bits)
            assert torch.equal(tree[row], alone[0]), (trial, parents, row)


def test_the_convolution_keeps_its_bits():
    m, taps = random(103, 40), random(4, 40, seed=1)
    whole = delta.convolve(m, taps)
    for start, end in ((0, 1), (5, 6), (17, 50), (0, 100)):
        assert torch.equal(delta.convolve(m[start : end + 3], taps), whole[start:end])
    assert torch.equal(delta.convolve(torch.stack([m, m]), taps)[1], whole)
