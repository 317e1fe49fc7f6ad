"""A request's way: events, numbers, ends, failures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tfmagic import protocol
from tfmagic.engine.scheduler import SLICE, STREAMS
from tfmagic.errors import Refusal
from tfmagic.run import TTFT_PARTS

from .conftest import GREEDY, SEEDED, Bench, letter, picture_prompt, text_prompt


def ids(n, seed=0):
    return torch.randint(0, 240, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def kinds(bench, run):
    names = [type(e).__name__ for e in bench.events if e.run == run.id]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


def test_events_come_in_order_and_fold_into_the_record(bench):
    run = bench.run(text_prompt(ids(700)), replace(GREEDY, max_tokens=6, draft="off"))
    assert kinds(bench, run) == [
        "Prepared",
        "Restored",
        "Encoded",
        "Prefilled",
        "First",
        "Committed",
        "Finished",
        "Done",
    ]
    assert run.status == "done" and run.prompt_tokens == run.prefilled == 700
    assert [e.rows for e in bench.events if isinstance(e, protocol.Prefilled)] == [*range(SLICE, 700, SLICE), 700]
    stream = run.streams[0]
    assert len(stream.tokens) == 6 and stream.finish_reason == "length" and len(stream.rounds) == 5
    assert [t.made for t in stream.tokens] == ["first"] + 5 * ["plain"]
    assert stream.text == "".join(map(letter, stream.token_ids))
    assert (run.cached_tokens, run.cache_source, run.tower_calls, run.images_kept, run.images_encoded) == (
        0,
        None,
        0,
        0,
        0,
    )
    assert not bench.engine.step()


def test_the_parts_of_the_time_to_first_token_add_up(bench):
    run = bench.run(text_prompt(ids(300)))
    assert set(run.ttft) == {*TTFT_PARTS, "total"} and min(run.ttft.values()) >= 0
    assert sum(run.ttft[part] for part in TTFT_PARTS) == pytest.approx(run.ttft["total"], abs=1e-3)
    assert run.streams[0].first_ms == pytest.approx(run.ttft["total"]) and run.total_ms >= run.ttft["total"]
    assert [r.ms for r in run.streams[0].rounds] == sorted(r.ms for r in run.streams[0].rounds)


def test_time_in_the_queue_is_told_apart_from_preparing(bench):
    first = bench.submit(text_prompt(ids(100)), GREEDY, streams=STREAMS)
    second = bench.submit(text_prompt(ids(100, 1)))
    bench.engine.step()
    assert second.status == "queued" and second.position == 0 and bench.engine.status()["waiting"] == 1
    bench.drain()
    assert second.ttft["queue"] >= first.ttft["prefill"] and second.ttft["prepare"] == 0


def test_an_early_stop_token_ends_the_reply(tiny, bench):
    free = bench.run(text_prompt(ids(30)), replace(GREEDY, stop_ids=frozenset())).streams[0].token_ids
    end = free[5]
    run = bench.run(text_prompt(ids(30)), replace(GREEDY, stop_ids=frozenset({end})))
    at = free.index(end)
    assert run.streams[0].token_ids == free[: at + 1] and run.streams[0].finish_reason == "stop"


def test_a_stop_string_cuts_the_text_and_keeps_the_ids(bench):
    free = bench.run(text_prompt(ids(30))).streams[0].token_ids
    stop = letter(free[6]) + letter(free[7])
    run = bench.run(text_prompt(ids(30)), replace(GREEDY, stop=[stop]))
    text = "".join(map(letter, free))
    assert run.text == text[: text.index(stop)] and run.streams[0].finish_reason == "stop"
    assert run.streams[0].token_ids == free[: text.index(stop) + 2]


def test_text_held_for_a_stop_that_never_comes_is_given_back(bench):
    free = bench.run(text_prompt(ids(30)), replace(GREEDY, max_tokens=5)).streams[0].token_ids
    run = bench.run(text_prompt(ids(30)), replace(GREEDY, max_tokens=5, stop=[letter(free[4]) + "!"]))
    assert run.text == "".join(map(letter, free)) and run.streams[0].finish_reason == "length"


def test_one_token_replies_need_no_round(bench):
    run = bench.run(text_prompt(ids(30)), replace(GREEDY, max_tokens=1), streams=3)
    assert [len(s.tokens) for s in run.streams] == [1, 1, 1] and run.stats["rounds"] == 0 and run.status == "done"


def test_the_likeliest_tokens_are_reported(bench):
    run = bench.run(text_prompt(ids(30)), replace(GREEDY, logprobs=3))
    for token in run.streams[0].tokens:
        assert len(token.top) == 3 and token.top[0][0] == token.id and token.top[0][1] == letter(token.id)
        assert token.logprob == token.top[0][2] >= token.top[1][2] >= token.top[2][2]
    assert bench.run(text_prompt(ids(30))).streams[0].tokens[0].top is None


def test_streams_of_a_run_share_its_prompt_pass_and_draw_with_their_own_seeds(bench):
    prompt = text_prompt(ids(90))
    run = bench.run(prompt, SEEDED, streams=4)
    assert kinds(bench, run).count("Restored") == 1 and len({s.token_sha for s in run.streams}) == 4
    for i, stream in enumerate(run.streams):
        assert bench.run(prompt, replace(SEEDED, seed=SEEDED.seed + i)).streams[0].token_ids == stream.token_ids


def test_drafts_are_counted_where_they_are_verified(bench, oracle):
    prompt, sampling = text_prompt(ids(50)), replace(GREEDY, max_tokens=60, stop_ids=frozenset())
    plain = bench.run(prompt, replace(sampling, draft="off"))
    oracle.append(prompt.ids + plain.streams[0].token_ids)
    run = bench.run(prompt, sampling)
    rounds, stats, made = run.streams[0].rounds, run.stats, [t.made for t in run.streams[0].tokens]
    assert plain.stats["drafted"] == 0 and run.streams[0].token_ids == plain.streams[0].token_ids
    assert 0 < stats["accepted"] < stats["drafted"] and len(rounds) < len(plain.streams[0].rounds) / 2
    assert made[0] == "first" and made.count("draft") == stats["accepted"] and len(made) == 60
    for r in rounds:
        assert 0 <= r.accepted <= r.drafted <= 15 and (r.draft_source == "copy") == (r.drafted > 0)
        assert r.committed == r.accepted + 1 and len(r.rejected) == r.drafted - r.accepted


def test_a_draft_never_runs_past_the_end_of_the_reply(bench, oracle):
    prompt, sampling = text_prompt(ids(50)), replace(GREEDY, max_tokens=40, stop_ids=frozenset())
    full = bench.run(prompt, replace(sampling, draft="off")).streams[0].token_ids
    oracle.append(prompt.ids + full)
    for end in range(1, 40, 3):
        short = bench.run(prompt, replace(sampling, max_tokens=end))
        assert short.streams[0].token_ids == full[:end] and short.streams[0].finish_reason == "length"
        stopped = bench.run(prompt, replace(sampling, stop_ids=frozenset({full[end]})))
        assert stopped.streams[0].token_ids == full[: full.index(full[end]) + 1]
        assert stopped.streams[0].finish_reason == "stop"
        for r in short.streams[0].rounds + stopped.streams[0].rounds:
            assert r.committed in (r.accepted, r.accepted + 1)


# Cancelling ---------------------------------------------------------------------------------------


def test_cancelling_anywhere_leaves_what_was_said_and_an_engine_that_goes_on(tiny):
    prompt, sampling = text_prompt(ids(600)), replace(GREEDY, max_tokens=6, draft="off", stop_ids=frozenset())
    expected = Bench(tiny).run(prompt, sampling).streams[0].token_ids
    for steps in range(9):
        bench = Bench(tiny)
        run, other = bench.submit(prompt, sampling), bench.submit(text_prompt(ids(40)), sampling)
        for _ in range(steps):
            bench.engine.step()
        ended = run.finished
        bench.engine.cancel(run.id)
        bench.drain()
        assert run.status == ("done" if ended else "stopped") and other.status == "done"
        assert run.streams[0].token_ids == expected[: len(run.streams[0].tokens)]
        assert run.streams[0].finish_reason in ("cancelled", "length") and run.total_ms > 0
        assert not bench.engine.schedule.busy
        assert bench.run(prompt, sampling).streams[0].token_ids == expected


def test_a_waiting_run_can_be_cancelled_and_strangers_are_ignored(bench):
    bench.submit(text_prompt(ids(20)), streams=STREAMS)
    waiting = bench.submit(text_prompt(ids(20)))
    bench.engine.cancel(waiting.id)
    bench.engine.cancel("nobody")
    bench.drain()
    assert (
        waiting.status == "stopped"
        and waiting.streams[0].finish_reason == "cancelled"
        and not waiting.streams[0].tokens
    )


# Refusals and failures ----------------------------------------------------------------------------


def test_what_can_never_run_is_refused_at_the_door(tiny, bench):
    for prompt, sampling, streams in (
        (text_prompt(ids(4096)), GREEDY, 1), (text_prompt([]), GREEDY, 1),
        (text_prompt(ids(5)), GREEDY, 0), (text_prompt(ids(5)), GREEDY, STREAMS + 1),
    ):  # fmt: skip
        with pytest.raises(Refusal):
            bench.submit(prompt, sampling, streams)
    assert not bench.engine.step() and not bench.events


def test_the_queue_is_bounded(bench):
    with pytest.raises(Refusal, match="waiting"):
        for _ in range(1000):
            bench.submit(text_prompt([1]))


def test_a_reply_may_fill_the_context_to_its_last_row(bench):
    run = bench.run(text_prompt(ids(4090)), replace(GREEDY, max_tokens=6, stop_ids=frozenset()))
    assert len(run.streams[0].tokens) == 6 and run.streams[0].finish_reason == "length"


class Broken:
    """A model whose passes fail where `fails(ids)` says so."""

    def __init__(self, model, fails):
        self.model, self.fails = model, fails

    def __getattr__(self, name):
        return getattr(self.model, name)

    def prompt_passes(self, parts):
        if any(self.fails(ids) for _, ids, *_ in parts):
            raise MemoryError("no room for the prompt")
        return self.model.prompt_passes(parts)

    def round(self, states, windows, draws):
        if any(self.fails(window.ids) for window in windows):
            raise MemoryError("no room for the round")
        return self.model.round(states, windows, draws)


def test_a_failing_prompt_pass_fails_its_run_alone(tiny, capfd):
    bench = Bench(Broken(tiny, lambda rows: rows[0] == 239))
    good, bad = bench.submit(text_prompt(ids(40))), bench.submit(text_prompt([239, 1, 2]))
    bench.drain()
    assert bad.status == "failed" and "no room for the prompt" in bad.error and bad.streams[0].finish_reason == "error"
    assert (
        good.status == "done"
        and good.streams[0].token_ids == Bench(tiny).run(text_prompt(ids(40))).streams[0].token_ids
    )


def test_a_failing_stream_fails_its_run_alone(tiny, capfd):
    sampling = replace(GREEDY, draft="off", stop_ids=frozenset())
    prompts = [text_prompt(ids(40, seed)) for seed in range(3)]
    expected = [Bench(tiny).run(p, sampling).streams[0].token_ids for p in prompts]
    poison = next(id for id in expected[1][2:] if id not in expected[0] + expected[2])
    bench = Bench(Broken(tiny, lambda rows: rows == [poison]))
    runs = [bench.submit(p, sampling) for p in prompts]
    bench.drain()
    assert [r.status for r in runs] == ["done", "failed", "done"]
    assert [runs[0].streams[0].token_ids, runs[2].streams[0].token_ids] == [expected[0], expected[2]]
    said = runs[1].streams[0].token_ids
    assert said == expected[1][: len(said)] and said[-1] == poison


def test_a_failing_commit_fails_its_round_and_the_engine_goes_on(bench, monkeypatch, capfd):
    def leaky(*_):
        raise MemoryError("no room to commit")

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine.model.text, "commit", leaky)
        runs = [bench.submit(text_prompt(ids(40, seed))) for seed in range(2)]
        bench.drain()
    assert [run.status for run in runs] == ["failed", "failed"] and "no room to commit" in runs[0].error
    assert bench.run(text_prompt(ids(40))).status == "done"


def sick(monkeypatch, model, rows):
    """Let the logits rows `rows(states)` of every round be not finite."""
    passed = model.text.round_pass

    def broken(states, windows):
        logits, taps, change = passed(states, windows)
        logits = logits.clone()
        logits[rows(states)] = float("nan")
        return logits, taps, change

    monkeypatch.setattr(model.text, "round_pass", broken)


def test_numbers_that_are_not_finite_fail_the_stream_that_has_them(bench, monkeypatch, capfd):
    sick(monkeypatch, bench.engine.model, lambda states: slice(0, 1))
    sampling = replace(GREEDY, draft="off", stop_ids=frozenset())
    runs = [bench.submit(text_prompt(ids(40, seed)), replace(sampling, max_tokens=2 + seed)) for seed in range(2)]
    bench.drain()
    assert runs[0].status == "failed" and "not finite" in runs[0].error
    assert len(runs[0].streams[0].tokens) == 1 and runs[1].status == "failed" and len(runs[1].streams[0].tokens) == 2


def test_tokens_before_a_row_that_is_not_finite_are_told(tiny, oracle, monkeypatch, capfd):
    prompt, sampling = text_prompt(ids(50)), replace(GREEDY, stop_ids=frozenset())
    full = Bench(tiny).run(prompt, replace(sampling, draft="off")).streams[0].token_ids
    oracle.append(prompt.ids + full)
    sick(monkeypatch, tiny, lambda states: slice(max(0, len(prompt.ids) + 9 - states[0].rows), None))
    run = Bench(tiny).run(prompt, sampling)
    assert run.status == "failed" and run.streams[0].token_ids == full[:10]


# The prompt cache ---------------------------------------------------------------------------------


def test_a_repeated_prompt_recomputes_at_most_64_rows(bench):
    for rows in (65, 128, 129, 300):
        prompt = text_prompt(ids(rows, rows))
        cold, warm = bench.run(prompt), bench.run(prompt)
        assert cold.cached_tokens == 0 and warm.cached_tokens == (rows - 1) // 64 * 64 and warm.cache_source == "exact"
        assert warm.streams[0].token_ids == cold.streams[0].token_ids and warm.prefilled == rows


def test_a_longer_prompt_resumes_from_the_shorter_one(bench):
    start = ids(200)
    bench.run(text_prompt(start))
    run = bench.run(text_prompt(start + ids(100, 1)))
    assert run.cached_tokens == 192 and run.cache_source == "ram"
    assert bench.run(text_prompt([*ids(199), 1])).cached_tokens == 192


def test_hinted_marks_serve_prompts_that_part_there(bench):
    start = ids(300)
    bench.run(text_prompt(start, marks=[140]))
    assert bench.run(text_prompt(start[:140] + ids(160, 1))).cached_tokens == 128


def test_a_failed_restore_starts_at_row_0_and_says_so(tiny, pictures, capfd):
    bench = Bench(tiny)
    prompt = picture_prompt(tiny, [ids(10), pictures[0], ids(90)])
    cold = bench.run(prompt)
    for kept in bench.kept.values():
        kept.tensors["0.S"].unsqueeze_(0)
    run = bench.run(prompt)
    assert run.cached_tokens == 0 and run.cache_source is None and run.tower_calls == 1 and "64 rows" in run.note
    assert run.streams[0].token_ids == cold.streams[0].token_ids and bench.engine.store.counts.failed == 1
    healed = bench.run(prompt)
    assert healed.cached_tokens == 64 and healed.note is None and healed.images_kept == 1


def test_a_cache_without_a_budget_changes_no_token(tiny):
    prompt = text_prompt(ids(200))
    off = Bench(tiny, budget=0)
    runs = [off.run(prompt) for _ in range(2)]
    assert [r.cached_tokens for r in runs] == [0, 0]
    assert runs[0].streams[0].token_ids == Bench(tiny).run(prompt).streams[0].token_ids


# The tower ----------------------------------------------------------------------------------------


def test_the_tower_runs_only_for_images_that_end_past_the_resume_row(tiny, bench, pictures):
    one, two = pictures
    head = [ids(50), one, ids(70)]
    prompt = picture_prompt(tiny, head)
    cold = bench.run(prompt)
    assert (cold.tower_calls, cold.images_encoded, cold.images_kept) == (1, 1, 0) and cold.pictures[0].start == 51
    assert [p.kept for p in cold.pictures] == [False]
    warm = bench.run(prompt)
    assert (warm.tower_calls, warm.images_encoded, warm.images_kept, warm.cached_tokens) == (0, 0, 1, 64 * 2 - 64)
    assert warm.streams[0].token_ids == cold.streams[0].token_ids
    more = bench.run(picture_prompt(tiny, [*head, two, ids(20)]))
    assert [p.kept for p in more.pictures] == [True, False] and more.tower_calls == 1
    assert (
        more.streams[0].token_ids == Bench(tiny).run(picture_prompt(tiny, [*head, two, ids(20)])).streams[0].token_ids
    )


def test_replies_stand_where_the_images_leave_off_cold_and_resumed(tiny, pictures):
    class Watched(Broken):
        shifts = set()

        def round(self, states, windows, draws):
            self.shifts |= {(s.rows >= len(prompt.ids), s.shift) for s in states}
            return self.model.round(states, windows, draws)

    prompt = picture_prompt(tiny, [ids(10), pictures[0], ids(90), pictures[1], ids(9)])
    bench = Bench(Watched(tiny, lambda rows: False))
    for cached in (0, 64):
        assert bench.run(prompt, streams=2).cached_tokens == cached
    assert Watched.shifts == {(True, prompt.rope_delta)} and prompt.rope_delta < -5


def test_an_image_cut_by_the_resume_row_is_encoded_again(tiny, bench, pictures):
    bench.run(picture_prompt(tiny, [ids(60), pictures[0], ids(2)]))
    longer = picture_prompt(tiny, [ids(60), pictures[0], ids(80)])
    run = bench.run(longer)
    assert run.cached_tokens == 64 and run.tower_calls == 1 and [p.kept for p in run.pictures] == [False]
    assert run.streams[0].token_ids == Bench(tiny).run(longer).streams[0].token_ids


def test_another_image_under_equal_placeholders_shares_nothing(tiny, bench, pictures):
    a = picture_prompt(tiny, [ids(10), pictures[0], ids(90)])
    b = picture_prompt(
        tiny, [ids(10), replace(pictures[0], content=b"other" * 4, patches=-pictures[0].patches), ids(90)]
    )
    assert a.ids == b.ids
    bench.run(a)
    other = bench.run(b)
    assert other.cached_tokens == 0 and other.tower_calls == 1
    assert other.streams[0].token_ids == Bench(tiny).run(b).streams[0].token_ids
