"""The row law over whole states: cuts, resumes, windows and neighbours leave every tensor of a state bit for bit."""

from __future__ import annotations

import pytest
import torch

from .conftest import straight


def ids_of(rows, size=256, seed=0):
    return torch.randint(0, size, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()


def same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def cold(model, ids, marks=()):
    state = model.new_state()
    logits, kept = model.prompt_pass(state, ids, {}, straight(len(ids)), list(marks))
    return logits, state, {mark: view.named() for mark, view in kept.items()}


@pytest.fixture(params=["tiny", "shipped"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("rows", [65, 127, 128, 129, 200])
def test_a_cut_or_resumed_prompt_is_the_whole_prompt(model, rows):
    ids = ids_of(rows)
    logits, state, kept = cold(model, ids, [64])
    resumed = model.restore(kept[64], 64)
    assert resumed.rows == 64
    again, _ = model.prompt_pass(resumed, ids[64:], {}, straight(rows)[:, 64:], [])
    assert torch.equal(again, logits)
    same(resumed.named(), state.named())


@pytest.mark.parametrize("rows", [63, 64, 65])
def test_the_same_prompt_twice_is_the_same_state(model, rows):
    ids = ids_of(rows)
    (first, a, _), (second, b, _) = cold(model, ids), cold(model, ids)
    assert torch.equal(first, second)
    same(a.named(), b.named())


def test_a_mark_holds_what_a_pass_that_ends_there_leaves(tiny):
    ids = ids_of(300)
    _, _, kept = cold(tiny, ids, [64, 128, 256])
    for mark, tensors in kept.items():
        same(tensors, cold(tiny, ids[:mark])[1].named())


def test_a_mark_copied_late_is_untouched_by_the_decoding_since(tiny):
    ids = ids_of(150)
    state = tiny.new_state()
    _, kept = tiny.prompt_pass(state, ids, {}, straight(150), [64, 128])
    for id in ids_of(300, seed=1):
        _, moved = tiny.round_pass([state], [[id]])
        tiny.commit([state], moved, [1])
    for mark, view in kept.items():
        same(view.named(), cold(tiny, ids[:mark])[1].named())


def test_a_pass_must_start_on_the_grain(tiny):
    state = cold(tiny, ids_of(70))[1]
    with pytest.raises(ValueError, match="multiple of 64"):
        tiny.prompt_pass(state, [1], {}, straight(1), [])


def serial(model, state, ids):
    rows = []
    for id in ids:
        logits, moved = model.round_pass([state], [[id]])
        model.commit([state], moved, [1])
        rows.append(logits[0])
    return torch.stack(rows)


def test_windows_of_many_sequences_leave_the_states_of_single_steps(model):
    lengths, windows = [70, 5, 128, 91, 64], [16, 1, 7, 16, 3]
    prompts = [ids_of(n, seed=n) for n in lengths]
    drafts = [ids_of(n, seed=50 + n) for n in windows]
    start = [cold(model, ids)[1] for ids in prompts]
    alone = [s.fork() for s in start]
    rows = [serial(model, s, ids) for s, ids in zip(alone, drafts)]
    together = [s.fork() for s in start]
    logits, moved = model.round_pass(together, drafts)
    assert torch.equal(logits, torch.cat(rows))
    model.commit(together, moved, windows)
    for a, b in zip(together, alone):
        same(a.named(), b.named())


def test_a_window_accepted_in_part_leaves_the_state_of_that_part(model):
    prompts = [ids_of(n, seed=n) for n in (66, 90, 10)]
    drafts, accepted = [ids_of(16, seed=i) for i in range(3)], [1, 9, 16]
    start = [cold(model, ids)[1] for ids in prompts]
    states = [s.fork() for s in start]
    _, moved = model.round_pass(states, drafts)
    model.commit(states, moved, accepted)
    after = model.round_pass(states, [[7], [8, 9], [10]])[0]
    expected = []
    for state, ids, n, next in zip(start, drafts, accepted, ([7], [8, 9], [10])):
        serial(model, state, ids[:n])
        expected.append((state.named(), serial(model, state.fork(), next)))
    for state, (named, _) in zip(states, expected):
        same(state.named(), named)
    assert torch.equal(after, torch.cat([rows for _, rows in expected]))


def test_a_full_house_equals_each_alone(shipped):
    prompts = [ids_of(20 + i, seed=i) for i in range(16)]
    start = [cold(shipped, ids)[1] for ids in prompts]
    windows = [ids_of(1 + 5 * i % 16, seed=i) for i in range(16)]
    logits, _ = shipped.round_pass([s.fork() for s in start], windows)
    alone = [shipped.round_pass([s.fork()], [w])[0] for s, w in zip(start, windows)]
    assert torch.equal(logits, torch.cat(alone))


def test_an_image_has_the_same_features_beside_any_other(tiny, golden, features):
    grids = golden["image_grid_thw"].tolist()
    second = golden["pixel_values"][grids[0][1] * grids[0][2] :]
    assert torch.equal(tiny.tower(second, tuple(grids[1])), list(features.values())[1])


def test_a_fork_goes_its_own_way(tiny):
    state = cold(tiny, ids_of(70))[1]
    before, other = state.named(), state.fork()
    serial(tiny, other, ids_of(5))
    same(state.named(), before)
    assert other.rows == 75 and state.rows == 70


@pytest.mark.parametrize("harm", ["missing", "shape", "dtype", "stranger"])
def test_a_kept_state_that_does_not_fit_is_not_restored(tiny, harm):
    tensors = cold(tiny, ids_of(64))[1].named()
    name = next(iter(tensors))
    if harm == "missing":
        del tensors[name]
    elif harm == "stranger":
        tensors["9.S"] = tensors[name]
    else:
        tensors[name] = tensors[name][..., :-1] if harm == "shape" else tensors[name].double()
    with pytest.raises(ValueError, match="kept"):
        tiny.restore(tensors, 64)
