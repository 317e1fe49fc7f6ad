"""A block drafter's kernels built for an H200 at the shapes of real drafters: they fit, and nothing spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels_gpu.test_compile import fp64, i64
from tests.kernels_gpu.test_compile_mixers import bf16, checked, fp32, i32, meta
from tfmagic.kernels.gpu import block, relay, tree

SHAPES = {"27B": (32, 8, 128, 5, 8), "block 16": (32, 8, 128, 5, 16), "embedded": (4, 2, 64, 2, 8)}
"""Heads, kv heads, their width, layers, rows of a block."""


@pytest.mark.long
@pytest.mark.parametrize("S", [1, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_rows(name, S):
    heads, kv, d, layers, R = SHAPES[name]
    n = S * R
    ring = block.Ring(*(meta(19, layers, kv, 2048, d) for _ in range(2)))
    seen = block.Seen(*(meta(S, dtype=i32) for _ in range(4)))
    turns = meta(n, d // 2, dtype=fp32), meta(n, d // 2, dtype=fp32)
    norms, y = meta(heads + kv, d), meta(n, (heads + 2 * kv) * d)
    checked(lambda: block.turned(y, norms, *turns, 1e-6), block)
    where = meta(n, dtype=i32), meta(n, dtype=i32)
    checked(lambda: block.keep(meta(n, layers * 2 * kv * d), meta(layers, d), *turns, 1e-6, ring, *where), block)
    told = meta(n, heads + kv, d), y[:, (heads + kv) * d :], ring, 1, seen, 2048
    for causal in (False, True):
        checked(lambda causal=causal: block.attend(*told, causal), block)


@pytest.mark.long
@pytest.mark.parametrize("D", [5120, 320])
def test_convolution(D):
    u, dynamic, base = meta(128, D), meta(128, 4 * D // 16), meta(2, 2, D // 16, 16)
    checked(lambda: block.convolve(u, dynamic, base, 0, 8), block)
    checked(lambda: block.convolve(u, dynamic, base, 1, 8, u), block)


@pytest.mark.long
@pytest.mark.parametrize("V", [248077, 4096])
def test_the_likeliest(V):
    checked(lambda: block.likeliest(meta(7, V, dtype=fp32), 16), block)


@pytest.mark.long
def test_edges():
    ids, anchors, out = meta(4, 7, 16, dtype=bf16).long(), meta(4, 8, dtype=i32)[:, 0], meta(4, 7, 16, 16, dtype=fp32)
    checked(lambda: block.edges(ids, anchors, meta(28, 256), meta(1000, 256), meta(1000, 256), out), block)


@pytest.mark.long
@pytest.mark.parametrize(("S", "B", "W"), [(1, 8, 5 * 4096), (16, 16, 3 * 2560)])
def test_what_is_handed_on(S, B, W):
    walked = meta(S, 16, dtype=i32), meta(S, 16, dtype=i32), meta(S, dtype=i32)
    to = (meta(*shape, dtype=i32) for shape in ((S, B), (2, S, B), (S, B), (S,), (S,), (S,)))
    blocks = relay.Blocks(*to, meta(1, dtype=i64))
    checked(lambda: relay.relay(*walked, meta(S * 16, W), meta(19, B, W), blocks), relay)


@pytest.mark.long
@pytest.mark.parametrize(("R", "P", "K"), [(16, 7, 16), (2, 15, 16), (8, 7, 12)])
def test_trees(R, P, K):
    each, rows = meta(16, dtype=i32), meta(16, 16, dtype=i32)
    candidates = meta(16, P, K, dtype=i32), meta(16, P, K, dtype=fp32), meta(16, P, K, K, dtype=fp32)
    f = {name: meta(16, R, dtype=i32) for name in ("ids", "parents", "positions", "places")}
    f |= {"temperature": meta(16, R, dtype=fp64), "seed": meta(16, R, dtype=i64), "counts": each, "rows": each}
    out = tree.Trees(rows, rows, meta(16, 16, dtype=fp32), each, each, meta(2, dtype=i64))
    told = meta(16, P + 1, dtype=i32), each, meta(1, dtype=i64), tree.Seats(each, each, each), f, out
    checked(lambda: tree.grow(tree.Candidates(*candidates), *told), tree)
