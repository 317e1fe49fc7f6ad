"""The row law over whole states: cuts, resumes, windows and neighbours leave every tensor of a state bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from tfmagic.engine.drafting.draft import Window, chain
from tfmagic.engine.sampling import Draw, Sampling, likeliest

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


@pytest.fixture(params=["tiny", "tiny_fp8", "shipped"])
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
        _, moved = tiny.round_pass([state], [chain([id])])
        tiny.commit([state], moved, [[0]])
    for mark, view in kept.items():
        same(view.named(), cold(tiny, ids[:mark])[1].named())


def test_a_pass_must_start_on_the_grain(tiny):
    state = cold(tiny, ids_of(70))[1]
    with pytest.raises(ValueError, match="multiple of 64"):
        tiny.prompt_pass(state, [1], {}, straight(1), [])


def serial(model, state, ids):
    rows = []
    for id in ids:
        logits, moved = model.round_pass([state], [chain([id])])
        model.commit([state], moved, [[0]])
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
    logits, moved = model.round_pass(together, [chain(ids) for ids in drafts])
    assert torch.equal(logits, torch.cat(rows))
    model.commit(together, moved, [list(range(n)) for n in windows])
    for a, b in zip(together, alone):
        same(a.named(), b.named())


def test_a_window_accepted_in_part_leaves_the_state_of_that_part(model):
    prompts = [ids_of(n, seed=n) for n in (66, 90, 10)]
    drafts, accepted = [ids_of(16, seed=i) for i in range(3)], [1, 9, 16]
    start = [cold(model, ids)[1] for ids in prompts]
    states = [s.fork() for s in start]
    _, moved = model.round_pass(states, [chain(ids) for ids in drafts])
    model.commit(states, moved, [list(range(n)) for n in accepted])
    after = model.round_pass(states, [chain([7]), chain([8, 9]), chain([10])])[0]
    expected = []
    for state, ids, n, next in zip(start, drafts, accepted, ([7], [8, 9], [10])):
        serial(model, state, ids[:n])
        expected.append((state.named(), serial(model, state.fork(), next)))
    for state, (named, _) in zip(states, expected):
        same(state.named(), named)
    assert torch.equal(after, torch.cat([rows for _, rows in expected]))


def random_tree(rng, rows):
    """A window of random ids; chains and bushes by turns."""
    spread = rng.choice([1, 2, 16])
    parents = [-1, *(rng.randrange(max(0, row - spread), row) for row in range(1, rows))]
    return Window([rng.randrange(250) for _ in parents], parents)


def path_to(window, row):
    path = [row]
    while window.parents[path[0]] >= 0:
        path.insert(0, window.parents[path[0]])
    return path


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_trees_are_their_paths_as_chains_and_one_by_one(model, seed):
    rng = random.Random(seed)
    start = [cold(model, ids_of(rng.randint(1, 140), seed=i))[1] for i in range(rng.choice([1, 3, 10]))]
    trees = [random_tree(rng, rng.randint(1, 16)) for _ in start]
    states = [s.fork() for s in start]
    logits, moved = model.round_pass(states, trees)
    walked = [path_to(tree, rng.randrange(len(tree.ids))) for tree in trees]
    first = 0
    for state, tree in zip(start, trees):
        for row in range(len(tree.ids)):
            ids = [tree.ids[r] for r in path_to(tree, row)]
            rows, _ = model.round_pass([state.fork()], [chain(ids)])
            assert torch.equal(logits[first + row], rows[-1]), (tree, row)
        first += len(tree.ids)
    model.commit(states, moved, walked)
    after = model.round_pass(states, [chain([7])] * len(states))[0]
    for i, (state, tree, path) in enumerate(zip(start, trees, walked)):
        expected = serial(model, state, [tree.ids[r] for r in path])
        assert torch.equal(expected[-1], logits[sum(len(t.ids) for t in trees[:i]) + path[-1]])
        same(states[i].named(), state.named())
        assert torch.equal(after[i], serial(model, state, [7])[0])


def drawn(position, **more):
    fields = {"max_tokens": 9, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "draft": "on"}
    fields |= {"logprobs": 0, "stop": [], "stop_ids": frozenset(), "size": 250} | more
    return Draw(Sampling(**fields), 0, position)


def test_a_round_walks_commits_and_gives_the_taps_and_logits_of_the_walk(model):
    prompt = ids_of(70)
    logits, start, _ = cold(model, prompt)
    alone, pending, said, rows = start.fork(), int(logits[:250].argmax()), [], []
    for _ in range(4):
        row = serial(model, alone, [(said or [pending])[-1]])[0]
        rows.append(row)
        said.append(int(row[:250].argmax()))
    wrong = [(id + 1) % 250 for id in said]
    tree = Window([pending, wrong[0], said[0], wrong[1], said[1], said[2], wrong[2]], [-1, 0, 0, 2, 2, 4, 4])
    try:
        model.tap([0, 2])
        state, lone = start.fork(), start.fork()
        (outcome,) = model.round([state], [tree], [drawn(71, logprobs=1)])
        ones = [model.round([lone], [chain([id])], [drawn(71 + i)])[0] for i, id in enumerate([pending, *said[:3]])]
    finally:
        model.tap([])
    assert outcome.walk == ([0, 2, 4, 5], said, None)
    assert outcome.likely == [likeliest(row.numpy(), drawn(71, logprobs=1).sampling, id) for row, id in zip(rows, said)]
    assert torch.equal(outcome.taps, torch.cat([one.taps for one in ones])) and outcome.taps.shape[0] == 4
    assert all(one.likely == [None] for one in ones)
    same(state.named(), alone.named())
    same(lone.named(), alone.named())
    assert model.round([state], [chain([said[-1]])], [drawn(75)])[0].taps is None


def test_a_round_that_fails_has_moved_no_state(tiny, monkeypatch):
    state = cold(tiny, ids_of(70))[1]
    before = state.named()
    for part in ("plan", "replay"):
        with monkeypatch.context() as patch:
            def broken(*_):
                raise MemoryError("no room")

            patch.setattr(f"tfmagic.kernels.delta.{part}", broken)
            with pytest.raises(MemoryError):
                tiny.round([state], [chain([1, 2, 3])], [drawn(71)])
        assert state.rows == 70
        same(state.named(), before)


def test_the_taps_of_a_prompt_are_the_layers_rows_however_it_is_cut(tiny):
    ids = ids_of(150)
    try:
        tiny.tap([1, 3])
        whole = tiny.prompt_passes([(tiny.new_state(), ids, {}, straight(150), [])])[0][2]
        state, parts = tiny.new_state(), []
        for low, high in ((0, 64), (64, 150)):
            part = (state, ids[low:high], {}, straight(150)[:, low:high], [])
            parts.append(tiny.prompt_passes([part])[0][2])
        for layers in ([4], [-1], [1, 1]):
            with pytest.raises(ValueError, match="tapped"):
                tiny.tap(layers)
    finally:
        tiny.tap([])
    assert torch.equal(torch.cat(parts), whole) and whole.shape == (150, 2 * tiny.config.text.hidden)
    assert tiny.prompt_passes([(tiny.new_state(), ids, {}, straight(150), [])])[0][2] is None
    with torch.inference_mode():
        assert torch.equal(tiny.text.logits(whole[-1:, tiny.config.text.hidden :])[0], cold(tiny, ids)[0])


def test_a_full_house_equals_each_alone(shipped):
    prompts = [ids_of(20 + i, seed=i) for i in range(16)]
    start = [cold(shipped, ids)[1] for ids in prompts]
    windows = [chain(ids_of(1 + 5 * i % 16, seed=i)) for i in range(16)]
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
