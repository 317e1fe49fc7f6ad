"""Settling: a reply's rows, recomputed while nothing runs, are what a cold pass over them gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tfmagic import protocol
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model

from .conftest import GREEDY, Bench, picture_prompt, text_prompt
from .test_loop import Broken, ids
from .test_promises import same_states

LONG = replace(GREEDY, max_tokens=100, stop_ids=frozenset())


def said(bench: Bench, prompt, sampling=LONG) -> list[int]:
    return bench.run(prompt, sampling).streams[0].token_ids


def test_the_next_turn_starts_at_the_end_of_a_settled_reply(tiny):
    bench, cold, asked = Bench(tiny), Bench(tiny), ids(90)
    history = asked + said(bench, text_prompt(asked))
    bench.engine.settle(text_prompt(history), "chat “kites”, turn 1")
    assert bench.engine.status()["settling"] == 1
    bench.drain()
    prompt = text_prompt(history + ids(40, 1))
    run, alone = bench.run(prompt), cold.run(prompt)
    assert run.cached_tokens == len(history) // 64 * 64 - (len(history) % 64 == 0) * 64
    assert run.settled == run.cached_tokens - 64 and run.streams[0].token_ids == alone.streams[0].token_ids
    cold.run(text_prompt(history[:193]))
    same_states(bench, cold)


def test_real_work_interrupts_at_once_and_what_was_reached_is_used(tiny):
    bench, history = Bench(tiny), ids(700)
    bench.run(text_prompt(history[:70]))
    bench.engine.settle(text_prompt(history), "turn 1")
    for _ in range(4):  # the restore and three slices
        bench.engine.step()
    run = bench.submit(text_prompt([*history, 5]), GREEDY)
    bench.engine.step()
    assert run.cached_tokens == 64 * 4 and run.settled == 64 * 3
    bench.drain()
    assert bench.engine.status()["settling"] == 0
    assert run.streams[0].token_ids == Bench(tiny).run(text_prompt([*history, 5])).streams[0].token_ids
    assert bench.run(text_prompt([*history, 6])).cached_tokens == 640


def test_the_rest_is_settled_when_it_is_quiet_again(tiny):
    bench, history = Bench(tiny), ids(400)
    bench.engine.settle(text_prompt(history), "turn 1")
    for _ in range(3):
        bench.engine.step()
    bench.run(text_prompt(ids(20, 9)))
    run = bench.run(text_prompt([*history, 1]))
    assert (run.cached_tokens, run.settled) == (384, 384)


def test_what_is_kept_already_is_not_computed_again(tiny):
    calls = []

    class Counting(Broken):
        def prompt_passes(self, parts):
            calls.append(len(parts))
            return self.model.prompt_passes(parts)

    bench = Bench(Counting(tiny, lambda rows: False))
    bench.run(text_prompt(ids(129)))
    calls.clear()
    bench.engine.settle(text_prompt(ids(140)), "turn 1")
    bench.engine.settle(text_prompt(ids(30, 1)), "too short to keep")
    bench.drain()
    assert not calls


def test_pictures_in_the_history_are_settled_over(tiny, pictures):
    parts = [ids(60), pictures[0], ids(30)]
    bench, cold = Bench(tiny), Bench(tiny)
    reply = said(bench, picture_prompt(tiny, parts))
    bench.engine.settle(picture_prompt(tiny, [*parts, reply]), "turn 1")
    bench.drain()
    prompt = picture_prompt(tiny, [*parts, reply, ids(9)])
    run = bench.run(prompt)
    assert run.cached_tokens >= 128 and run.settled >= 64 and run.images_kept == 1 and run.tower_calls == 0
    assert run.streams[0].token_ids == cold.run(prompt).streams[0].token_ids
    same_states(bench, cold)


def test_a_settling_that_fails_harms_nobody(tiny, capfd):
    bench = Bench(Broken(tiny, lambda rows: rows[0] == 239))
    bench.engine.settle(text_prompt([239] * 128), "turn 1")
    bench.drain()
    assert bench.engine.status()["settling"] == 0 and bench.run(text_prompt(ids(40))).status == "done"


def test_without_a_cache_nothing_is_settled(tiny):
    bench = Bench(tiny, budget=0)
    bench.engine.settle(text_prompt(ids(200)), "turn 1")
    assert not bench.engine.step()


@pytest.mark.parametrize("question", ["And then?", "\n\nAnd then?", "9 more"])
def test_what_a_chats_next_prompt_begins_with_is_sure(question):
    opened = open_model(None, "cpu", Settings(), lambda event: None)

    def turn(role, text):
        return protocol.Message(role, [protocol.Text(text)])

    history = [turn("user", "Tell me a story."), turn("assistant", "Once there was a cat. " * 9)]
    opened.settle(history, {}, "turn 1")
    sure = opened.engine.settler.waiting[0].prompt
    following = opened.prepare([*history, turn("user", question)], {})
    first = opened.prepare(history[:1], {})
    assert following.key[: len(sure.key)] == sure.key and torch.equal(
        following.positions[:, : len(sure.key)], sure.positions
    )
    assert len(sure.key) > len(first.key) + 40 and "cat" in opened.text.decode(sure.ids[-30:])
