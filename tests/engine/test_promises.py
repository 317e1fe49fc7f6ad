"""Drafted = serial, concurrent = solo, resumed = cold: token for token, greedy and seeded, and state for state."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tfmagic import protocol
from tfmagic.engine.cache.store import last_mark
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model
from tfmagic.engine.scheduler import STREAMS
from tfmagic.engine.stream import Request
from tfmagic.run import Run, Stream

from .conftest import GREEDY, SEEDED, Bench, picture_prompt, text_prompt
from .test_loop import ids

WAYS = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])


def serial(sampling):
    return replace(sampling, draft="off")


def same_states(a: Bench, b: Bench) -> None:
    """Every state that both keep is the same, tensor for tensor; and they have some in common."""
    shared = a.kept.keys() & b.kept.keys()
    assert shared
    for key in shared:
        left, right = a.kept[key].tensors, b.kept[key].tensors
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@WAYS
def test_drafted_is_serial(tiny, oracle, sampling):
    bench = Bench(tiny)
    for rows in (3, 64, 90, 200):
        prompt, sampling = text_prompt(ids(rows)), replace(sampling, max_tokens=50, stop_ids=frozenset())
        plain = bench.run(prompt, serial(sampling), streams=3)
        oracle.extend(prompt.ids + s.token_ids for s in plain.streams)
        drafted = bench.run(prompt, sampling, streams=3)
        assert drafted.stats["accepted"] > 40
        assert [s.token_ids for s in drafted.streams] == [s.token_ids for s in plain.streams]


@WAYS
@pytest.mark.parametrize("order", range(4))
def test_concurrent_is_solo(tiny, oracle, sampling, order):
    rng = random.Random(order)
    lengths = [1, 40, 63, 64, 65, 130, 600][: 4 + order]
    prompts = [text_prompt(ids(n, seed=n)) for n in lengths]
    solo = [Bench(tiny).run(p, serial(sampling), streams=2) for p in prompts]
    oracle.extend(p.ids + s.token_ids for p, run in zip(prompts, solo) for s in run.streams)
    bench, runs = Bench(tiny), {}
    for i in rng.sample(range(len(prompts)), len(prompts)):
        runs[i] = bench.submit(prompts[i], sampling if rng.random() < 0.6 else serial(sampling), streams=2)
        for _ in range(rng.randrange(4)):
            bench.engine.step()
    bench.drain()
    for i, expected in enumerate(solo):
        assert [s.token_ids for s in runs[i].streams] == [s.token_ids for s in expected.streams], lengths[i]


def test_a_full_house_is_sixteen_alone(tiny):
    bench = Bench(tiny)
    runs = [bench.submit(text_prompt(ids(20 + i, i)), replace(SEEDED, seed=i)) for i in range(STREAMS)]
    bench.drain()
    for i in range(0, STREAMS, 5):
        alone = Bench(tiny).run(text_prompt(ids(20 + i, i)), replace(SEEDED, seed=i))
        assert runs[i].streams[0].token_ids == alone.streams[0].token_ids


@WAYS
@pytest.mark.parametrize("kept", [64, 65, 127, 128, 129, 191, 192, 193, 320])
def test_resumed_is_cold(tiny, sampling, kept):
    whole = ids(kept, kept) + ids(70, 1)
    warm, cold = Bench(tiny), Bench(tiny)
    warm.run(text_prompt(whole[:kept]), sampling)
    for prompt in (text_prompt(whole[:kept]), text_prompt(whole), text_prompt(whole)):
        resumed = warm.run(prompt, sampling)
        assert resumed.cached_tokens >= last_mark(kept, 64)
        assert resumed.streams[0].token_ids == cold.run(prompt, serial(sampling)).streams[0].token_ids
        cold.engine.store.clear()
    cold.run(text_prompt(whole))
    same_states(warm, cold)


def test_a_conversation_resumed_turn_by_turn_is_cold_at_every_turn(tiny, pictures):
    warm, parts = Bench(tiny), [ids(30), pictures[0]]
    for turn in range(4):
        parts = [*parts, ids(40, turn)] + ([pictures[1]] if turn == 1 else [])
        prompt, cold = picture_prompt(tiny, parts), Bench(tiny)
        a, b = warm.run(prompt, SEEDED), cold.run(prompt, SEEDED)
        assert a.streams[0].token_ids == b.streams[0].token_ids and b.cached_tokens == 0
        assert (a.cached_tokens > 0) == (turn > 0) and a.images_kept == (0, 1, 1, 2)[turn]
        same_states(warm, cold)
        parts = [*parts, a.streams[0].token_ids]


def test_states_kept_on_the_way_through_slices_are_those_of_other_slices(tiny, monkeypatch):
    prompt, benches = text_prompt(ids(900), marks=[100, 640]), []
    for rows in (64, 192, 512, 4096):
        monkeypatch.setattr("tfmagic.engine.scheduler.SLICE", rows)
        benches.append(Bench(tiny))
        benches[-1].run(prompt)
        assert {len(key) for key in benches[-1].kept} == {64, 640, 896}
    for other in benches[1:]:
        same_states(benches[0], other)


@pytest.fixture(scope="module")
def opened():
    """Every guess is verified, whatever rounds take here."""
    opened = open_model(None, "cpu", Settings(), lambda event: None)
    opened.engine.drafting.curve = None
    return opened


def shipped_prompt(opened, text):
    return opened.prepare([protocol.Message("user", [protocol.Text(text)])], {})


def shipped_runs(opened, asks):
    """Runs of (text, params, streams), all submitted at once, with the embedded model."""
    events, runs = [], {}
    opened.engine.sink = events.append
    for i, (text, params, streams) in enumerate(asks):
        prompt = shipped_prompt(opened, text)
        runs[str(i)] = Run(str(i), 0.0, streams=[Stream() for _ in range(streams)])
        sampling = opened.sampling(protocol.Params(**params), prompt)
        opened.engine.submit(Request(str(i), prompt, sampling, streams, 0.0, 0.0, opened.text.detokenizer))
    while opened.engine.step():
        pass
    for event in events:
        runs[event.run].apply(event)
    assert all(run.status == "done" for run in runs.values())
    return list(runs.values())


REPEAT = "Repeat: the red fox runs over the green hill, the red fox runs over the green hill, the red fox runs home"
STORY = "Tell me a story about a girl and a cat."


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_the_embedded_model_keeps_the_promises(opened, heat):
    base = {"temperature": heat, "seed": 5, "max_tokens": 40}
    texts = [REPEAT, STORY, "What is 12 + 7?"]
    solo = [shipped_runs(opened, [(text, base | {"draft": "off"}, 2)])[0] for text in texts]
    together = shipped_runs(opened, [(text, base | {"draft": "copy"}, 2) for text in texts])
    for a, b in zip(solo, together):
        assert [s.token_ids for s in a.streams] == [s.token_ids for s in b.streams]
        assert [s.text for s in a.streams] == [s.text for s in b.streams] and a.text


def test_the_embedded_model_copies(opened):
    stats = shipped_runs(opened, [(REPEAT, {"temperature": 0.0}, 1)])[0].stats
    assert stats["accepted"] >= 5 and stats["draft_source"]["copy"] >= 1 and stats["tokens_per_round"] > 1.2


def test_a_cold_run_neither_reads_nor_feeds_the_cache(tiny):
    bench, prompt = Bench(tiny), text_prompt(ids(200))
    assert bench.run(prompt, cache=False).cached_tokens == 0 and not bench.kept
    warm = bench.run(prompt), bench.run(prompt)
    held, counts = dict(bench.kept), replace(bench.engine.store.counts)
    cold = bench.run(prompt, cache=False)
    assert (cold.cached_tokens, warm[1].cached_tokens) == (0, 192)
    assert bench.kept == held and bench.engine.store.counts == counts
    assert cold.streams[0].token_ids == warm[1].streams[0].token_ids


PROCESS = """
import sys
sys.path.insert(0, {root!r})
from tests.engine.test_promises import STORY, REPEAT, shipped_runs, open_model, Settings
import hashlib, torch
torch.set_num_threads({threads})
opened = open_model(None, "cpu", Settings(), lambda event: None)
seeded = {{"temperature": 0.7, "seed": 1, "max_tokens": 24}}
runs = shipped_runs(opened, [(REPEAT, seeded, 2), (STORY, {{"max_tokens": 24}}, 1)])
states = hashlib.sha256()
for kept in sorted(opened.engine.store._kept.values(), key=lambda k: k.key):
    for name in sorted(kept.tensors):
        states.update(name.encode() + kept.tensors[name].numpy().tobytes())
print([run.stats["token_sha"] for run in runs], states.hexdigest())
"""


@pytest.mark.timeout(1200)
def test_fresh_processes_agree_whatever_their_threads(tmp_path):
    root = str(Path(__file__).parents[2])
    said = set()
    for threads in (1, 2):
        env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        source = PROCESS.format(root=root, threads=threads)
        done = subprocess.run(
            [sys.executable, "-c", source], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        said.add(done.stdout.strip())
    assert len(said) == 1 and len(said.pop()) > 80
