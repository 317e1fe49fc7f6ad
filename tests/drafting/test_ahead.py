"""Rounds that draft for themselves, begun before the host knows what the last one gave: their drafts are those that the
host would have had made afterwards."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import replace

import pytest
import torch

from tfmagic.engine import families
from tfmagic.engine.cache.store import Store
from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.drafting.static import CONTEXTS
from tfmagic.engine.families.qwen3_5.gpu.rounds import BUCKETS
from tfmagic.engine.loop import Engine

from ..bench.chosen import Chosen
from ..engine.conftest import GREEDY, SEEDED, Bench, letter, text_prompt
from ..engine.drafters import Fixed
from .conftest import GOLDEN, changed, weights
from .test_engine import DRAFTERS, IDS

PROMPTS = [text_prompt(IDS[:n]) for n in (70, 100, 131)]
WIDE = {"head_dim": 64, "conv_group_size": 16, "intermediate_size": 768}
"""Of the drafter on a GPU, whose kernels take no narrower heads."""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def target(request):
    where = GOLDEN / "qwen3_5_tiny" if request.param == "cpu" else resolve(None)
    return families.load(Checkpoint(where), request.param, form="bf16")


class Noting(Chosen):
    """Keeps what the drafter really gave, by the context it was asked about and the place."""

    def replace(self, f, out) -> None:
        really = out["ids"].clone(), out["logits"].clone()
        super().replace(f, out)
        t, at = self.tables, f["positions"].long().clamp(max=LONG - 1)
        if not hasattr(t, "gave"):
            t.gave = [x.new_zeros(self.MOST, LONG, *x.shape[1:]) for x in really]
            untied = torch.rand(out["logits"].shape[1:], generator=torch.Generator().manual_seed(9))
            t.untied = untied.to(self.device)
        out["logits"] += t.untied  # else many paths would be equally likely
        which = t.alike[f["slots"].long()].int().argmax(1)
        for to, x in zip(t.gave, really):
            to[which, at] = x


LONG = 300


@pytest.fixture
def drafter(write, target):
    """One whose guesses are right more often than not, once it knows the replies."""
    vocab, hidden = target.embedding().shape
    fits = {"hidden_size": hidden, "vocab_size": vocab, "num_target_layers": target.depth}
    c = changed(**DRAFTERS["second"] | fits | (WIDE if target.device.type == "cuda" else {}))
    return Noting(Checkpoint(write(c, weights(c))), target, target.device, GREEDY.size)


def bench(target, drafter=None, curve=None) -> Bench:
    made = Bench(target)
    made.engine = Engine(target, Store(0, target.grain), made.take, letter, drafter=drafter, curve=curve)
    return made


def noted(made: Bench) -> list[int]:
    """Grows with each round that could draft for itself: its streams, 0 where it did not come to that."""
    found, draft = [], made.engine.rounds._draft

    def drafted(flight, drafter, contexts, *told):
        begun = draft(flight, drafter, contexts, *told)
        found.append(len(contexts) if begun is not None else 0)
        return begun

    made.engine.rounds._draft = drafted
    return found


def known(target, drafter, asked) -> list:
    """The replies without drafts, which the drafter then knows."""
    plain = bench(target)
    runs = [plain.run(prompt, replace(sampling, draft="off"), streams) for prompt, sampling, streams in asked]
    drafter.knows([prompt.ids + stream.token_ids for (prompt, *_), run in zip(asked, runs) for stream in run.streams])
    return [[stream.token_ids for stream in run.streams] for run in runs]


def rounds(runs, most: int) -> list:
    """Of every stream, those before its last 16 tokens, where a draft is as long as may be."""
    found = []
    for stream in (stream for run in runs for stream in run.streams):
        ends = itertools.accumulate(r.committed for r in stream.rounds)
        whole = [r for r, end in zip(stream.rounds, ends) if end <= most - 16]
        found.append([(r.draft_source, [(one.piece, one.parent) for one in r.nodes], r.committed) for r in whole])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("draft", ["tree", "block", "on"])
def test_they_are_those_made_afterwards(target, drafter, sampling, draft):
    sampling = replace(sampling, draft=draft, max_tokens=60)
    asked = [(prompt, sampling, streams) for prompt, streams in zip(PROMPTS, (1, 3, 2))]
    expected, told, gave = known(target, drafter, asked), [], []
    for ahead in (True, False):
        drafter.begin(0.7)
        made = bench(target, drafter)
        found = noted(made)
        if not ahead:
            made.engine.rounds._draft = lambda *_: None
        runs = [made.submit(*one) for one in asked]
        made.drain()
        assert [[stream.token_ids for stream in run.streams] for run in runs] == expected
        told.append(rounds(runs, 60))
        gave.append([x.clone() for x in drafter.tables.gave])
        if ahead:
            assert sum(n > 0 for n in found) > (0 if draft == "on" else 3), "but where a stream may copy"
    if draft != "on":  # a copy may have to wait for a round that is under way
        assert told[0] == told[1]
    assert any(r.accepted for run in runs for stream in run.streams for r in stream.rounds)
    # But for the last bits, which may differ with the company, and candidates that are as good as equal.
    both = (gave[0][1] != 0).any(-1).any(-1) & (gave[1][1] != 0).any(-1).any(-1)
    both[:, 0] = False  # of no stream
    assert both.sum() > (5 if draft == "on" else 20)
    (ids, logits), (others, their) = ([x[both] for x in one] for one in gave)
    assert (ids == others).double().mean() > 0.98 and (logits - their).abs().max() < 0.05
    del made
    gc.collect()
    assert len(drafter.free) == CONTEXTS


@pytest.mark.slow
@pytest.mark.parametrize(("last", "rows"), [(5010.0, {8, 16}), (400e3, {2})])
def test_windows_are_as_wide_as_is_worth_it(target, drafter, last, rows):
    asked = [(PROMPTS[0], replace(GREEDY, draft="tree", max_tokens=60), 1)]
    expected = known(target, drafter, asked)
    drafter.begin(0.9)
    curve = Fixed({1: {1: 5e3, 2: 5001.0, 16: last}}, BUCKETS)  # so long that what drafts take here is nothing
    made, widths = bench(target, drafter, curve), []
    draft = made.engine.rounds._draft
    made.engine.rounds._draft = lambda *told: widths.append(told[-1]) or draft(*told)
    run = made.submit(*asked[0])
    made.drain()
    assert [stream.token_ids for stream in run.streams] == expected[0]
    assert len(widths) > 5 and {*widths} <= rows
    assert max(len(r.nodes) for r in run.streams[0].rounds) == max(widths) - 1


@pytest.mark.slow
def test_a_round_that_has_to_be_captured_makes_no_draft_dear(target, drafter, monkeypatch):
    asked = [(PROMPTS[0], replace(GREEDY, draft="tree", max_tokens=60), 2)]
    expected = known(target, drafter, asked)
    drafter.begin(0.9)
    captured = target.graphs.captured
    monkeypatch.setattr(target.graphs, "captured", lambda launch: time.sleep(0.6) or captured(launch))
    made = bench(target, drafter, Fixed({1: {1: 500.0, 16: 501.0}}, BUCKETS))
    run = made.submit(*asked[0])
    made.drain()
    assert [stream.token_ids for stream in run.streams] == expected[0]
    rounds = run.streams[0].rounds
    assert all(r.draft_source == "tree" and r.draft_ms < 500 and r.verify_ms >= 0 for r in rounds[:-1])


def test_streams_come_and_go_meanwhile(target, drafter):
    """Some end, one is stopped, and a prompt comes between."""
    ends = replace(GREEDY, draft="tree")
    asked = [(prompt, ends, 3) for prompt in PROMPTS]
    expected = known(target, drafter, asked)
    drafter.begin(0.6)
    made = bench(target, drafter)
    found = noted(made)
    runs = [made.submit(*asked[0]), made.submit(PROMPTS[1], replace(ends, max_tokens=5), 3)]
    while not found:
        made.engine.step()
    stopped = made.submit(*asked[2])
    made.engine.step()
    made.engine.cancel(stopped.id)
    runs.append(made.submit(*asked[2]))
    made.drain()
    assert [run.status for run in runs] == ["done"] * 3 and stopped.status == "stopped"
    for run, whole, most in zip(runs, expected, (99, 5, 99)):
        assert [stream.token_ids for stream in run.streams] == [ids[:most] for ids in whole]
    del made
    gc.collect()
    assert len(drafter.free) == CONTEXTS, "every context came back"


def test_a_stream_that_has_ended_teaches_nothing(target, drafter):
    plain = replace(SEEDED, draft="tree", max_tokens=60, stop_ids=frozenset())
    ((whole,),) = known(target, drafter, [(PROMPTS[0], plain, 1)])
    drafter.begin(0.7)
    made, seen = bench(target, drafter), []
    learn = made.engine.drafting.learn

    def learnt(streams, proposal, walks, ms):
        seen.extend((stream.finished, i in proposal.asked, bool(walks[i].rows)) for i, stream in enumerate(streams))
        learn(streams, proposal, walks, ms)

    made.engine.drafting.learn = learnt
    ends = [at for at in range(6, 40) if whole[at] not in whole[:at]][:4]
    runs = [made.submit(PROMPTS[0], replace(plain, stop_ids=frozenset({whole[at]}))) for at in ends]
    runs.append(made.submit(PROMPTS[0], plain))
    made.drain()
    assert [run.streams[0].token_ids for run in runs] == [*(whole[: at + 1] for at in ends), whole]
    assert ends and {one for one in seen if one[0]} == {("stop", False, False)}
    assert (None, True, True) in seen


class Failing:
    """A round that never ran."""

    states = ()

    def __call__(self):
        raise RuntimeError("the device is busy elsewhere")


def test_a_round_that_fails_takes_its_drafts_along(target, drafter):
    asked = [(PROMPTS[0], replace(GREEDY, draft="tree", max_tokens=60), 2)]
    expected = known(target, drafter, asked)
    drafter.begin(0.5)
    made = bench(target, drafter)
    found = noted(made)
    really = made.engine.rounds._draft

    def drafted(*told):
        if len(found) != 2:
            return really(*told)
        found.append(-1)
        return Failing()

    made.engine.rounds._draft = drafted
    run = made.submit(*asked[0])
    made.drain()
    assert [stream.token_ids for stream in run.streams] == expected[0]
    assert found[2] == -1 and sum(n > 0 for n in found[3:]) > 2, "they draft again behind it"


def test_a_drafter_that_cannot_begin_costs_no_token(target, drafter, capfd):
    asked = [(PROMPTS[0], replace(GREEDY, draft="tree"), 2)]
    expected = known(target, drafter, asked)
    drafter.begin(0.7)
    for batch in drafter.batches.values():
        batch.take = lambda contexts, round: 1 / 0
    made = bench(target, drafter)
    run = made.submit(*asked[0])
    made.drain()
    assert [stream.token_ids for stream in run.streams] == expected[0]
    assert "the drafter failed, and 2 streams go on without" in capfd.readouterr().err
