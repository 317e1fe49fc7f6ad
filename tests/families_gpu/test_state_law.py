"""The row law over whole states in the bf16 form, on twins: cuts, resumes, forks, windows, trees and neighbours leave
every tensor of a state bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tfmagic.engine.families.qwen3_5.gpu.fields import Fields
from tfmagic.engine.families.qwen3_5.gpu.graphs import Graphs
from tfmagic.engine.sampling import Draw, draw, likeliest

from ..families.conftest import straight
from .conftest import GREEDY, SEEDED, Reply, cold, ids_of, rounds, same


@pytest.fixture(params=["tiny", "tiny_fp8"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("rows", [65, 128, 129, 580])
def test_a_cut_or_resumed_prompt_is_the_whole_prompt(model, rows):
    ids, mark = ids_of(rows), (rows - 1) // 64 * 64
    logits, state, kept = cold(model, ids, [64, mark])
    for at in {64, mark}:
        for tensors in (kept[at], dict(kept[at].items())):  # still on the device, and from host memory
            resumed = model.restore(tensors, at)
            assert resumed.rows == at
            again, _ = model.prompt_pass(resumed, ids[at:], {}, straight(rows)[:, at:], [])
            assert torch.equal(again, logits)
            same(resumed.named(), state.named())


def test_prompts_packed_together_are_each_what_they_are_alone(model):
    prompts = [ids_of(n, seed=n) for n in (3, 64, 200, 129)]
    alone = [cold(model, ids, [64] if len(ids) > 64 else []) for ids in prompts]
    states = [model.new_state() for _ in prompts]
    parts = [(s, ids, {}, straight(len(ids)), [64] if len(ids) > 64 else []) for s, ids in zip(states, prompts)]
    for (logits, views, taps), (expected, state, kept), mine in zip(model.prompt_passes(parts), alone, states):
        assert torch.equal(logits, expected) and taps is None
        same(mine.named(), state.named())
        for mark, view in views.items():
            same(view.named(), kept[mark])


def test_a_mark_copied_late_is_untouched_by_the_decoding_since(model):
    ids, state = ids_of(150), model.new_state()
    logits, kept = model.prompt_pass(state, ids, {}, straight(150), [64, 128])
    reply = Reply(state, 150, int(logits.argmax()))
    for _ in range(12):
        rounds(model, [reply])
    for mark, view in kept.items():
        same(view.named(), cold(model, ids[:mark])[1].named())


def test_marks_that_the_device_has_no_room_for_wait_in_host_memory(model, monkeypatch):
    marks = [64, 128, 192, 256]
    monkeypatch.setattr(model.pool, "plan", replace(model.pool.plan, views=2 * model.pool.view_bytes))
    state = model.new_state()
    _, kept = model.prompt_pass(state, ids_of(300), {}, straight(300), marks)
    assert [view.here for view in kept.values()] == [False, False, True, True]
    for mark, view in kept.items():
        named = view.named()
        same(named, cold(model, ids_of(mark))[1].named())
        assert model.restore(named, mark).rows == mark


def test_what_is_on_its_way_to_the_device_is_not_written_over(model, monkeypatch):
    """Passes follow each other without a word to the host: it may be ahead of the device."""
    on_the_way: dict[Fields, torch.Tensor] = {}
    before: dict[Fields, list[Fields]] = {}  # what is fetched comes behind what was sent
    plain, captured = (Fields.send, Fields.wait, Fields.fetch), Graphs.captured

    def send(fields):
        assert fields not in on_the_way
        on_the_way[fields] = fields._host.clone()
        plain[0](fields)

    def arrived(fields):
        assert torch.equal(on_the_way.pop(fields, fields._host), fields._host)

    def wait(fields):
        for one in before.pop(fields, [fields]):
            arrived(one)
        plain[1](fields)

    def fetch(fields):
        before[fields] = [*on_the_way]
        plain[2](fields)

    def capture(graphs, launch):
        on_the_way.clear()  # it waits
        return captured(graphs, launch)

    for name, method in (("send", send), ("wait", wait), ("fetch", fetch)):
        monkeypatch.setattr(Fields, name, method)
    monkeypatch.setattr(Graphs, "captured", capture)
    states = [model.new_state() for _ in range(2)]
    for low in range(0, 192, 64):  # as a reply is settled
        for state, seed in zip(states, (1, 2)):
            model.prompt_pass(state, ids_of(192, seed=seed)[low : low + 64], {}, straight(192)[:, low : low + 64], [])
    assert on_the_way
    replies = [Reply(state, 192, 7) for state in states]
    for _ in range(3):
        rounds(model, replies)
    assert not on_the_way


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_rounds_that_follow_before_tokens_are_known_are_those_that_follow_after(model, sampling):
    """Tokens, tapped rows and states; where a sequence has ended meanwhile, the others'."""
    model.tap([0, 2])
    prompts = [ids_of(rows, seed=rows) for rows in (3, 130, 511)]

    def replies() -> list[Reply]:
        states = [model.new_state() for _ in prompts]
        for state, ids in zip(states, prompts):
            model.prompt_pass(state, ids, {}, straight(len(ids)), [])
        return [Reply(state, len(ids), 5, sampling, i) for i, (state, ids) in enumerate(zip(states, prompts))]

    usual, taps = replies(), []
    for _ in range(6):
        taps.append([outcome.taps for outcome in rounds(model, usual)])
    ahead = replies()
    flight = model.launch_round(*map(list, zip(*(reply.window() for reply in ahead))))
    for i in range(6):
        following = model.follow_round(flight)
        assert (following is None) == (i == 5)
        for reply, outcome, rows in zip(ahead, flight(), taps[i]):
            reply.ids += outcome.walk.ids
            assert torch.equal(outcome.taps, rows)
        flight = following
        if i == 4:
            ahead[1].state = None  # its end was found while round 5 was under way already
    for one, other in zip(usual, ahead):
        assert one.ids == other.ids
        if other.state is not None:
            same(one.state.named(), other.state.named())
    model.tap([])


def test_a_round_under_way_outlasts_others(model):
    """Another engine's on the same model, of the same bucket and of another."""
    one, other = (Reply(cold(model, ids_of(rows))[1], rows, 5) for rows in (40, 70))
    usual, beside = (Reply(cold(model, ids_of(rows))[1], rows, 5) for rows in (40, 70))
    for _ in range(3):
        rounds(model, [usual])
    for _ in range(2):
        rounds(model, [beside])
    flight = model.launch_round(*map(list, zip(one.window())))
    under_way = model.follow_round(flight)
    one.ids += flight()[0].walk.ids
    rounds(model, [other])
    rounds(model, [other, Reply(model.new_state(), 0, 3)])
    assert model.follow_round(under_way) is None
    one.ids += under_way()[0].walk.ids
    rounds(model, [one])
    assert one.ids == usual.ids and other.ids == beside.ids
    same(one.state.named(), usual.state.named())


def test_a_pass_must_start_on_the_grain(model):
    state = cold(model, ids_of(70))[1]
    with pytest.raises(ValueError, match="multiple of 64"):
        model.prompt_pass(state, [1], {}, straight(1), [])


def test_a_pass_that_fails_moves_no_state(model, monkeypatch):
    ids = ids_of(200)
    state = model.new_state()
    model.prompt_pass(state, ids[:128], {}, straight(128), [])
    before = state.named()

    def fails(*args):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(model.text, "logits", fails)
        with pytest.raises(RuntimeError):
            model.prompt_pass(state, ids[128:], {}, straight(200)[:, 128:], [])
    assert state.rows == 128
    same(state.named(), before)
    again = model.prompt_pass(state, ids[128:], {}, straight(200)[:, 128:], [])[0]
    assert torch.equal(again, cold(model, ids)[0])


def tree(right: list[int], rng: random.Random) -> tuple[list[int], list[int]]:
    """Guesses behind a pending token: some of the right continuation, among wrong ones."""
    ids, parents, last = [], [], 0
    for id in right[: rng.choice([0, 1, 2, 5, 9])]:
        for guess in ([(id + 1) % 240] if rng.random() < 0.4 else []) + [id if rng.random() < 0.8 else (id + 2) % 240]:
            if len(ids) < 15:
                ids.append(guess)
                parents.append(last)
        last = len(ids)
        if rng.random() < 0.2 and last > 1:
            last -= 1  # a child of a wrong guess
    return ids, parents


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_drafted_streams_together_are_each_serial_and_alone(model, sampling):
    rng, prompts = random.Random(1), [ids_of(n, seed=n) for n in (70, 5, 64, 505)]
    begun = [cold(model, ids) for ids in prompts]
    serial = [Reply(s.fork(), len(ids), int(row.argmax()), sampling) for (row, s, _), ids in zip(begun, prompts)]
    for reply in serial:
        for _ in range(24):
            rounds(model, [reply])
    drafted = [Reply(s, len(ids), int(row.argmax()), sampling) for (row, s, _), ids in zip(begun, prompts)]
    while min(len(reply.ids) for reply in drafted) < 14:
        going = [(a, b) for a, b in zip(drafted, serial) if len(a.ids) < 14]
        drafts = [tree(whole.ids[len(reply.ids) :], rng) for reply, whole in going]
        rounds(model, [reply for reply, _ in going], drafts)
    for reply, whole, ids in zip(drafted, serial, prompts):
        n = len(reply.ids)
        assert reply.ids == whole.ids[:n]
        again = Reply(cold(model, ids)[1], len(ids), reply.ids[0], sampling)
        for _ in range(n - 1):
            rounds(model, [again])
        same(reply.state.named(), again.state.named())


def test_a_fork_goes_its_own_way(model):
    row, state, _ = cold(model, ids_of(70))
    before, other = state.named(), state.fork()
    reply = Reply(other, 70, int(row.argmax()))
    for _ in range(5):
        rounds(model, [reply])
    same(state.named(), before)
    assert other.rows == 75 and state.rows == 70


def test_a_row_that_is_not_finite_ends_its_own_stream_alone(tiny, monkeypatch):
    begun = [cold(tiny, ids_of(n, seed=n)) for n in (9, 12)]
    replies = [Reply(s, n, int(row.argmax())) for (row, s, _), n in zip(begun, (9, 12))]
    expected = Reply(begun[1][1].fork(), 12, replies[1].ids[0])
    rounds(tiny, [expected])
    tiny.pool.S[0, replies[0].state.slot.index] = torch.nan
    broken, sound = rounds(tiny, replies)
    assert not broken.walk.rows and "finite" in broken.walk.error
    assert sound.walk.error is None and replies[1].ids == expected.ids


def alike(found, said) -> None:
    """Log probabilities of a device and of the host, which adds up in another order."""
    (ids, values), (same, expected) = zip(*found.top), zip(*said.top)
    assert ids == same and np.allclose([found.drawn, *values], [said.drawn, *expected], rtol=0, atol=1e-12)


def test_log_probabilities_and_taps_come_of_the_rows_walked(tiny):
    row, state, _ = cold(tiny, ids_of(40))
    ahead = Reply(state.fork(), 40, int(row.argmax()))
    for _ in range(3):
        rounds(tiny, [ahead])
    right = ahead.ids[1:]
    draft = [(right[0] + 1) % 240, right[0], right[1]], [0, 0, 2]
    tiny.tap([1, 3])
    try:
        asked = Reply(state.fork(), 40, ahead.ids[0], replace(GREEDY, logprobs=5))
        others = [Reply(state.fork(), 40, ahead.ids[0], replace(GREEDY, logprobs=20)), Reply(state.fork(), 40, 3)]
        outcome, more, none = rounds(tiny, [asked, *others], [draft] * 3)
        one, rows = Reply(state, 40, ahead.ids[0], replace(GREEDY, logprobs=5)), []
        alone = []
        for _ in range(3):
            alone += rounds(tiny, [one])
            rows.append(tiny.text.space.logits[0].numpy().copy())
    finally:
        tiny.tap([])
    assert outcome.walk.rows == [0, 2, 3] and outcome.walk.ids == right
    assert outcome.likely == [o.likely[0] for o in alone] and none.likely == [None] * len(none.walk.rows)
    assert [(one.drawn, one.top) for one in outcome.likely] == [(one.drawn, one.top[:5]) for one in more.likely]
    for found, row, id in zip(outcome.likely, rows, right):
        alike(found, likeliest(row, replace(GREEDY, logprobs=5), id))
    assert torch.equal(outcome.taps, torch.cat([o.taps for o in alone])) and outcome.taps.shape == (3, 128)


def test_layers_tapped_already_change_nothing_that_was_made(tiny):
    row, state, _ = cold(tiny, ids_of(40))
    tiny.tap([1])
    try:
        rounds(tiny, [Reply(state, 40, int(row.argmax()))])
        made = tiny.graphs.count
        tiny.tap([1])
        outcome = rounds(tiny, [Reply(state, 41, 3)])[0]
        assert tiny.graphs.count == made and outcome.taps.shape == (1, 64)
    finally:
        tiny.tap([])


def test_what_is_timed_leaves_nothing_behind(tiny):
    free = tiny.pool.free_pages, tiny.pool.free_slots
    assert tiny.time_round(3, 7) > 0
    assert (tiny.pool.free_pages, tiny.pool.free_slots) == free


def test_first_tokens_are_drawn_as_the_host_draws(tiny):
    logits, _, _ = cold(tiny, ids_of(70))
    hot = [replace(SEEDED, top_k=k, top_p=p, min_p=m) for k, p, m in ((0, 1.0, 0.0), (5, 0.9, 0.0), (0, 0.8, 0.1))]
    draws = [Draw(by, seed, 70) for by in (GREEDY, *hot) for seed in (3, 2**63 - 1)]
    assert tiny.draw(logits, draws) == [(draw(logits.numpy(), *by), None) for by in draws]
    assert tiny.draw(logits, draws[:1] * 3) == [(int(logits[: GREEDY.size].argmax()), None)] * 3
    asked = [Draw(replace(by.sampling, logprobs=i), *by[1:]) for i, by in enumerate(draws)]
    for (id, found), by in zip(tiny.draw(logits, asked), asked):
        said = likeliest(logits.numpy(), by.sampling, id)
        assert id == draw(logits.numpy(), *by) and (found is None) == (said is None)
        if said is not None:
            alike(found, said)
    logits[5] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        tiny.draw(logits, draws)
