"""Attention on a GPU at the shapes of real models: agreement with the twins, and one row's bits in any company."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.told import near, same
from tests.kernels_gpu.cases import Draws, Paged, chain, cuts, ints, packed, path_to, planned, tree
from tfmagic.kernels.gpu import attention, tower
from tfmagic.kernels.gpu.packing import Prompts, Windows
from tfmagic.kernels.gpu.pages import Rows, commit
from tfmagic.kernels.gpu.turn import turn

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHAPES = {"27B": (24, 4, 256), "9B": (16, 4, 256), "embedded": (4, 2, 64), "Gemma": (32, 4, 512)}
CLOSE = 0.02, 0.01  # probabilities are rounded to bf16


def on_cpu(x):
    """The same, in host memory and without NaN, for a twin."""
    if isinstance(x, (Rows, Prompts, Windows)):
        return type(x)(*(on_cpu(y) for y in x))
    if not isinstance(x, torch.Tensor):
        return x
    return x.cpu() if x.dtype == torch.int32 else x.cpu().float().nan_to_num().to(x.dtype)


def sequences(lengths, kv, d, seed=0):
    draws = Draws(seed, DEVICE)
    return [(draws(n, kv, d), draws(n, kv, d)) for n in lengths]


def plan(parts):
    return packed(parts, device=DEVICE)


def tensor(*numbers):
    return ints(*numbers, device=DEVICE)


@pytest.mark.parametrize(("fp8", "window"), [(False, 0), (True, 0), (False, 512)])
@pytest.mark.parametrize("name", SHAPES)
def test_prompts_agree_with_the_twin_and_may_be_cut(name, window, fp8):
    heads, kv, d = SHAPES[name]
    lengths = [1500, 70, 1100]
    held = Paged(sequences(lengths, kv, d), fp8)
    parts = [(0, 0, 1500), (1, 64, 6), (2, 1024, 76)]
    q = Draws(1, DEVICE)(sum(n for _, _, n in parts), heads, d)
    prompts = plan(parts)
    out = attention.prompt_attention(q, held.pages, held.table, prompts, window=window)
    host = on_cpu(q), on_cpu(held.pages), held.table.cpu(), on_cpu(prompts)
    said = attention.prompt_attention_twin(*host, d**-0.5, window, torch.empty_like(host[0]))
    near(out.cpu(), said, *CLOSE, "beside the twin")
    for seed in range(8):
        places = cuts(1500, seed)
        for start, end in zip(places, [*places[1:], 1500]):
            both = torch.cat([q[1500:1506], q[start:end]])
            two = plan([(1, 64, 6), (0, start, end - start)])
            part = attention.prompt_attention(both, held.pages, held.table, two, window=window)
            same(part[6:], out[start:end], f"cut at {places}, rows {start} to {end}")
            same(part[:6], out[1500:1506], f"the neighbour of rows {start} to {end}")


def run(held, q, rows, slots, committed, windows, window=0):
    S, R, heads, d = q.shape
    room = attention.partials(S, R, heads, d, sum(int(n) // 512 + 1 for n in committed), DEVICE)
    return attention.round_attention(q, rows, held.pages, held.table, slots, committed, windows, room, window=window)


@pytest.mark.parametrize(("fp8", "window"), [(False, 0), (True, 0), (False, 700)])
@pytest.mark.parametrize("name", ["27B", "9B", "embedded"])
def test_a_window_row_is_the_same_alone_in_a_chain_and_in_a_tree(name, window, fp8):
    """Sixteen streams against the twin in one launch; then each stream's longest path, as a chain, and row by row with
    a commit after every row."""
    heads, kv, d = SHAPES[name]
    committed = [0, 1, 15, 16, 17, 500, 511, 512, 513, 527, 528, 529, 1024, 1040, 3000, 6000]
    held, draws = Paged(sequences(committed, kv, d), fp8), Draws(5, DEVICE)
    trees = [tree(1 + (7 * s) % 16, s) for s in range(15)] + [chain(16)]
    windows = planned(trees, 16, DEVICE)
    q, k, v = draws(16, 16, heads, d), draws(16, 16, kv, d), draws(16, 16, kv, d)
    rows, slots, starts = held.rows(k, v), tensor(*range(16)), tensor(*committed)
    together = run(held, q, rows, slots, starts, windows, window)
    host = on_cpu(q), on_cpu(rows), on_cpu(held.pages), held.table.cpu(), slots.cpu(), starts.cpu(), on_cpu(windows)
    said = attention.round_attention_twin(*host, d**-0.5, window, torch.empty_like(host[0]))
    for s, n in enumerate(committed):
        near(together[s].cpu(), said[s], *CLOSE, f"stream {s}, behind {n} rows, beside the twin")
    assert not together[0, 1:].any()
    for s, parents in enumerate(trees):
        leaf = max((path_to(parents, row) for row in range(len(parents))), key=len)
        at = [x[s : s + 1, leaf].contiguous() for x in (q, k, v)]
        for room in {len(leaf), 16}:  # the bucket a chain is put in
            wide = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, room - len(leaf))) for x in at]
            out = run(held, wide[0], held.rows(*wide[1:]), slots[s : s + 1].clone(), starts[s : s + 1].clone(),
                      planned([chain(len(leaf))], room, DEVICE), window)  # fmt: skip
            same(out[0, : len(leaf)], together[s, leaf], f"stream {s}, a chain of {len(leaf)} in {room}")
        for i, row in enumerate(leaf):
            mine = [x[:, i : i + 1].contiguous() for x in at]
            stored, place = held.rows(*mine[1:]), tensor(committed[s] + i)
            out = run(held, mine[0], stored, tensor(s), place, planned([[-1]], 1, DEVICE), window)
            same(out[0, 0], together[s, row], f"stream {s}, row {row} after {i} commits")
            layered = [Rows(*(None if x is None else x[None] for x in y)) for y in (stored, held.pages)]
            commit(*layered, held.table, tensor(s), place, tensor(0).view(1, 1), tensor(1))


@pytest.mark.parametrize("fp8", [False, True])
def test_a_graph_serves_every_length(fp8):
    """Captured once at short contexts, replayed at long ones and with other trees."""
    heads, kv, d = SHAPES["9B"]
    committed = [100, 2000, 0, 5]
    held, draws = Paged(sequences(committed, kv, d), fp8), Draws(6, DEVICE)
    q, k, v = draws(4, 8, heads, d), draws(4, 8, kv, d), draws(4, 8, kv, d)
    rows, slots, starts = held.rows(k, v), tensor(0, 1, 2, 3), tensor(0, 0, 0, 0)
    windows = planned([[-1]] * 4, 8, DEVICE)
    room = attention.partials(4, 8, heads, d, 16, DEVICE)

    def call():
        return attention.round_attention(q, rows, held.pages, held.table, slots, starts, windows, room)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    starts.copy_(tensor(*committed))
    for to, new in zip(windows, planned([tree(8, 1), chain(8), tree(3, 2), []], 8, DEVICE)):
        to.copy_(new)
    graph.replay()
    same(out, call())


@pytest.mark.parametrize(("heads", "d"), [(16, 72), (16, 88), (4, 32)])
def test_the_towers_rotation(heads, d):
    draws = Draws(d, DEVICE)
    qkv, (cos, sin) = draws(1000, 3, heads, d), draws(2, 1000, d // 2, dtype=torch.float32)
    out, said = turn(qkv, cos, sin), turn(qkv.cpu(), cos.cpu(), sin.cpu())
    for name, one, two in zip(out._fields, out, said, strict=True):
        near(one.cpu(), two, 0.01, 0.001, name)


@pytest.mark.parametrize(("heads", "d"), [(16, 72), (4, 32)])
def test_pictures_are_the_same_beside_any_other(heads, d):
    lengths = [1024, 16, 640, 100]
    q, k, v = Draws(d, DEVICE)(sum(lengths), 3, heads, d).unbind(1)
    out = tower.tower_attention(tower.split(q, k, v), tensor(*lengths))
    x = tower.split(q.cpu(), k.cpu(), v.cpu())
    said = tower.tower_attention_twin(x, ints(*lengths), torch.empty_like(x.q))
    near(out.cpu(), said, *CLOSE, "beside the twin")
    for rows in torch.arange(len(q), device=DEVICE).split(lengths):
        alone = tower.tower_attention(tower.split(q[rows], k[rows], v[rows]), tensor(len(rows)))
        same(alone, out[rows], f"a picture of {len(rows)} rows")
