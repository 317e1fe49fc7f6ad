"""Many prompts together: one prompt pass for short ones, first tokens before any draft, failures kept apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tfmagic import protocol
from tfmagic.engine.drafting.copy import Copies
from tfmagic.engine.scheduler import SLICE_BESIDE, STREAMS
from tfmagic.engine.stream import Stream
from tfmagic.errors import Refusal

from .conftest import GREEDY, SEEDED, Bench, picture_prompt, text_prompt
from .test_loop import Broken, ids
from .test_promises import same_states

SERIAL = replace(GREEDY, draft="off", stop_ids=frozenset())


class Watched(Broken):
    """Notes the rows of every prompt pass and the windows of every round, in order."""

    def __init__(self, model, fails=lambda rows: False):
        super().__init__(model, fails)
        self.passes = []

    def prompt_passes(self, parts):
        self.passes.append([len(ids) for _, ids, *_ in parts])
        return super().prompt_passes(parts)

    def round(self, states, windows, draws):
        self.passes.append("round")
        return super().round(states, windows, draws)


def together(bench, prompts, sampling=SERIAL):
    runs = [bench.submit(prompt, sampling) for prompt in prompts]
    bench.drain()
    return runs


def test_short_prompts_share_a_pass_and_get_what_they_get_alone(tiny, pictures):
    prompts = [text_prompt(ids(n, n)) for n in (1, 20, 63, 64, 65, 129)]
    prompts.append(picture_prompt(tiny, [ids(10, 77), pictures[0], ids(60)]))
    bench = Bench(Watched(tiny))
    runs = together(bench, prompts, SEEDED)
    assert bench.engine.model.passes[0] == [1, 20, 63, 64, 65, 129, 78]
    for prompt, run in zip(prompts, runs):
        alone = Bench(tiny)
        assert run.streams[0].token_ids == alone.run(prompt, SEEDED).streams[0].token_ids
        if alone.kept:
            same_states(bench, alone)


def test_all_that_wait_are_admitted_in_one_step_and_share_rounds(tiny):
    bench = Bench(Watched(tiny))
    runs = [bench.submit(text_prompt(ids(20 + i, i)), SERIAL) for i in range(STREAMS)]
    bench.engine.step()
    assert all(run.status == "decoding" for run in runs) and bench.engine.model.passes == [
        [20 + i for i in range(STREAMS)],
        "round",
    ]


def test_the_rows_of_a_shared_pass_are_limited(tiny):
    bench = Bench(Watched(tiny))
    bench.engine.model.packed = 300
    together(bench, [text_prompt(ids(n, n)) for n in (120, 121, 122, 30)])
    assert bench.engine.model.passes[0] == [120, 121, 30]


def test_short_prompts_do_not_wait_for_a_long_one(tiny):
    bench = Bench(Watched(tiny))
    long, short = bench.submit(text_prompt(ids(1500)), SERIAL), bench.submit(text_prompt(ids(50, 1)), SERIAL)
    bench.engine.step()
    assert long.status == "prefill" and short.streams[0].tokens and bench.engine.model.passes[0] == [256, 50]
    bench.drain()
    assert long.status == short.status == "done"


def test_a_long_prompt_does_not_starve_streams_that_decode(tiny):
    bench = Bench(Watched(tiny))
    talking = bench.submit(text_prompt(ids(20)), replace(SERIAL, max_tokens=30))
    bench.engine.step()
    bench.submit(text_prompt(ids(2000, 1)), SERIAL)
    bench.submit(text_prompt(ids(2000, 2)), SERIAL)
    for _ in range(10):
        said = len(talking.streams[0].tokens)
        bench.engine.step()
        assert len(talking.streams[0].tokens) == said + 1, "a round a step"
    assert all(sum(rows) <= SLICE_BESIDE for rows in bench.engine.model.passes[2:] if rows != "round")
    bench.drain()


def test_a_prompt_waits_for_the_state_that_an_equal_one_is_about_to_keep(tiny):
    bench = Bench(Watched(tiny))
    runs = together(bench, [text_prompt(ids(200)), text_prompt(ids(200)), text_prompt(ids(90, 1))])
    assert bench.engine.model.passes[0] == [200, 90] and [run.cached_tokens for run in runs] == [0, 192, 0]


def test_a_prompt_that_breaks_a_shared_pass_fails_alone(tiny, capfd):
    bench, prompts = Bench(Watched(tiny, lambda rows: rows == [239, 1, 2])), [text_prompt(ids(70, s)) for s in range(4)]
    runs = together(bench, [*prompts[:2], text_prompt([239, 1, 2]), *prompts[2:]])
    assert [run.status for run in runs] == ["done", "done", "failed", "done", "done"]
    for prompt, run in zip(prompts, [*runs[:2], *runs[3:]]):
        alone = Bench(tiny)
        assert run.streams[0].token_ids == alone.run(prompt, SERIAL).streams[0].token_ids
        same_states(bench, alone)


def test_a_shared_pass_that_fails_at_its_end_has_moved_no_state(tiny, monkeypatch):
    logits, asked = tiny.text.logits, []
    monkeypatch.setattr(tiny.text, "logits", lambda x: asked.append(len(x)) or (1 / 0 if len(x) == 3 else logits(x)))
    bench, prompts = Bench(tiny), [text_prompt(ids(n, n)) for n in (70, 140, 200)]
    runs = together(bench, prompts, replace(SERIAL, max_tokens=1))
    assert asked == [3, 1, 1, 1] and all(run.status == "done" for run in runs)
    for prompt in prompts:
        alone = Bench(tiny)
        alone.run(prompt)
        same_states(bench, alone)


# The first token --------------------------------------------------------------------------------


def test_first_tokens_go_out_before_any_draft_is_made(tiny, monkeypatch):
    bench, order = Bench(tiny), []
    drafts = Copies.draft
    monkeypatch.setattr(Copies, "draft", lambda copies, limit: order.append("draft") or drafts(copies, limit))
    take = bench.engine.sink
    bench.engine.sink = lambda event: (isinstance(event, protocol.First) and order.append("first")) or take(event)
    prompts = [text_prompt(ids(100, s)) for s in range(3)]
    for prompt in prompts:
        bench.submit(prompt, GREEDY, 2)
    bench.engine.step()
    assert order == ["first"] * 6 + ["draft"] * 6
    bench.drain()
    order.clear()
    again = [bench.submit(prompt, GREEDY, 2) for prompt in prompts]
    bench.engine.step()
    assert order == ["first"] * 6 + ["draft"] * 6
    assert all(run.cached_tokens == 64 and run.cache_source == "exact" for run in again)


def test_copying_that_fails_costs_the_stream_its_copies_alone(bench, monkeypatch, capfd):
    expected = bench.run(text_prompt(ids(40)), SERIAL).streams[0].token_ids
    monkeypatch.setattr(Copies, "draft", lambda copies, limit: 1 / 0)
    run = bench.run(text_prompt(ids(40)), replace(SERIAL, draft="on"))
    assert run.status == "done" and run.streams[0].token_ids == expected
    assert capfd.readouterr().err.count("copying failed") == 1


def firsts(bench, run):
    return [event.stream for event in bench.events if isinstance(event, protocol.First) and event.run == run.id]


@pytest.mark.parametrize("steps", range(5))
def test_a_first_token_comes_once_whenever_the_run_is_cancelled(tiny, steps):
    bench = Bench(tiny)
    runs = [bench.submit(text_prompt(ids(n, n)), GREEDY, 2) for n in (300, 40)]
    for _ in range(steps):
        bench.engine.step()
    for run in runs:
        bench.engine.cancel(run.id)
    bench.drain()
    for run in runs:
        told = firsts(bench, run)
        assert told in ([], [0, 1]) and [len(s.tokens) > 0 for s in run.streams] == [bool(told)] * 2
        assert run.status in ("stopped", "done")
        assert sum(isinstance(e, protocol.Done) and e.run == run.id for e in bench.events) == 1


def test_a_first_token_that_was_told_stays_when_what_follows_fails(tiny, monkeypatch, capfd):
    def broken(stream):
        raise MemoryError("no room for a token")

    bench = Bench(tiny)
    good, bad = bench.submit(text_prompt(ids(40)), SERIAL), bench.submit(text_prompt(ids(40, 1)), SEEDED, 3)
    accept = Stream.accept
    monkeypatch.setattr(Stream, "accept", lambda s, *walk: broken(s) if s.sampling is SEEDED else accept(s, *walk))
    bench.drain()
    assert bad.status == "failed" and "no room for a token" in bad.error and firsts(bench, bad) == [0, 1, 2]
    assert [s.finish_reason for s in bad.streams] == ["error"] * 3 and all(len(s.tokens) == 1 for s in bad.streams)
    alone = Bench(tiny).run(text_prompt(ids(40)), SERIAL)
    assert good.status == "done" and good.streams[0].token_ids == alone.streams[0].token_ids


def test_first_tokens_are_told_even_when_the_state_cannot_be_kept(tiny, monkeypatch, capfd):
    bench = Bench(tiny)
    monkeypatch.setattr(bench.engine.store, "keep", lambda *_, **__: 1 / 0)
    run, other = together(bench, [text_prompt(ids(100)), text_prompt(ids(90, 1))])
    assert firsts(bench, run) == [0] and run.status == other.status == "done"


# Memory -----------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_with_the_numbers(tiny):
    need = tiny.state_bytes(100 + SERIAL.max_tokens)
    bench = Bench(tiny, memory=2 * need)
    with pytest.raises(Refusal, match=r"may need .* GiB \(3 × 124 rows\); .* GiB are free"):
        bench.submit(text_prompt(ids(100)), SERIAL, 3)
    runs = [bench.submit(text_prompt(ids(100, s)), SERIAL) for s in range(5)]
    bench.engine.step()
    assert [run.status for run in runs] == ["decoding"] * 2 + ["queued"] * 3
    bench.drain()
    assert all(run.status == "done" for run in runs)


def test_the_bytes_of_a_state_are_what_is_admitted(tiny):
    for rows in (1, 255, 256, 257, 1000, 3000):
        state = tiny.new_state()
        for low in range(0, rows, 256):
            high = min(low + 256, rows)
            tiny.prompt_pass(state, ids(rows)[low:high], {}, text_prompt(ids(rows)).positions[:, low:high], [])
        tensors = [x for layer in state.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
        assert sum(x.nbytes for x in tensors) <= tiny.state_bytes(rows) < 4 * sum(x.nbytes for x in tensors)
