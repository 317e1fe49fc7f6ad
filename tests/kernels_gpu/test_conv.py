"""The short convolution in the interpreter, and the plans that say which rows follow which."""

from __future__ import annotations

import pytest
import torch

from tests.kernels_gpu.cases import Draws, chain, cuts, ints, mixer, mixer_rows, packed, path_to, planned, tree
from tfmagic.kernels.gpu import conv, packing
from tfmagic.kernels.gpu.conv import Heads

HEADS = Heads(1, 2, 16, 32)
CLOSE = {"atol": 2e-3, "rtol": 0.01}


def close(made, said):
    for one, other in zip(made, said):
        torch.testing.assert_close(one.float(), other.float(), **CLOSE)


def same(made, said):
    return all(torch.equal(one, other) for one, other in zip(made, said))


def past(slots, seed=4):
    return Draws(seed)(slots, 3, HEADS.channels)


@pytest.mark.parametrize("seed", range(3))
def test_plans_agree_with_the_twin(seed):
    trees = [tree(n, seed + n) for n in (1, 9, 16)] + [chain(16), []]
    parents = torch.tensor([t + [-1] * (16 - len(t)) for t in trees], dtype=torch.int32)
    counts = ints(*map(len, trees))
    plan, said = packing.windows(parents, counts), packing.windows_twin(parents, counts)
    assert all(torch.equal(a, b) for a, b in zip(plan, said))
    for s, t in enumerate(trees):
        assert sorted(plan.order[s].tolist()) == list(range(16))
        for r in range(len(t)):
            path = path_to(t, r)[::-1]
            assert plan.ancestors[s, r].tolist() == path + [-1] * (16 - len(path))


def test_packed_prompts_agree_with_the_twin_and_may_be_cut():
    weights, rows = mixer(HEADS), 200
    m, a, b = mixer_rows(HEADS, 70 + rows + 1)
    plan = packed([(0, 64, 70), (2, 0, rows), (1, 128, 1)], [[128], [64, 192], []])
    states = past(3)
    made, said = conv.convolve(m, a, b, states, weights, HEADS, plan), conv.inputs((len(m),), HEADS, "cpu")
    close(made, conv.convolve_twin(m, a, b, states, weights, HEADS, plan, said))
    moved = states.clone()
    kept = conv.advance(m, moved, plan)
    assert torch.equal(kept, torch.stack([m[61:64], m[70 + 61 : 70 + 64], m[70 + 189 : 70 + 192]]))
    assert torch.equal(moved[0], m[67:70]) and torch.equal(moved[2], m[70 + rows - 3 : 70 + rows])
    assert torch.equal(moved[1], torch.cat([states[1, 1:], m[-1:]]))
    for seed in range(2):
        places, running = cuts(rows, seed), past(2)
        for start, end in zip(places, [*places[1:], rows]):
            own, part = slice(70 + start, 70 + end), packed([(1, start, end - start)])
            alone = conv.convolve(m[own], a[own], b[own], running, weights, HEADS, part)
            assert same(alone, [x[own] for x in made])
            conv.advance(m[own], running, part)
        assert torch.equal(running[1], moved[2])


@pytest.mark.parametrize("seed", range(2))
def test_a_window_row_is_the_same_alone_in_a_chain_and_in_a_tree(seed):
    weights, parents = mixer(HEADS), tree(7, seed)
    m, a, b = mixer_rows(HEADS, 2, 8)
    states, plan, slots = past(3), planned([parents, chain(8)], 8), ints(2, 0)
    made = conv.convolve_tree(m, a, b, states, slots, weights, HEADS, plan)
    said = conv.inputs((2, 8), HEADS, "cpu")
    close(made, conv.convolve_tree_twin(m, a, b, states, slots, weights, HEADS, plan, said))
    for leaf in sorted(set(range(7)) - set(parents))[-1:]:
        path, running = path_to(parents, leaf), states.clone()
        whole = running[None].clone()
        rows = ints(*path, *[-1] * (8 - len(path)))
        conv.conv_commit(m[None], whole, slots, torch.stack([rows, ints(*range(8))]), ints(len(path), 0))
        for row in path:
            one = [x[:1, row : row + 1] for x in (m, a, b)]
            alone = conv.convolve_tree(*one, running, ints(2), weights, HEADS, planned([[-1]], 1))
            assert same([x[0, 0] for x in alone], [x[0, row] for x in made])
            conv.conv_commit(one[0][None], running[None], ints(2), ints(0)[None], ints(1))
        assert torch.equal(whole[0], running)


def test_shapes_that_do_not_fit_are_refused():
    m, a, b = mixer_rows(HEADS, 3)
    with pytest.raises(ValueError, match="channels"):
        conv.convolve(m[:, :-1], a, b, past(1), mixer(HEADS), HEADS, packed([(0, 0, 3)]))
    with pytest.raises(ValueError, match="multiple of 64"):
        packed([(0, 3, 3)])
    with pytest.raises(ValueError, match="64 prompts at most"):
        packed([(0, 0, 1)] * 65)
    with pytest.raises(ValueError, match="no state can be kept"):
        packed([(0, 0, 64)], [[128]])
