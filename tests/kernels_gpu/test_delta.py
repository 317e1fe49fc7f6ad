"""The delta rule in the interpreter: prompts cut anywhere on the grid, windows as chains and as trees, commits."""

from __future__ import annotations

import pytest
import torch

from tests.kernels_gpu.cases import Draws, chain, cuts, ints, packed, path_to, planned, tree
from tfmagic.kernels.gpu import delta, delta_rounds
from tfmagic.kernels.gpu.conv import Heads, Inputs

HEADS = Heads(1, 2, 16, 32)


def case(*shape, heads=HEADS, seed=0, prompt=True, device="cpu"):
    """Inputs as `convolve` gives them. Keys are alike, which is when T is far from 1."""
    draws = Draws(seed, device)
    fp32 = {"dtype": torch.float32}
    q, k = (draws(*shape, heads.keys, heads.dk, **fp32) for _ in range(2))
    k = k + 2 * draws(heads.dk, **fp32)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    decay = -0.05 * draws(*shape, heads.values, **fp32).exp()
    return Inputs(
        (q * heads.dk**-0.5).bfloat16(),
        k.bfloat16(),
        draws(*shape, heads.values, heads.dv),
        decay if prompt else decay.exp(),
        torch.sigmoid(draws(*shape, heads.values, **fp32)),
    )


def states_of(slots, heads=HEADS, seed=1, device="cpu"):
    return Draws(seed, device)(slots, heads.values, heads.dk, heads.dv, dtype=torch.float32)


def part(x, *index):
    return Inputs(*(y[index].contiguous() for y in x))


def test_packed_prompts_agree_with_the_twin():
    x, prompts = case(130 + 64 + 3), packed([(2, 128, 130), (0, 0, 64), (1, 64, 3)], [[192, 256], [64], []])
    states, said = states_of(3), states_of(3)
    o, kept = delta.delta_chunks(x, states, prompts)
    twin = torch.empty_like(o), torch.empty_like(kept)
    delta.delta_chunks_twin(x, said, prompts, *twin)
    torch.testing.assert_close(o.float(), twin[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(states, said, atol=0.03, rtol=0.02)
    torch.testing.assert_close(kept, twin[1], atol=0.03, rtol=0.02)
    assert torch.equal(kept[2], states[0])


@pytest.mark.parametrize("seed", range(2))
def test_a_prompt_may_be_cut_at_any_chunk(seed):
    rows = 150
    x, whole = case(rows), torch.full_like(states_of(1), float("nan"))
    o, kept = delta.delta_chunks(x, whole, packed([(0, 0, rows)], [[64, 128]]))
    states = torch.full_like(states_of(4), float("nan"))
    places = cuts(rows, seed)
    for start, end in zip(places, [*places[1:], rows]):
        other = case(5, seed=start)
        both = Inputs(*(torch.cat([a, b[start:end]]) for a, b in zip(other, x)))
        states[1] = states_of(1, seed=3)[0]
        plan = packed([(1, 64, 5), (3, start, end - start)])
        out, _ = delta.delta_chunks(both, states, plan)
        assert torch.equal(out[5:], o[start:end])
        if end < rows:
            assert torch.equal(states[3], kept[end // 64 - 1])
    assert torch.equal(states[3], whole[0])


def test_windows_agree_with_the_twin():
    x, plan, states = case(2, 8, prompt=False), planned([tree(7, 1), chain(8)], 8), states_of(3)
    o, u = delta_rounds.delta_tree(x, states, ints(2, 0), plan)
    twin = torch.empty_like(o), torch.empty_like(u)
    delta_rounds.delta_tree_twin(x, states, ints(2, 0), plan, *twin, False)
    torch.testing.assert_close(o.float(), twin[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(u, twin[1], atol=1e-5, rtol=1e-5)
    assert not o[0, 7].any() and not u[0, 7].any()


def test_the_columns_of_a_program_change_no_bit(monkeypatch):
    x, plan, states = case(2, 8, prompt=False), planned([tree(8, 3), chain(6)], 8), states_of(2)
    found = []
    for columns in (16, 8):
        monkeypatch.setattr(delta_rounds, "STEP_COLUMNS", columns)
        found.append(delta_rounds.delta_tree(x, states, ints(1, 0), plan))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("seed", range(2))
def test_a_window_row_is_the_same_alone_in_a_chain_and_in_a_tree(seed):
    """Paths of a tree as chains, and row by row with commits; and the tree's own commit of that path."""
    parents = tree(8, seed)
    x, first = case(1, 12, prompt=False, seed=seed), states_of(2)
    o, u = delta_rounds.delta_tree(x, first.clone(), ints(1), planned([parents], 12))
    for leaf in sorted(set(range(8)) - set(parents))[-2:]:
        path = path_to(parents, leaf)
        chained, states = part(x, slice(0, 1), path), first.clone()
        out, updates = delta_rounds.delta_tree(chained, states, ints(1), planned([chain(len(path))], len(path)))
        assert torch.equal(out[0], o[0, path]) and torch.equal(updates[0], u[0, path]) and torch.equal(states, first)
        for row in path:
            alone = part(x, slice(0, 1), [row])
            out, update = delta_rounds.delta_tree(alone, states, ints(1), planned([[-1]], 1))
            assert torch.equal(out[0, 0], o[0, row])
            moved = states.clone()
            delta_rounds.delta_tree(alone, moved, ints(1), planned([[-1]], 1), moves=True)
            delta_rounds.delta_commit(
                states[None], alone.k[None], alone.decay[None], update[None], ints(1), ints(0)[None], ints(1)
            )
            assert torch.equal(moved, states), "moved at once"
        layers = torch.stack([first, first + 1])
        walked = ints(*path, *[-1] * (12 - len(path)))[None]
        stacked = [torch.stack([y, y]) for y in (x.k, x.decay, u)]
        delta_rounds.delta_commit(layers, *stacked, ints(1), walked, ints(len(path)))
        assert torch.equal(layers[0], states) and torch.equal(layers[0, 0], first[0])
        assert not torch.equal(layers[1, 1], layers[0, 1]) and torch.equal(layers[1, 0], first[0] + 1)


def test_a_commit_of_no_rows_moves_nothing():
    x, states = case(1, 2, prompt=False), states_of(1)
    o, u = delta_rounds.delta_tree(x, states, ints(0), planned([[]], 2))
    moved = states.clone()
    delta_rounds.delta_commit(moved[None], x.k[None], x.decay[None], u[None], ints(0), ints(0, 1)[None], ints(0))
    assert torch.equal(moved, states) and not o.any()
    delta_rounds.delta_tree(part(x, slice(0, 1), [0]), moved, ints(0), planned([[]], 1), moves=True)
    assert torch.equal(moved, states), "of no stream"
