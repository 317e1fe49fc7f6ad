"""A block drafter in the engine: whatever it gives, tokens are serial; what it is told is what was computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tfmagic import protocol
from tfmagic.engine.drafting.drafting import Taps
from tfmagic.engine.drafting.tree import NODES

from .conftest import GREEDY, SEEDED, Bench, text_prompt
from .drafters import BAD, BROKEN, GOOD, Drafter, Fixed, K
from .test_loop import ids

WAYS = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
LONG = replace(GREEDY, max_tokens=32, stop_ids=frozenset())


@pytest.fixture
def drafted(tiny):
    """`drafted(ways)` -> a bench with such a drafter, and the drafter."""

    def make(ways, **more):
        drafter = Drafter(ways)
        return Bench(tiny, drafter=drafter, **more), drafter

    yield make
    tiny.tap([])


def serial(tiny, prompt, sampling, streams=1):
    return Bench(tiny, budget=0).run(prompt, replace(sampling, draft="off"), streams)


@WAYS
@pytest.mark.parametrize(
    "draft, ways", [("tree", ("right",)), ("block", ("right",)), ("on", GOOD), ("tree", BAD), ("block", GOOD + BAD)]
)
def test_drafted_is_serial(tiny, drafted, sampling, draft, ways):
    bench, drafter = drafted(ways)
    for rows in (3, 90):
        prompt, asked = text_prompt(ids(rows)), replace(LONG, temperature=sampling.temperature, draft=draft)
        plain = serial(tiny, prompt, asked, 3)
        drafter.known += [prompt.ids + s.token_ids for s in plain.streams]
        run = bench.run(prompt, asked, 3)
        assert [s.token_ids for s in run.streams] == [s.token_ids for s in plain.streams]
        sources = run.stats["draft_source"]
        if ways == ("right",):
            assert run.stats["tokens_per_round"] > 3 and sources[draft if draft == "block" else "tree"] > 5
    assert drafter.width == 2 * tiny.config.text.hidden


def test_the_record_of_a_round_is_its_tree(drafted, tiny):
    bench, drafter = drafted(["near"])
    prompt, asked = text_prompt(ids(60)), replace(LONG, draft="tree")
    drafter.known.append(prompt.ids + serial(tiny, prompt, asked).streams[0].token_ids)
    stream = bench.run(prompt, asked).streams[0]
    made = [token.made for token in stream.tokens]
    assert made.count("draft") == sum(r.accepted for r in stream.rounds)
    for r in stream.rounds:
        if not r.nodes:
            continue
        assert r.draft_source == "tree" and len(r.nodes) <= NODES and r.cut == 0 and r.committed == r.accepted + 1
        assert all(n.parent <= i and n.chance <= (r.nodes[n.parent - 1].chance if n.parent else 1)
                   for i, n in enumerate(r.nodes))  # fmt: skip
        taken, row = [i for i, n in enumerate(r.nodes, 1) if n.accepted], 0
        for i in taken:  # a path from the pending token on
            assert r.nodes[i - 1].parent == row
            row = i
        assert r.draft_ms > 0 and r.verify_ms > 0 and r.commit_ms > 0 and r.serial_ms is r.planned_ms is None
    assert any(n.parent != i for r in stream.rounds for i, n in enumerate(r.nodes))


def test_all_streams_draft_in_one_batch_and_never_past_the_reply(drafted):
    bench, drafter = drafted(["noise"])
    places = []
    lattice = drafter.lattice
    drafter.lattice = lambda ask, way: places.append(ask.places) or lattice(ask, way)
    runs = [bench.submit(text_prompt(ids(20 + i)), replace(LONG, max_tokens=4, draft="tree"), 2) for i in range(3)]
    bench.drain()
    assert all(run.status == "done" for run in runs)
    assert drafter.batches[0] == 6 and set(places) <= {1, 2} and max(r.depth for r in runs[0].streams[0].rounds) <= 2


def test_first_tokens_go_out_before_the_drafter_reads_the_prompt(drafted):
    bench, drafter = drafted(["right"])
    order, take, extend = [], bench.engine.sink, drafter.extend
    bench.engine.sink = lambda event: (isinstance(event, protocol.First) and order.append("first")) or take(event)
    drafter.extend = lambda *args: order.append("read") or extend(*args)
    for seed in range(2):
        bench.submit(text_prompt(ids(300, seed)), replace(LONG, draft="tree"), 2)
    while not any(run.streams[0].tokens for run in bench.runs.values()):
        bench.engine.step()
    assert order[:3] == ["first", "first", "read"]


@WAYS
def test_a_context_holds_the_rows_that_were_computed_and_no_others(tiny, drafted, sampling):
    """Whatever was drafted, the rows read are those of a reply without drafts; a fork has its own."""
    prompt, asked = text_prompt(ids(130)), replace(LONG, temperature=sampling.temperature, draft="tree")
    plain, read = serial(tiny, prompt, asked, 3), {}
    for ways in (("none",), GOOD, BAD):
        bench, drafter = drafted(ways)
        drafter.known += [prompt.ids + s.token_ids for s in plain.streams]
        run, contexts = bench.submit(prompt, asked, 3), {}
        while not run.finished:
            bench.engine.step()
            streams = [s for job in bench.engine.schedule.running for s in job.streams]
            contexts |= {s.index: s.guesses.context for s in streams if s.guesses.context is not None}
        assert len(contexts) == 3
        for i, context in contexts.items():
            assert context.start == 0 and context.end > 130
            read.setdefault(i, []).append(context.rows)
    for rows in read.values():
        n = min(map(len, rows))
        assert n > 135 and all(torch.equal(other[:n], rows[0][:n]) for other in rows[1:])


def test_a_resumed_stream_drafts_from_the_rows_it_has(tiny, drafted):
    bench, drafter = drafted(["right"])
    prompt, asked = text_prompt(ids(200)), replace(LONG, draft="tree")
    drafter.known.append(prompt.ids + serial(tiny, prompt, asked).streams[0].token_ids)
    cold, warm = bench.run(prompt, asked), bench.run(prompt, asked)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 192) and [c.start for c in drafter.contexts] == [0, 192]
    assert warm.streams[0].token_ids == cold.streams[0].token_ids and warm.stats["accepted"] > 15


@pytest.mark.parametrize("way", BROKEN)
def test_a_drafter_that_fails_costs_its_streams_their_drafts_and_nothing_else(tiny, drafted, way, capfd):
    bench, drafter = drafted([way])
    prompt, asked = text_prompt(ids(60)), replace(LONG, draft="tree")
    plain = serial(tiny, prompt, asked, 3)
    run = bench.run(prompt, asked, 3)
    assert run.status == "done" and [s.token_ids for s in run.streams] == [s.token_ids for s in plain.streams]
    assert run.stats["drafted"] == 0 and drafter.batches == [3]
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "the drafter failed" in said[0]
    drafter.ways, drafter.known = ["right"], [prompt.ids + plain.streams[0].token_ids]
    assert bench.run(prompt, asked).stats["accepted"] > 15


@pytest.mark.parametrize("part", ["context", "extend"])
def test_a_drafter_that_cannot_read_a_prompt_costs_it_its_drafts(tiny, drafted, part, capfd):
    bench, drafter = drafted(["right"])
    setattr(drafter, part, lambda *_: 1 / 0)
    run = bench.run(text_prompt(ids(60)), replace(LONG, draft="on"), 2)
    assert run.status == "done" and not drafter.batches and capfd.readouterr().err.count("the drafter failed") == 1


def test_a_request_that_drafts_otherwise_asks_no_drafter(drafted):
    bench, drafter = drafted(["right"])
    for draft in ("off", "copy"):
        bench.run(text_prompt(ids(60)), replace(LONG, draft=draft))
    assert not drafter.batches and not drafter.contexts


def test_copies_replace_the_drafter_where_the_context_repeats(tiny, drafted, oracle):
    prompt = text_prompt(ids(60))
    plain = serial(tiny, prompt, LONG)
    oracle.append(prompt.ids + plain.streams[0].token_ids[:20])
    bench, drafter = drafted(["right"])
    drafter.known.append(prompt.ids + plain.streams[0].token_ids)
    run = bench.run(prompt, LONG)
    assert run.streams[0].token_ids == plain.streams[0].token_ids
    sources = [r.draft_source for r in run.streams[0].rounds]
    assert sources[0] == "copy" and "tree" in sources and set(sources[sources.index("tree") :]) <= {"tree", "none"}


DEAR = Fixed({1: {1: 20.0, 16: 170.0}, 16: {16: 160.0, 64: 640.0}})
"""A row more takes half of a round."""


@pytest.mark.parametrize("streams", [1, 4])
def test_drafts_that_do_not_pay_are_cut_and_then_not_made(tiny, drafted, clock, streams):
    bench, drafter = drafted(["noise"], curve=DEAR)
    clock.slow(drafter, 0.01)
    prompt, asked = text_prompt(ids(60)), replace(LONG, max_tokens=60, draft="tree")
    plain = serial(tiny, prompt, asked, streams)
    run = bench.run(prompt, asked, streams)
    assert [s.token_ids for s in run.streams] == [s.token_ids for s in plain.streams]
    rounds = [r for s in run.streams for r in s.rounds]
    assert len(drafter.batches) < 59 / 2 and sum(r.cut for r in rounds) > 20 and run.stats["drafted"] < 100
    assert all(r.planned_ms >= r.serial_ms > 0 for r in rounds)
    drafter.batches.clear()
    bench.run(prompt, replace(asked, max_tokens=15), streams)  # the next run's streams begin within a pause
    assert len(drafter.batches) <= 4


def test_drafts_that_pay_are_kept(tiny, drafted, clock):
    bench, drafter = drafted(["right"], curve=DEAR)
    clock.slow(drafter, 0.001)
    prompt, asked = text_prompt(ids(60)), replace(LONG, max_tokens=60, draft="block")
    plain = serial(tiny, prompt, asked)
    drafter.known.append(prompt.ids + plain.streams[0].token_ids)
    monkey = drafter.lattice
    drafter.lattice = lambda ask, way: monkey(ask, way)._replace(edges=sure(ask.places))
    run = bench.run(prompt, asked)
    assert run.streams[0].token_ids == plain.streams[0].token_ids
    assert run.stats["tokens_per_round"] > 4 and len(drafter.batches) == len(run.streams[0].rounds)


def test_chances_come_to_be_honest(tiny, drafted):
    """A drafter that is as sure as can be of guesses that are often wrong is soon believed as much as it deserves."""
    bench, drafter = drafted(["near", "late", "noise"])
    drafter.lattice = lambda ask, way, make=drafter.lattice: (
        (lattice := make(ask, way))._replace(edges=sure(len(lattice.ids)))
    )
    asked, promised, came = replace(LONG, max_tokens=60, draft="block"), [], []
    for seed in range(3):
        prompt = text_prompt(ids(40, seed))
        drafter.known += [prompt.ids + s.token_ids for s in serial(tiny, prompt, asked).streams]
        rounds = [r for r in bench.run(prompt, asked).streams[0].rounds if r.nodes]
        promised.append(sum(r.expected - 1 for r in rounds) / len(rounds))
        came.append(sum(r.accepted for r in rounds) / len(rounds))
    assert promised[0] > 1.15 * came[0] and promised[2] == pytest.approx(came[2], rel=0.4)


def sure(places):
    """Edges that leave no doubt about the first candidates."""
    edges = np.zeros((places, K, K), np.float32)
    edges[..., 0] = 50
    return edges


def test_the_memory_of_contexts_is_admitted(tiny, drafted):
    need = tiny.state_bytes(100 + 24)
    bench, _ = drafted(["none"], memory=2 * need)
    runs = [bench.submit(text_prompt(ids(100, s))) for s in range(2)]
    bench.engine.step()
    assert [run.status for run in runs] == ["decoding", "queued"]
    bench.drain()


def test_held_taps_are_bounded_and_begin_anew_after_a_gap(monkeypatch):
    monkeypatch.setattr("tfmagic.engine.drafting.drafting.HELD", 100)
    taps = Taps(64)
    for start in range(64, 264, 40):
        taps.add(torch.full((40, 2), start), start)
    assert (taps.start, taps.rows) == (144, 120)
    assert [(start, len(rows), int(rows[0, 0])) for rows, start in taps.take()] == [(s, 40, s) for s in (144, 184, 224)]
    assert taps.rows == 0 and taps.take() == []
    taps.add(torch.zeros(3, 2), 264)
    taps.add(torch.zeros(2, 2), 400)
    assert [(start, len(rows)) for rows, start in taps.take()] == [(400, 2)]
