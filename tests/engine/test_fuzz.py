"""Random schedules: whatever arrives when, is cut where, drafted, resumed, cancelled or evicted, a stream says what it
says alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from .conftest import GREEDY, SEEDED, Bench, picture_prompt, text_prompt
from .test_loop import ids


class World:
    """Prompts that share beginnings, and each one's replies alone, serial and cold."""

    def __init__(self, model, pictures):
        self.model, self.alone = model, {}
        trunk, one, two = ids(330), *pictures
        cuts = [1, 2, 63, 64, 65, 100, 128, 129, 200, 330]
        self.prompts = [text_prompt(trunk[:n]) for n in cuts]
        self.prompts += [text_prompt(trunk[:n] + ids(40, n), marks=[n]) for n in (64, 90, 200)]
        self.prompts += [picture_prompt(model, parts) for parts in (
            [trunk[:58], one, trunk[:20]], [trunk[:58], two, trunk[:20]], [trunk[:20], one, trunk[:60], two, trunk[:5]],
        )]  # fmt: skip

    def reply(self, number: int, sampling) -> list[int]:
        plain = replace(sampling, draft="off", max_tokens=40, stop=[])
        key = (number, plain.temperature, plain.seed)
        if key not in self.alone:
            self.alone[key] = Bench(self.model, budget=0).run(self.prompts[number], plain).streams[0].token_ids
        return self.alone[key]


@pytest.fixture(scope="module")
def world(tiny, pictures):
    return World(tiny, pictures)


def play(world: World, known: list, monkeypatch, seed: int) -> tuple[int, int, int]:
    """One schedule; returns accepted drafts, cached rows and cancelled runs."""
    rng = random.Random(seed)
    monkeypatch.setattr("tfmagic.engine.scheduler.SLICE", 64 * rng.choice([1, 2, 3, 8]))
    monkeypatch.setattr("tfmagic.engine.scheduler.SLICE_BESIDE", 64 * rng.choice([1, 2, 4]))
    bench, asked, cancelled = Bench(world.model, budget=rng.choice([0, 300_000, 1 << 30])), [], set()
    for _ in range(rng.randint(2, 7)):
        number, streams = rng.randrange(len(world.prompts)), rng.choice([1, 1, 1, 2, 4])
        sampling = replace(rng.choice([GREEDY, SEEDED]), seed=rng.randrange(3), max_tokens=rng.choice([1, 2, 17, 40]))
        sampling = replace(sampling, draft=rng.choice(["on", "copy", "off"]))
        expected = [world.reply(number, replace(sampling, seed=sampling.seed + i)) for i in range(streams)]
        known.extend(world.prompts[number].ids + reply for reply in expected)
        run = bench.submit(world.prompts[number], sampling, streams)
        asked.append((run, sampling, expected))
        for _ in range(rng.choice([0, 0, 1, 3, 9])):
            bench.engine.step()
        if rng.random() < 0.2:
            victim = rng.choice(asked)[0]
            if not victim.finished:
                cancelled.add(victim.id)
            bench.engine.cancel(victim.id)
    bench.drain()
    for run, sampling, expected in asked:
        assert run.status == ("stopped" if run.id in cancelled else "done"), (seed, run.error)
        for stream, reply in zip(run.streams, expected):
            said = stream.token_ids
            whole = reply[: sampling.max_tokens]
            assert said == (whole[: len(said)] if run.id in cancelled else whole), (seed, run.id)
    store = bench.engine.store
    assert store.bytes <= store.budget and store.bytes == sum(k.bytes for k in store._kept.values())
    accepted = sum(run.stats["accepted"] for run, _, _ in asked)
    return accepted, sum(run.cached_tokens or 0 for run, _, _ in asked), len(cancelled)


def many(world, known, monkeypatch, seeds) -> None:
    outcomes = [play(world, known, monkeypatch, seed) for seed in seeds]
    assert all(sum(column) > 0 for column in zip(*outcomes)), "the schedules must draft, resume and cancel"


def test_schedules(world, oracle, monkeypatch):
    many(world, oracle, monkeypatch, range(10))


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(6))
def test_many_schedules(world, oracle, monkeypatch, batch):
    many(world, oracle, monkeypatch, range(1000 + 40 * batch, 1040 + 40 * batch))
