"""Attention over pages in the interpreter: agreement with the twins, and one row's bits in any company."""

from __future__ import annotations

import inspect
import re

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


@pytest.mark.parametrize(("R", "d"), [(4, 32), (8, 32), (8, 16)])
def test_fp8_rows_few_and_many_agree_with_the_twin(R, d):
    """Products of 32 and of 64 rows, which take pairs of e4m3 numbers apart each in its own way."""
    held, draws = Paged(sequences([150], 1, d), True), Draws(5)
    plan = planned([chain(R)], R)
    q, rows = draws(1, R, 8, d), held.rows(draws(1, R, 1, d), draws(1, R, 1, d))
    out = run(held, q, rows, ints(0), ints(150), plan)
    clean = Rows(*(x.float().nan_to_num().to(x.dtype) for x in held.pages))
    told = held.table, ints(0), ints(150), plan, d**-0.5, 0
    said = attention.round_attention_twin(q, rows, clean, *told, torch.empty_like(q))
    torch.testing.assert_close(out.float(), said.float(), **CLOSE)


def did(op, *args):
    """What a PTX instruction makes of int64 tensors that hold 32 bits."""
    if op == "mov.b32":
        return args[0]
    if op == "shl.b32":
        return args[0] << args[1] & 0xFFFFFFFF
    if op == "and.b32":
        return args[0] & args[1]
    parts, result = [], torch.zeros(1, dtype=torch.int64)
    if op == "prmt.b32":
        for nibble in (int(args[2]) >> 4 * i & 15 for i in range(4)):
            byte = (args[1] << 32 | args[0]) >> 8 * (nibble & 7) & 255
            parts.append((byte >> 7) * 255 if nibble & 8 else byte)
    if op == "mul.rn.bf16x2":
        for half in (0, 16):
            x, y = ((arg >> half).to(torch.int16).view(torch.bfloat16) for arg in args)
            parts.append((x * y).view(torch.int16).long() & 0xFFFF)
    for i, part in enumerate(parts):
        result = result | part << i * 32 // len(parts)
    return result


def test_e4m3_numbers_come_apart_exactly():
    """All pairs of codes through the instructions that a GPU gets, beside torch's conversion."""
    codes = torch.arange(65536)
    held = {"$2": codes << 16 | codes.flip(0)}
    for line in re.findall(r"^ +([a-z][\w.]+ [$a-d].*);$", inspect.getsource(attention._wide.fn), re.M):
        op, to, *args = line.replace(",", "").split()
        held[to] = did(op, *(held[x] if x in held else torch.tensor(int(x, 0)) for x in args))
    for place, pairs in ((0, codes.flip(0)), (16, codes)):
        for to, code in (("$0", pairs & 255), ("$1", pairs >> 8)):
            said = code.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
            out = (held[to] >> place).to(torch.int16).view(torch.bfloat16)
            assert alike(torch.where(said.isnan(), 480 - 960 * (code >> 7), said.float()).bfloat16(), out)


def test_unused_windows_and_rows_are_zero():
    held = Paged(sequences([40, 8]))
    q, k, v = Draws(5)(2, 4, 4, 16), Draws(6)(2, 4, 2, 16), Draws(7)(2, 4, 2, 16)
    out = run(held, q, held.rows(k, v), ints(0, 1), ints(40, 8), planned([chain(3), []], 4))
    assert out[0, :3].float().abs().sum() > 0 and not out[0, 3].any() and not out[1].any()
