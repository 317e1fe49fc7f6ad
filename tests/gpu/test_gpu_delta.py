"""Gated DeltaNet on a GPU at the shapes of real models: agreement with the twins, cuts, trees, commits, graphs."""

from __future__ import annotations

import pytest
import torch

from tests.kernels_gpu.cases import Draws, chain, cuts, ints, mixer, mixer_rows, packed, path_to, planned, tree
from tfmagic.kernels.gpu import conv, delta
from tfmagic.kernels.gpu.conv import Heads, Inputs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHAPES = {"27B": Heads(16, 48, 128, 128), "9B": Heads(16, 32, 128, 128), "embedded": Heads(4, 8, 64, 64)}


def tensor(*numbers):
    return ints(*numbers, device=DEVICE)


def host(x):
    return type(x)(*(y if isinstance(y, int) else y.cpu() for y in x))


def states_of(slots, heads, seed=1):
    return Draws(seed, DEVICE)(slots, heads.values, heads.dk, heads.dv, size=0.1, dtype=torch.float32)


def layer(heads, *shape, seed=0):
    return mixer(heads, device=DEVICE), mixer_rows(heads, *shape, seed=seed, device=DEVICE)


def far(one, other):
    """The difference's length beside the other's."""
    one, other = one.double().cpu(), other.double().cpu()
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_agree_with_the_twins_and_may_be_cut(name):
    heads, rows = SHAPES[name], 700
    weights, (m, a, b) = layer(heads, 70 + rows)
    past, marks = Draws(3, DEVICE)(3, 3, heads.channels), list(range(64, rows, 64))
    plan = packed([(0, 64, 70), (1, 0, rows)], [[], marks], DEVICE)
    x = conv.convolve(m, a, b, past, weights, heads, plan)
    said = conv.inputs((70 + rows,), heads, "cpu")
    conv.convolve_twin(m.cpu(), a.cpu(), b.cpu(), past.cpu(), host(weights), heads, host(plan), said)
    for one, other in zip(x, said):
        torch.testing.assert_close(one.cpu().float(), other.float(), atol=2e-3, rtol=0.01)
    states = states_of(3, heads)
    moved, twin_states = states.clone(), states.cpu()
    o, kept = delta.delta_chunks(x, moved, plan)
    twin = torch.empty_like(o, device="cpu"), torch.empty_like(kept, device="cpu")
    delta.delta_chunks_twin(host(x), twin_states, host(plan), *twin)
    assert far(o, twin[0]) < 0.01 and far(moved[:2], twin_states[:2]) < 0.01 and far(kept, twin[1]) < 0.01
    ends = past.clone()
    conv.advance(m, ends, plan)
    for seed in range(8):
        places, running, now = cuts(rows, seed), torch.full_like(past, float("nan")), torch.full_like(states, 1e9)
        now[0] = states[0]
        running[0] = past[0]
        for start, end in zip(places, [*places[1:], rows]):
            own = slice(70 + start, 70 + end)
            both = [torch.cat([y[:70], y[own]]) for y in (m, a, b)]
            two = packed([(0, 64, 70), (2, start, end - start)], device=DEVICE)
            part = conv.convolve(*both, running, weights, heads, two)
            assert all(torch.equal(y[70:], z[own]) for y, z in zip(part, x))
            out, _ = delta.delta_chunks(part, now.clone() if end < rows else now, two)
            assert torch.equal(out[70:], o[own])
            if end < rows:
                now[2] = kept[end // 64 - 1]
            conv.advance(both[0], running, two)
            running[0] = past[0]
        assert torch.equal(now[2], moved[1]) and torch.equal(running[2], ends[1])


def test_kept_states_are_those_of_a_shorter_prompt():
    heads = SHAPES["9B"]
    weights, (m, a, b) = layer(heads, 320)
    past, states = torch.zeros(1, 3, heads.channels, dtype=torch.bfloat16, device=DEVICE), states_of(1, heads)
    whole = packed([(0, 0, 320)], [[64, 256]], DEVICE)
    _, kept = delta.delta_chunks(conv.convolve(m, a, b, past, weights, heads, whole), states.clone(), whole)
    for i, rows in enumerate((64, 256)):
        short, moved = packed([(0, 0, rows)], device=DEVICE), states.clone()
        delta.delta_chunks(conv.convolve(m[:rows], a[:rows], b[:rows], past, weights, heads, short), moved, short)
        assert torch.equal(moved[0], kept[i])


@pytest.mark.parametrize("name", SHAPES)
def test_a_window_row_is_the_same_alone_in_a_chain_and_in_a_tree(name):
    """Sixteen streams against the twins in one launch; then paths as chains, and row by row with commits."""
    heads = SHAPES[name]
    weights, (m, a, b) = layer(heads, 16, 16)
    trees = [tree(1 + (7 * s) % 16, s) for s in range(14)] + [chain(16), []]
    past, states = Draws(3, DEVICE)(17, 3, heads.channels), states_of(17, heads)
    slots, windows = tensor(*range(16, 0, -1)), planned(trees, 16, DEVICE)
    x = conv.convolve_tree(m, a, b, past, slots, weights, heads, windows)
    o, u = delta.delta_tree(x, states, slots, windows)
    said = conv.inputs((16, 16), heads, "cpu")
    rows = m.cpu(), a.cpu(), b.cpu(), past.cpu(), slots.cpu(), host(weights), heads, host(windows)
    conv.convolve_tree_twin(*rows, said)
    for one, other in zip(x, said):
        torch.testing.assert_close(one.cpu().float(), other.float(), atol=2e-3, rtol=0.01)
    twin = torch.empty_like(o, device="cpu"), torch.empty_like(u, device="cpu")
    delta.delta_tree_twin(host(x), states.cpu(), slots.cpu(), host(windows), *twin)
    assert far(o, twin[0]) < 0.005 and far(u, twin[1]) < 1e-5 and not o[15].any() and not o[0, 1:].any()
    for s, parents in enumerate(trees[:-1]):
        for leaf in sorted(set(range(len(parents))) - set(parents))[-2:]:
            path, slot = path_to(parents, leaf), slots[s : s + 1].clone()
            n = len(path)
            part = Inputs(*(y[s : s + 1, path].contiguous() for y in x))
            out, updates = delta.delta_tree(part, states, slot, planned([chain(n)], n, DEVICE))
            assert torch.equal(out[0], o[s, path]) and torch.equal(updates[0], u[s, path])
            now, running = states.clone(), past.clone()
            for row in path:
                one = [y[s : s + 1, row : row + 1] for y in (m, a, b)]
                alone = conv.convolve_tree(*one, running, slot, weights, heads, planned([[-1]], 1, DEVICE))
                assert all(torch.equal(y[0, 0], z[s, row]) for y, z in zip(alone, x))
                out, update = delta.delta_tree(alone, now, slot, planned([[-1]], 1, DEVICE))
                assert torch.equal(out[0, 0], o[s, row]), (s, row)
                walk = slot, tensor(0).view(1, 1), tensor(1)
                delta.delta_commit(now[None], alone.k[None], alone.decay[None], update[None], *walk)
                conv.conv_commit(one[0][None], running[None], *walk)
            moved, ends = states.clone(), past.clone()
            walked = torch.full((16, 16), -1, dtype=torch.int32, device=DEVICE)
            walked[s, :n] = tensor(*path)
            steps = tensor(*(n if i == s else 0 for i in range(16)))
            delta.delta_commit(moved[None], x.k[None], x.decay[None], u[None], slots, walked, steps)
            conv.conv_commit(m[None], ends[None], slots, walked, steps)
            assert torch.equal(moved, now) and torch.equal(ends, running)


def test_a_graph_serves_every_tree():
    heads = SHAPES["9B"]
    weights, (m, a, b) = layer(heads, 4, 8)
    past, states, slots = Draws(3, DEVICE)(4, 3, heads.channels), states_of(4, heads), tensor(3, 2, 1, 0)
    windows = planned([[-1]] * 4, 8, DEVICE)

    def call():
        x = conv.convolve_tree(m, a, b, past, slots, weights, heads, windows)
        return delta.delta_tree(x, states, slots, windows)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for to, new in zip(windows, planned([tree(8, 1), chain(8), tree(3, 2), []], 8, DEVICE)):
        to.copy_(new)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(out, call()))
