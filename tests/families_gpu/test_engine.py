"""The engine over the bf16 form, on twins: the promises, the schedule fuzzer, and what is given back."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import pytest

from tfmagic.engine import families
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.static import CONTEXTS
from tfmagic.engine.families.qwen3_5.gpu.pool import Plan
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model
from tfmagic.errors import Refusal

from ..bench.engine import run as ask
from ..engine.conftest import GREEDY, SEEDED, Bench, text_prompt
from ..engine.test_fuzz import many
from ..families.conftest import GOLDEN
from .conftest import ids_of
from .varied import Drafted, varied


@pytest.fixture(scope="module")
def model():
    """`tiny`, whose prompts are cut by the scheduler's own slices, which tests choose."""
    made = families.load(Checkpoint(GOLDEN), "cpu", form="bf16")
    made.slices = None
    return made


def given_back(model) -> None:
    gc.collect()
    assert model.pool.free_slots == model.pool.plan.slots - 1


def test_together_is_alone_and_again_is_cold(model):
    prompts = [text_prompt(ids_of(n, seed=n)) for n in (5, 70, 130, 200)]
    asked = [(prompt, sampling) for prompt in prompts for sampling in (GREEDY, SEEDED)]
    alone = [Bench(model, budget=0).run(p, replace(s, draft="off", max_tokens=9)) for p, s in asked]
    bench = Bench(model)
    for _ in range(2):
        runs = [bench.submit(p, replace(s, max_tokens=9)) for p, s in asked]
        bench.drain()
        for run, one in zip(runs, alone):
            assert run.status == "done" and run.streams[0].token_ids == one.streams[0].token_ids
    assert run.cached_tokens == 192 and run.cache_source == "exact"
    del bench
    given_back(model)


def test_one_prompt_in_many_streams(model):
    prompt, few = text_prompt(ids_of(100, seed=3)), replace(SEEDED, max_tokens=6)
    run = Bench(model).run(prompt, few, streams=16)
    for i, stream in enumerate(run.streams):
        one = Bench(model, budget=0).run(prompt, replace(few, seed=few.seed + i, draft="off"))
        assert stream.token_ids == one.streams[0].token_ids
    given_back(model)


def followed(bench) -> list[int]:
    """Grows with each round that begins behind another one: by its streams."""
    rounds, found = bench.engine.rounds, []
    follow = rounds._follow

    def noted(flight):
        following = follow(flight)
        found.append(len(following.states))
        return following

    rounds._follow = noted
    return found


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_rounds_begin_before_tokens_are_here(model, sampling):
    """Of two prompts and six streams: whatever those tokens end, and whoever comes meanwhile."""
    prompts = [text_prompt(ids_of(n, seed=n)) for n in (40, 150)]
    plain = [Bench(model, budget=0).run(p, replace(sampling, logprobs=1), 3) for p in prompts]
    said = plain[0].streams[1].token_ids
    stop = next(id for i, id in enumerate(said) if i > 12 and id not in said[:i])
    asked = replace(sampling, stop_ids=frozenset({stop}))
    bench = Bench(model)
    found = followed(bench)
    runs = [bench.submit(prompts[0], asked, 3)]
    for _ in range(4):
        bench.engine.step()
    assert found == [3, 3, 3, 3]
    runs.append(bench.submit(prompts[1], sampling, 3))
    bench.drain()
    assert bench.engine.rounds._next is None
    for run, one in zip(runs, plain):
        for stream, other in zip(run.streams, one.streams):
            whole = other.token_ids
            ends = whole.index(stop) + 1 if run is runs[0] and stop in whole else len(whole)
            assert stream.token_ids == whole[:ends]
            assert [token.piece for token in stream.tokens] == [token.piece for token in other.tokens[:ends]]
    assert len(found) > 20 and {3, 6} <= {*found}
    del bench
    given_back(model)


def test_who_waits_for_streams_to_end_does_not_slow_them_down(model):
    bench, asked = Bench(model, budget=0), replace(GREEDY, stop_ids=frozenset())
    found = followed(bench)
    runs = [bench.submit(text_prompt(ids_of(40, seed=i)), asked, 16) for i in range(2)]
    bench.drain()
    assert all(run.status == "done" for run in runs) and len(found) == 2 * (asked.max_tokens - 2)


def test_a_stopped_run_gives_back_what_a_round_under_way_still_writes(model):
    prompt, asked = text_prompt(ids_of(40)), replace(GREEDY, max_tokens=200, stop_ids=frozenset())
    bench = Bench(model, budget=0)
    found = followed(bench)
    first = bench.submit(prompt, asked, 16)
    while len(found) < 5:
        bench.engine.step()
    bench.engine.cancel(first.id)
    again = bench.submit(prompt, replace(asked, max_tokens=8), 16)
    bench.drain()
    alone = Bench(model, budget=0).run(prompt, replace(asked, max_tokens=8))
    assert first.status == "stopped" and again.status == "done"
    assert all(stream.token_ids == alone.streams[0].token_ids for stream in again.streams)
    del bench
    given_back(model)


def test_copies_begin_where_they_began(model, monkeypatch):
    """A round is not begun ahead where the token that is about to come may bring a copy."""
    monkeypatch.setattr("tfmagic.engine.drafting.copy.MATCH", 2)
    prompt, asked = text_prompt(ids_of(1000)), replace(GREEDY, max_tokens=200, stop_ids=frozenset())
    bench, usual = Bench(model, budget=0), Bench(model, budget=0)
    usual.engine.rounds._follow = None
    found = followed(bench)
    one, other = bench.run(prompt, asked), usual.run(prompt, asked)
    for rounds in zip(one.streams[0].rounds, other.streams[0].rounds, strict=True):
        assert rounds[0].nodes == rounds[1].nodes and rounds[0].draft_source == rounds[1].draft_source
    assert one.streams[0].token_ids == other.streams[0].token_ids
    assert one.stats["draft_source"]["copy"] and found


@pytest.mark.slow
def test_schedules(model, pictures, tmp_path, capfd, monkeypatch):
    drafter = varied(model, tmp_path / "drafter", GREEDY.size)
    world, launch, begun = Drafted(model, pictures, drafter), model.draft_round, Counter()

    def drafted(*told):
        flight = launch(*told)
        begun["rounds"] += flight is not None
        begun["behind another"] += told[0].seats is not None and flight is not None
        return flight

    monkeypatch.setattr(model, "draft_round", drafted)
    counts = many(world, tmp_path, range(12), capfd)
    wanted = ("accepted", "rejected", "cached", "cancelled", "packed", "tree", "block", "branches")
    assert all(counts[what] for what in wanted), counts
    assert begun["rounds"] > 20 and begun["behind another"] > 5, begun
    given_back(model)
    assert len(drafter.free) == CONTEXTS


def test_what_does_not_fit_waits_and_what_never_fits_is_refused():
    small = Plan(slots=19, pages=4, longest=9, views=1 << 20)
    model = families.load(Checkpoint(GOLDEN), "cpu", form="bf16")
    small = type(model)(Checkpoint(GOLDEN), "cpu", planned=small)
    bench = Bench(small, memory=small.memory)
    with pytest.raises(Refusal, match="may need"):
        bench.submit(text_prompt(ids_of(1600)))
    one = bench.submit(text_prompt(ids_of(600, seed=1)), replace(GREEDY, max_tokens=4))
    two = bench.submit(text_prompt(ids_of(700, seed=2)), replace(GREEDY, max_tokens=4))
    bench.engine.step()
    assert len(bench.engine.schedule.running) == 1
    bench.drain()
    assert one.status == two.status == "done"
    third = bench.run(text_prompt(ids_of(1400, seed=3)), replace(GREEDY, max_tokens=4))
    assert third.status == "done"
    given_back(small)


def test_states_on_disk_hold_bf16_and_fp8(tmp_path):
    from tfmagic.engine.cache.disk import Disk, Limits
    from tfmagic.engine.cache.store import Store

    for kv in ("bf16", "fp8"):
        model = families.load(Checkpoint(GOLDEN), "cpu", form="bf16", kv=kv)
        prompt, few = text_prompt(ids_of(600)), replace(GREEDY, max_tokens=4)
        replies = []
        for _ in range(2):
            store = Store(1 << 30, model.grain)
            store.disk = Disk(tmp_path / kv, {"model": "tiny"}, model.grain, Limits(free=0), lambda line: None)
            run = Bench(model, store=store).run(prompt, few)
            store.disk.close(5.0)
            replies.append((run.cached_tokens, run.cache_source, run.streams[0].token_ids))
        assert replies[0][0] == 0 and replies[1][:2] == (576, "disk") and replies[0][2] == replies[1][2]


def test_the_shipped_model_in_bf16_says_what_it_says_exactly():
    said = {}
    for form in (None, "bf16"):
        opened = open_model(None, "cpu", Settings(form=form, drafter="none"), lambda event: None)
        params = {"max_tokens": 12, "temperature": 0.0}
        first = ask(opened, "What is 12 + 7?", **params)
        again = ask(opened, "What is 12 + 7?", draft="off", **params)
        assert first.streams[0].token_ids == again.streams[0].token_ids
        said[form] = first.streams[0].text
    assert said[None] == said["bf16"]
