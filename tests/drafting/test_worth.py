"""Drafting is never much slower than going without, and loses little of what it can gain: on imagined devices, whose
clock is told, with a drafter that is right as often as it is told and sure of itself regardless."""

from __future__ import annotations

import random
from itertools import product
from statistics import mean
from types import SimpleNamespace

import numpy as np
import pytest

from tfmagic.engine.drafting.budget import AT_LEAST, LATELY, SURE, Curve, Worth, share
from tfmagic.engine.drafting.draft import NOTHING, Draft, Walk
from tfmagic.engine.drafting.drafting import Drafting, Guesses, Taps

RATES = (0.0, 0.5, 0.8, 0.95)


class Padded:
    """A GPU, after one H200 and a model of 9B: a round computes as many rows of every stream."""

    windows, block = (1, 2, 4, 8, 16), 16

    @staticmethod
    def round(streams: int, rows: int) -> float:
        """Milliseconds; `rows` of all streams together, as they are computed."""
        serial = float(np.interp(streams, [1, 4, 16], [5.9, 6.3, 6.9]))
        return serial + 0.03 * (min(max(rows, 16), 64) - 16) + 0.045 * (max(rows, 64) - 64)

    @staticmethod
    def drafts(asked: int) -> float:
        return float(np.interp(asked, [1, 4, 16], [1.3, 1.6, 2.2]))


class Large:
    """The same with a model of 27B, whose rounds are long and its drafts a sixth of one."""

    windows, block = (1, 2, 4, 8, 16), 8

    @staticmethod
    def round(streams: int, rows: int) -> float:
        serial = float(np.interp(streams, [1, 4, 16], [13.7, 14.1, 15.2]))
        return serial + 0.3 * (rows > streams) + 0.02 * (min(max(rows, 16), 64) - 16) + 0.06 * (max(rows, 64) - 64)

    @staticmethod
    def drafts(asked: int) -> float:
        return float(np.interp(asked, [1, 4, 16], [2.3, 2.84, 4.5]))


class Summed:
    """A CPU with a small model: every row takes its time."""

    windows, block = (), 8

    @staticmethod
    def round(streams: int, rows: int) -> float:
        return 4.0 + 1.5 * streams + 1.6 * (rows - streams)

    @staticmethod
    def drafts(asked: int) -> float:
        return 3.5 + 3.0 * asked


class World:
    """Streams that decode on a device; the drafter's clock and the drafter in one."""

    name = "imagined"

    def __init__(self, device, seed: int = 0, noise: float = 0.0):
        """`noise`: a round's time is off by about so much of it."""
        self.device, self.block, self.noise, self.now = device, device.block, noise, 0.0
        self.rng, self.right = random.Random(seed), 0.0
        self.drafting = Drafting(self, Curve.timed(self.round, device.windows))

    def perf_counter(self) -> float:
        return self.now / 1e3

    def round(self, streams: int, rows: int) -> float:
        return self.device.round(streams, rows) * (1 + self.noise * abs(self.rng.gauss(0, 1)))

    def context(self):
        return self

    fork = context

    def extend(self, *_) -> None:
        pass

    def lattices(self, asks) -> list:
        self.now += self.device.drafts(len(asks))
        return [SimpleNamespace(ids=np.zeros(ask.places)) for ask in asks]

    def draft(self, lattice, _) -> Draft:
        n, chance = len(lattice.ids), self.rng.uniform(0.5, 0.9)
        return Draft([0] * n, list(range(n)), [chance**depth for depth in range(1, n + 1)], "block")

    def stream(self, tokens: int):
        sampling = SimpleNamespace(draft="block", greedy=True, size=1)
        stream = SimpleNamespace(ids=[0], sampling=sampling, room=tokens, guesses=Guesses([0], "block"), draws=int)
        stream.guesses.make = self.draft
        return stream

    def run(self, streams: int, tokens: int, right: float) -> float:
        """Times serial: how fast so many streams are that say so many tokens each."""
        self.right, began, serial = right, self.now, 0.0
        taps, going = Taps(), [self.stream(tokens) for _ in range(streams)]
        taps.add(np.zeros((4, 1)), 0)
        self.drafting.begin(going, taps, streams)
        while going:
            proposal = self.drafting.propose(going)
            kept = [len(draft.ids) for draft in proposal.kept]
            longest = next((w for w in self.device.windows if w > max(kept)), 0)
            ms = self.round(len(going), longest * len(going) or len(going) + sum(kept))
            self.now += ms
            walks = [self.walk(n) for n in kept]
            self.drafting.learn(going, proposal, walks, ms)
            serial += sum(len(walk.rows) for walk in walks) / len(going) * self.round(len(going), len(going))
            for stream, walk in zip(going, walks):
                stream.room -= len(walk.rows)
            going = [stream for stream in going if stream.room > 0]
        return serial / (self.now - began)

    def walk(self, guesses: int) -> Walk:
        rows = [0]
        while len(rows) <= guesses and self.rng.random() < self.right:
            rows.append(len(rows))
        return Walk(rows, [0] * len(rows))


def oracle(device, streams: int, right: float) -> float:
    """Times serial of one who knows the rate: the best window for all, or none."""
    serial, rates = device.round(streams, streams), [1.0]
    for rows in device.windows[1:] or range(2, device.block + 1):
        tokens = sum(right**depth for depth in range(min(rows, device.block)))
        rates.append(tokens * serial / (device.round(streams, streams * rows) + device.drafts(streams)))
    return max(rates)


DEVICES = pytest.mark.parametrize(("device", "streams"), list(product((Padded, Summed), (1, 4, 16))))
SEEDS = range(3)


@pytest.fixture
def world(monkeypatch):
    """Makes worlds, whose clock then tells what drafts take."""

    def world(*args, **more) -> World:
        made = World(*args, **more)
        monkeypatch.setattr("tfmagic.engine.drafting.drafting.time", made)
        return made

    return world


@DEVICES
@pytest.mark.parametrize("right", RATES)
def test_drafting_is_never_much_slower_and_gains_what_can_be_gained(world, device, streams, right):
    best = oracle(device, streams, right)
    short = [world(device, seed).run(streams, 128, right) for seed in SEEDS]
    assert min(short) > 0.97 and mean(short) > 0.8 * best
    long = world(device).run(streams, 1000, right)
    assert long > 0.98 and long > 0.9 * best


@DEVICES
@pytest.mark.parametrize("right", [0.8, 0.95])
def test_drafts_that_turn_bad_cost_little_and_those_that_turn_good_are_found(world, device, streams, right):
    turning = world(device)
    turning.run(streams, 128, right)
    assert turning.run(streams, 128, 0.0) > 0.97
    assert turning.run(streams, 1000, right) > 0.7 * oracle(device, streams, right)


@pytest.mark.parametrize("streams", [1, 4, 16])
def test_short_replies_lose_little_by_dear_drafts_and_soon_gain_by_good_ones(world, streams):
    best = oracle(Large, streams, 0.5)
    assert world(Large).run(streams, 64, 0.0) > 0.98
    assert world(Large).run(streams, 128, 0.0) > 0.985
    assert mean(world(Large, seed).run(streams, 128, 0.5) for seed in range(8)) > 0.9 * best
    turning = world(Large)
    assert turning.run(streams, 512, 0.0) > 0.99
    assert turning.run(streams, 256, 0.8) > 0.6 * oracle(Large, streams, 0.8)


def test_a_few_dear_drafts_prove_less_than_many_cheap_ones():
    made = {}
    for loss in (0.1, 0.4, 0.7):
        worth, made[loss] = Worth(), 0
        while not worth.paused:
            made[loss] += 1
            worth.learn(-loss, 1)
    assert made == {0.1: 11, 0.4: SURE, 0.7: 3}  # a round is lost, or with fewer than SURE a round and a half
    together = Worth()
    together.learn(-1.1, SURE)
    assert together.paused


def test_a_device_that_is_not_steady(world):
    for device, streams in ((Padded, 1), (Padded, 16), (Summed, 16)):
        assert world(device, noise=0.04).run(streams, 1000, 0.0) > 0.98
    assert world(Padded, noise=0.04).run(16, 300, 0.8) > 0.85 * oracle(Padded, 16, 0.8)


def chain(*chances: float) -> Draft:
    return Draft([0] * len(chances), list(range(len(chances))), list(chances), "block")


def curve_of(device) -> Curve:
    return Curve.timed(device.round, device.windows)


def test_a_window_of_one_stream_is_a_window_of_all():
    curve = curve_of(Padded)
    assert [curve.rows(kept) for kept in ([0, 0], [1, 0], [0, 2, 3], [8])] == [2, 4, 12, 16]
    assert curve_of(Summed).rows([0, 2, 3]) == 8
    for streams, rows in product((1, 16), Padded.windows):  # exact where it was timed
        takes = curve.serial(streams) + curve.extra(streams, np.array([streams * (rows - 1)]))[0]
        assert takes == pytest.approx(Padded.round(streams, streams * rows), rel=0.04)


def test_guesses_that_fit_into_the_window_are_free_and_one_stream_alone_does_not_widen_it():
    curve, sure = curve_of(Padded), chain(*[0.9**n for n in range(1, 16)])
    doubtful = chain(*[0.3**n for n in range(1, 16)])
    assert share([sure], curve).kept == [15] and share([chain(1e-3, 1e-4, 1e-5)], curve).kept == [0]
    assert share([sure] * 8 + [doubtful] * 8, curve, 2.2).kept == [7] * 16
    lone = share([sure, chain(0.6), *[NOTHING] * 14], curve)
    assert lone.kept == [1, 1] + [0] * 14
    assert lone.planned_ms == pytest.approx(Padded.round(16, 32), rel=0.01)


def test_every_window_is_corrected_by_its_own_rounds():
    curve = curve_of(Padded)
    usual = curve.extra(16, np.array([16, 48]))
    for _ in range(AT_LEAST):
        curve.learn(16, 64, curve.serial(16) + 3 * usual[1])
    assert curve.extra(16, np.array([16, 48])) == pytest.approx([usual[0], 3 * usual[1]])


@pytest.mark.parametrize("device", [Padded, Summed])
def test_what_seemed_slow_is_tried_again(device):
    curve = curve_of(device)
    before = curve.extra(16, np.array([48]))[0]
    for _ in range(AT_LEAST):
        curve.learn(16, 64, 500.0)
    assert curve.extra(16, np.array([48]))[0] > 4 * before
    for _ in range(LATELY):
        curve.learn(16, 16, device.round(16, 16))
    assert curve.extra(16, np.array([48]))[0] == pytest.approx(before)


def test_all_streams_are_asked_in_the_same_rounds(world):
    """Those that begin within a pause too."""
    here = world(Padded)
    asked, make = [], here.lattices
    here.lattices = lambda asks: asked.append(len(asks)) or make(asks)
    here.run(8, 300, 0.0)
    first = len(asked)
    here.run(8, 300, 0.0)
    assert 2 <= first < 30 and len(asked) - first < 20 and set(asked) == {8}
