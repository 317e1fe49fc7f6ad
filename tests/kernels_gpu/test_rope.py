"""Norm, rotation and storing of an attention layer's rows, against the twin and in any company."""

from __future__ import annotations

import pytest
import torch

from tests.kernels_gpu.test_linear import close, random
from tfmagic.kernels import rotary
from tfmagic.kernels.gpu import pages
from tfmagic.kernels.gpu.rope import gated, norm_rope_write, norm_rope_write_twin, raw, tables

HEADS, KV, DIM, HALF = 3, 2, 24, 4
ROWS = 7


def case():
    qkv = random(ROWS, 2 * (HEADS + KV) * DIM + 8).bfloat16()[:, : 2 * (HEADS + KV) * DIM]
    qkv[2, -DIM:] = 0  # a value of zeros
    norms = 1 + 0.1 * random(2, DIM, seed=1)
    cos, sin = tables(torch.arange(1000, 1000 + ROWS, dtype=torch.int32), rotary.frequencies(1e4, 2 * HALF), None)
    return qkv, *norms, 1e-6, cos, sin


def window(fp8, rows=ROWS):
    return pages.Rows(*(None if x is None else x[:, :, 0].clone() for x in pages.pages(rows, KV, DIM, fp8, "cpu")))


def same(a, b):
    return all(x is None or torch.equal(raw(x), raw(y)) for x, y in zip(a, b))


def part(rows, *index):
    return [None if x is None else x[index] for x in rows]


@pytest.mark.parametrize("fp8", [False, True])
def test_window_rows(fp8):
    args, into, expected = case(), window(fp8), window(fp8)
    q = norm_rope_write(*args, HEADS, into)
    twin = norm_rope_write_twin(*args, HEADS, expected, None, None, None, torch.empty_like(q))
    assert close(q, twin.double())
    if fp8:
        assert torch.allclose(into.k_scale, expected.k_scale, rtol=0.01) and torch.equal(into.v_scale, expected.v_scale)
        assert torch.equal(into.v.float(), expected.v.float()) and into.v_scale[2, -1] == 1
        held = into.k.float() * into.k_scale[..., None]
        meant = expected.k.float() * expected.k_scale[..., None]
        assert ((held - meant).abs() <= 0.13 * meant.abs() + 0.01).all()
    else:
        assert close(into.k, expected.k.double()) and torch.equal(into.v, expected.v)
    alone, row = window(fp8, 1), 5
    own = [args[0][row : row + 1], *args[1:4], *(x[row : row + 1] for x in args[4:])]
    assert torch.equal(norm_rope_write(*own, HEADS, alone)[0], q[row])
    assert same(alone, part(into, slice(row, row + 1)))


@pytest.mark.parametrize("fp8", [False, True])
def test_pages_hold_what_a_window_holds(fp8):
    args, into, held = case(), window(fp8), pages.pages(5, KV, DIM, fp8, "cpu")
    table = torch.tensor([[0, 0], [4, 1], [3, 2]], dtype=torch.int32)
    slots = torch.tensor([1, 1, 2, 2, 2, 1, 1], dtype=torch.int32)
    places = torch.tensor([510, 511, 0, 1, 512, 512, 513], dtype=torch.int32)
    q = norm_rope_write(*args, HEADS, held, table, slots, places)
    assert torch.equal(q, norm_rope_write(*args, HEADS, into))
    for row, (slot, place) in enumerate(zip(slots.tolist(), places.tolist())):
        page = int(table[slot, place // 512])
        assert same(part(held, page, slice(None), place % 512), part(into, row))
    assert int((held.k.float() != 0).any(-1).any(1).sum()) == ROWS


def test_three_axes_and_one_agree():
    inverse, axis = rotary.frequencies(1e7, 12), rotary.axes([2, 2, 2], 6)
    line = torch.arange(5, dtype=torch.int32)
    both = zip(tables(line, inverse, axis), tables(line.expand(3, -1), inverse, axis))
    assert all(torch.equal(a, b) for a, b in both)
    grid = torch.stack([line, line + 7, line + 9])
    cos, sin = rotary.tables(grid, inverse, axis)
    assert all(torch.equal(a, b[:, :6]) for a, b in zip(tables(grid, inverse, axis), (cos, sin)))


def test_rotation_is_the_exact_forms():
    qkv, q_norm, k_norm, eps, cos, sin = case()
    q = norm_rope_write(qkv, q_norm, k_norm, eps, cos, sin, HEADS, window(False))
    x = qkv[:, : 2 * HEADS * DIM].reshape(ROWS, HEADS, 2 * DIM)[..., :DIM].float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * q_norm
    assert close(q, rotary.rotate(x, *(torch.cat([t, t], -1) for t in (cos, sin))).double())


def test_gates():
    qkv, o = case()[0], random(ROWS, HEADS, DIM, seed=4).bfloat16()
    gate = qkv[:, : 2 * HEADS * DIM].reshape(ROWS, HEADS, 2 * DIM)[..., DIM:].double()
    out = gated(o, qkv)
    assert close(out, (o.double() * torch.sigmoid(gate)).flatten(1))
    assert torch.equal(gated(o[3:4], qkv[3:4]), out[3:4])


def test_rows_of_another_width_are_refused():
    qkv, *rest = case()
    with pytest.raises(ValueError, match="gated heads"):
        norm_rope_write(qkv[:, :-DIM], *rest, HEADS, window(False))
