"""Gated DeltaNet on a GPU at the shapes of real models: agreement with the twins, cuts, trees, commits, graphs."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.told import near, parted, same
from tests.kernels_gpu.cases import Draws, chain, cuts, ints, mixer, mixer_rows, packed, path_to, planned, tree
from tfmagic.kernels.gpu import conv, delta, delta_rounds, step
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


def like(one, other, most, *facts):
    """The difference is short beside the other."""
    one, other = one.double().cpu(), other.double().cpu()
    assert float((one - other).norm() / other.norm()) < most, parted(one, other, *facts)


def inputs_like(x, said):
    for name, one, other in zip(x._fields, x, said):
        near(one.cpu(), other, 0.01, 2e-3, "beside the twin", name)


def inputs_same(x, expected, *facts):
    for name, one, other in zip(expected._fields, x, expected):
        same(one, other, *facts, name)


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_agree_with_the_twins_and_may_be_cut(name):
    heads, rows = SHAPES[name], 700
    weights, (m, a, b) = layer(heads, 70 + rows)
    past, marks = Draws(3, DEVICE)(3, 3, heads.channels), list(range(64, rows, 64))
    plan = packed([(0, 64, 70), (1, 0, rows)], [[], marks], DEVICE)
    x = conv.convolve(m, a, b, past, weights, heads, plan)
    said = conv.inputs((70 + rows,), heads, "cpu")
    conv.convolve_twin(m.cpu(), a.cpu(), b.cpu(), past.cpu(), host(weights), heads, host(plan), said)
    inputs_like(x, said)
    states = states_of(3, heads)
    moved, twin_states = states.clone(), states.cpu()
    o, kept = delta.delta_chunks(x, moved, plan)
    twin = torch.empty_like(o, device="cpu"), torch.empty_like(kept, device="cpu")
    delta.delta_chunks_twin(host(x), twin_states, host(plan), *twin)
    for what, one, other in (("o", o, twin[0]), ("states", moved[:2], twin_states[:2]), ("kept", kept, twin[1])):
        like(one, other, 0.01, "chunks beside the twin", what)
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
            part, cut = conv.convolve(*both, running, weights, heads, two), f"cut at {places}, rows {start} to {end}"
            inputs_same([y[70:] for y in part], Inputs(*(z[own] for z in x)), cut)
            out, _ = delta.delta_chunks(part, now.clone() if end < rows else now, two)
            same(out[70:], o[own], cut, "o")
            if end < rows:
                now[2] = kept[end // 64 - 1]
            conv.advance(both[0], running, two)
            running[0] = past[0]
        same(now[2], moved[1], f"cut at {places}, the state")
        same(running[2], ends[1], f"cut at {places}, the convolution's rows")


def test_kept_states_are_those_of_a_shorter_prompt():
    heads = SHAPES["9B"]
    weights, (m, a, b) = layer(heads, 320)
    past, states = torch.zeros(1, 3, heads.channels, dtype=torch.bfloat16, device=DEVICE), states_of(1, heads)
    whole = packed([(0, 0, 320)], [[64, 256]], DEVICE)
    _, kept = delta.delta_chunks(conv.convolve(m, a, b, past, weights, heads, whole), states.clone(), whole)
    for i, rows in enumerate((64, 256)):
        short, moved = packed([(0, 0, rows)], device=DEVICE), states.clone()
        delta.delta_chunks(conv.convolve(m[:rows], a[:rows], b[:rows], past, weights, heads, short), moved, short)
        same(moved[0], kept[i], f"a prompt of {rows} rows")


@pytest.mark.parametrize("name", SHAPES)
def test_a_window_row_is_the_same_alone_in_a_chain_and_in_a_tree(name):
    """Sixteen streams against the twins in one launch; then paths as chains, and row by row with commits."""
    heads = SHAPES[name]
    weights, (m, a, b) = layer(heads, 16, 16)
    trees = [tree(1 + (7 * s) % 16, s) for s in range(14)] + [chain(16), []]
    past, states = Draws(3, DEVICE)(17, 3, heads.channels), states_of(17, heads)
    slots, windows = tensor(*range(16, 0, -1)), planned(trees, 16, DEVICE)
    x = conv.convolve_tree(m, a, b, past, slots, weights, heads, windows)
    o, u = delta_rounds.delta_tree(x, states, slots, windows)
    said = conv.inputs((16, 16), heads, "cpu")
    rows = m.cpu(), a.cpu(), b.cpu(), past.cpu(), slots.cpu(), host(weights), heads, host(windows)
    conv.convolve_tree_twin(*rows, said)
    inputs_like(x, said)
    twin = torch.empty_like(o, device="cpu"), torch.empty_like(u, device="cpu")
    delta_rounds.delta_tree_twin(host(x), states.cpu(), slots.cpu(), host(windows), *twin, False)
    like(o, twin[0], 0.005, "a tree beside the twin, o")
    like(u, twin[1], 1e-5, "a tree beside the twin, u")
    assert not o[15].any() and not o[0, 1:].any()
    for s, parents in enumerate(trees[:-1]):
        for leaf in sorted(set(range(len(parents))) - set(parents))[-2:]:
            path, slot = path_to(parents, leaf), slots[s : s + 1].clone()
            n = len(path)
            part = Inputs(*(y[s : s + 1, path].contiguous() for y in x))
            out, updates = delta_rounds.delta_tree(part, states, slot, planned([chain(n)], n, DEVICE))
            same(out[0], o[s, path], f"stream {s}, path {path} as a chain, o")
            same(updates[0], u[s, path], f"stream {s}, path {path} as a chain, u")
            now, running = states.clone(), past.clone()
            for row in path:
                one = [y[s : s + 1, row : row + 1] for y in (m, a, b)]
                alone = conv.convolve_tree(*one, running, slot, weights, heads, planned([[-1]], 1, DEVICE))
                inputs_same([y[0, 0] for y in alone], Inputs(*(z[s, row] for z in x)), f"stream {s}, row {row} alone")
                out, update = delta_rounds.delta_tree(alone, now, slot, planned([[-1]], 1, DEVICE))
                same(out[0, 0], o[s, row], f"stream {s}, row {row} of {path}, alone behind commits")
                walk, moved, before = (slot, tensor(0).view(1, 1), tensor(1)), now.clone(), now.clone()
                delta_rounds.delta_tree(alone, moved, slot, planned([[-1]], 1, DEVICE), moves=True)
                delta_rounds.delta_commit(now[None], alone.k[None], alone.decay[None], update[None], *walk)
                same(moved, now, f"stream {s}, row {row} of {path}, moved at once")
                stepped = before.clone()
                torch.cuda.synchronize()  # what is not written in a round is read early
                out = step.delta_step(*(x[:, 0] for x in one), running, stepped, slot, tensor(1), weights, heads)
                same(out[0], o[s, row], f"stream {s}, row {row} of {path}, in one kernel")
                same(stepped, now, f"stream {s}, row {row} of {path}, moved in one kernel")
                conv.conv_commit(one[0][None], running[None], *walk)
            moved, ends = states.clone(), past.clone()
            walked = torch.full((16, 16), -1, dtype=torch.int32, device=DEVICE)
            walked[s, :n] = tensor(*path)
            steps = tensor(*(n if i == s else 0 for i in range(16)))
            delta_rounds.delta_commit(moved[None], x.k[None], x.decay[None], u[None], slots, walked, steps)
            conv.conv_commit(m[None], ends[None], slots, walked, steps)
            same(moved, now, f"stream {s}, path {path}, committed at once, the states")
            same(ends, running, f"stream {s}, path {path}, committed at once, the convolutions' rows")


def test_a_graph_serves_every_tree():
    heads = SHAPES["9B"]
    weights, (m, a, b) = layer(heads, 4, 8)
    past, states, slots = Draws(3, DEVICE)(4, 3, heads.channels), states_of(4, heads), tensor(3, 2, 1, 0)
    windows = planned([[-1]] * 4, 8, DEVICE)

    def call():
        x = conv.convolve_tree(m, a, b, past, slots, weights, heads, windows)
        return delta_rounds.delta_tree(x, states, slots, windows)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for to, new in zip(windows, planned([tree(8, 1), chain(8), tree(3, 2), []], 8, DEVICE)):
        to.copy_(new)
    graph.replay()
    for name, x, y in zip("ou", out, call()):
        same(x, y, name)
