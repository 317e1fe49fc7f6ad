"""Attention over pages in the interpreter: agreement with the twins, and one row's bits in any company."""

from __future__ import annotations

import pytest
import torch

from tests.kernels_gpu.cases import Draws, Paged, chain, ints, packed, path_to, planned, tree
from tfmagic.kernels.gpu import attention
from tfmagic.kernels.gpu.pages import Rows, commit

CLOSE = {"atol": 0.01, "rtol": 0.02}  # probabilities are rounded to bf16


def sequences(lengths, kv=2, d=16, seed=0):
    draws = Draws(seed)
    return [(draws(n, kv, d), draws(n, kv, d)) for n in lengths]


def alike(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize(("fp8", "window"), [(False, 0), (True, 0), (False, 100)])
def test_prompts_agree_with_the_twin_and_keep_their_bits(fp8, window):
    held = Paged(sequences([150, 70, 524], 1), fp8)
    q = Draws(1)(150 + 6 + 12, 2, 16)
    prompts = packed([(0, 0, 150), (1, 64, 6), (2, 512, 12)])
    out = attention.prompt_attention(q, held.pages, held.table, prompts, window=window)
    clean = Rows(*(None if x is None else x.float().nan_to_num().to(x.dtype) for x in held.pages))
    said = attention.prompt_attention_twin(q, clean, held.table, prompts, 0.25, window, torch.empty_like(q))
    torch.testing.assert_close(out.float(), said.float(), **CLOSE)
    row = 0
    for slot, start, rows in prompts.parts():
        for cut in (0, 64):
            if cut < rows.stop - rows.start:
                alone = packed([(slot, start + cut, rows.stop - row - cut)])
                part = attention.prompt_attention(
                    q[row + cut : rows.stop].contiguous(), held.pages, held.table, alone, window=window
                )
                assert alike(part, out[row + cut : rows.stop]), (slot, cut)
        row = rows.stop


def run(held, q, rows, slots, committed, plan, window=0):
    S, R, heads, d = q.shape
    room = attention.partials(S, R, heads, d, 16, "cpu")
    return attention.round_attention(q, rows, held.pages, held.table, slots, committed, plan, room, window=window)


@pytest.mark.parametrize(("fp8", "window"), [(False, 0), (True, 0), (False, 20)])
def test_a_window_row_is_the_same_alone_in_a_chain_and_in_a_tree(fp8, window):
    """Against the twin in one launch; then each path of the trees row by row, with a commit after every row."""
    committed = [540, 0]
    held = Paged(sequences(committed, 1), fp8)
    trees = [tree(5, 3), tree(3, 4)]
    plan, draws = planned(trees, 6), Draws(5)
    q, k, v = draws(2, 6, 2, 16), draws(2, 6, 1, 16), draws(2, 6, 1, 16)
    rows, slots, starts = held.rows(k, v), ints(0, 1), ints(*committed)
    together = run(held, q, rows, slots, starts, plan, window)
    clean = Rows(*(None if x is None else x.float().nan_to_num().to(x.dtype) for x in held.pages))
    said = attention.round_attention_twin(
        q, rows, clean, held.table, slots, starts, plan, 0.25, window, torch.empty_like(q)
    )
    torch.testing.assert_close(together.float(), said.float(), **CLOSE)
    for s, parents in enumerate(trees):
        leaf = path_to(parents, len(parents) - 1)
        one = planned([chain(len(leaf))], len(leaf))
        path = [x[s : s + 1, leaf].contiguous() for x in (q, k, v)]
        out = run(held, path[0], held.rows(*path[1:]), ints(s), ints(committed[s]), one, window)
        assert alike(out[0], together[s, leaf])
        for i, row in enumerate(leaf):
            mine = [x[:, i : i + 1].contiguous() for x in path]
            stored = held.rows(*mine[1:])
            out = run(held, mine[0], stored, ints(s), ints(committed[s] + i), planned([[-1]], 1), window)
            assert alike(out[0, 0], together[s, row]), (s, row)
            layered = [Rows(*(None if x is None else x[None] for x in y)) for y in (stored, held.pages)]
            commit(*layered, held.table, ints(s), ints(committed[s] + i), ints(0).view(1, 1), ints(1))


def test_unused_windows_and_rows_are_zero():
    held = Paged(sequences([40, 8]))
    q, k, v = Draws(5)(2, 4, 4, 16), Draws(6)(2, 4, 2, 16), Draws(7)(2, 4, 2, 16)
    out = run(held, q, held.rows(k, v), ints(0, 1), ints(40, 8), planned([chain(3), []], 4))
    assert out[0, :3].float().abs().sum() > 0 and not out[0, 3].any() and not out[1].any()
