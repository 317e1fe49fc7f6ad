"""The row budget: what rounds take, which guesses are worth it, and how far chances can be trusted."""

from __future__ import annotations

import math
import random
from itertools import product

import numpy as np
import pytest

from tfmagic.engine.drafting import budget
from tfmagic.engine.drafting.budget import Calibration, Curve, Worth, gain, share
from tfmagic.engine.drafting.copy import DOUBT, USUAL, Record
from tfmagic.engine.drafting.draft import NOTHING, Draft

CURVE = Curve({1: {1: 10.0, 2: 11.0, 16: 25.0}, 16: {16: 40.0, 64: 88.0}})


def chain_of(chances, source="tree"):
    return Draft(list(range(len(chances))), list(range(len(chances))), list(chances), source)


def test_a_curve_is_linear_between_its_points_and_beyond():
    assert [CURVE.serial(s) for s in (1, 16)] == [10.0, 40.0] and CURVE.serial(6) == pytest.approx(20.0)
    assert CURVE.extra(1, np.array([0, 1, 8, 15, 29])).tolist() == [0, 1, 8, 15, 29]
    assert CURVE.extra(16, np.array([0, 24, 48, 240])).tolist() == [0, 24, 48, 240]


def test_a_curve_is_timed_with_few_rounds_and_never_falls():
    calls = []

    def time_round(streams, rows):
        calls.append((streams, rows))
        return 5 + 3 * streams + 0.5 * rows - (2.0 if rows == 4 else 0)

    curve = Curve.timed(time_round)
    assert len(calls) <= 20 and calls.count((1, 8)) == 3 and calls.count((16, 64)) == 1 and (16, 32) not in calls
    extra = curve.extra(1, np.arange(16))
    assert curve.serial(1) == 8.5 and (np.diff(extra) >= 0).all() and extra[-1] == 7.5
    assert curve.serial(16) == 61 and curve.extra(16, np.array([48]))[0] == pytest.approx(24)
    assert Curve({1: {1: 9.0}}).extra(1, np.array([10]))[0] == pytest.approx(9)
    assert Curve({1: {1: 9.0, 3: 13.0}, 16: {16: 50.0}}).extra(16, np.array([10]))[0] == pytest.approx(20)
    slow = []
    curve = Curve.timed(lambda *what: slow.append(what) or 300.0)  # a busy machine: the start does not wait
    assert len(slow) == 4 and curve.serial(16) == 300 and curve.extra(1, np.array([10]))[0] == pytest.approx(6)
    for _ in range(budget.AT_LEAST):
        curve.learn(16, 16, 900.0)
        curve.learn(16, 26, 1000.0)
    assert curve.serial(16) == pytest.approx(900) and curve.serial(1) == 300


def test_where_every_row_takes_its_time_few_streams_tell_of_many():
    calls, noise = [], iter([0, 40, 0, 0, 90, 0, 0, 0, 70, 0, 0, 60, 0])

    def time_round(streams, rows):
        calls.append((streams, rows))
        return 15 + 2.0 * streams + 3.0 * rows + next(noise)

    curve = Curve.timed(time_round)
    assert max(calls) == (4, 16) and len(calls) < 14
    assert curve.serial(16) == pytest.approx(15 + 5 * 16) and curve.serial(2) == pytest.approx(25)
    assert curve.extra(16, np.array([40]))[0] == pytest.approx(120)


def test_what_rounds_taught_holds_for_about_as_many_streams():
    curve = Curve({1: {1: 10.0, 2: 11.0, 16: 25.0}, 16: {16: 40.0, 64: 88.0}})
    for rows, ms in ((16, 80.0), (26, 110.0)):
        for _ in range(budget.AT_LEAST):
            curve.learn(16, rows, ms)
    assert [curve.serial(s) / CURVE.serial(s) for s in (16, 15, 8, 7, 1)] == pytest.approx([2, 2, 2, 1, 1])
    assert curve.extra(12, np.array([10]))[0] == pytest.approx(30)
    for _ in range(budget.AT_LEAST):
        curve.learn(9, 9, CURVE.serial(9))
    assert [curve.serial(s) / CURVE.serial(s) for s in (16, 15, 8, 7)] == pytest.approx([2, 1, 1, 1])


def test_a_curve_follows_the_rounds_that_are_run():
    curve = Curve({1: {1: 10.0, 2: 11.0, 16: 25.0}})
    for _ in range(budget.AT_LEAST):
        curve.learn(1, 1, 20.0)
    assert curve.serial(1) == pytest.approx(20.0)
    for _ in range(budget.AT_LEAST):
        curve.learn(1, 6, 30.0)
    assert curve.extra(1, np.array([5]))[0] == pytest.approx(10.0)
    for _ in range(2 * budget.RECENT):
        curve.learn(1, 1, 10.0)
        curve.learn(1, 6, 15.0)
    assert curve.serial(1) == pytest.approx(10.0) and curve.extra(1, np.array([5]))[0] == pytest.approx(5.0)
    for _ in range(budget.RECENT):
        curve.learn(1, 6, 1e9)
    assert curve.extra(1, np.array([5]))[0] == pytest.approx(5.0 * budget.WITHIN)


def best_by_trying(drafts, curve, drafting):
    """The rate that the best choice of prefixes reaches."""
    rates = []
    for kept in product(*(range(len(draft.ids) + 1) for draft in drafts)):
        tokens = len(drafts) + sum(sum(d.chances[:n]) for d, n in zip(drafts, kept))
        takes = curve.serial(len(drafts)) + curve.extra(len(drafts), np.array([sum(kept)]))[0]
        rates.append(tokens / (takes + drafting))
    return max(rates)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_expected_tokens_a_millisecond_are_kept(seed):
    rng = random.Random(seed)
    drafts = []
    for _ in range(rng.choice([1, 2, 3])):
        rate, long = rng.random(), rng.randint(0, 7)
        drafts.append(chain_of([rate**depth for depth in range(1, long + 1)]))
    drafting = rng.choice([0.0, 3.0])
    got = share(drafts, CURVE, drafting)
    tokens = len(drafts) + sum(sum(d.chances[:n]) for d, n in zip(drafts, got.kept))
    extra = CURVE.extra(len(drafts), np.array([sum(got.kept)]))[0]
    assert got.planned_ms == pytest.approx(got.serial_ms + extra)
    best = best_by_trying(drafts, CURVE, drafting)
    if best >= len(drafts) / got.serial_ms:  # drafting pays: no choice is faster
        assert tokens / (got.planned_ms + drafting) == pytest.approx(best, rel=1e-6)
    else:  # it does not, and is paid already: no choice gains more on serial rounds
        assert tokens >= len(drafts) * got.planned_ms / got.serial_ms - 1e-9


def test_hopeless_guesses_are_cut_and_sure_ones_stay():
    assert share([chain_of([0.02] * 5), NOTHING], CURVE).kept == [0, 0]
    assert share([chain_of([0.99] * 15)], CURVE).kept == [15]
    assert share([chain_of([0.9, 0.8, 0.01]), chain_of([0.02, 0.9])], CURVE).kept == [2, 0]
    assert share([chain_of([0.01] * 3)], None) == ([3], None, None)


def test_a_calibration_learns_what_is_accepted_and_forgets():
    rng, calibration, own = random.Random(0), Calibration(), [0.8, 0.1, 0.64]
    draft = Draft([1, 2, 3], [0, 0, 1], own, "tree")
    fresh = calibration.corrected(draft).chances
    assert fresh == pytest.approx([budget.DOUBT * 0.8, budget.DOUBT * 0.1, (budget.DOUBT * 0.8) ** 2])
    for _ in range(400):  # in truth 0.4, 0.1 and, behind the first, 0.4
        rows = [0]
        if rng.random() < 0.4:
            rows = [0, 1, 3] if rng.random() < 0.4 else [0, 1]
        elif rng.random() < 1 / 6:
            rows = [0, 2]
        calibration.learn(draft, 3, rows)
    first, second, third = calibration.corrected(draft).chances
    assert 0.3 < first < 0.5 and 0.05 < second < 0.15 and 0.1 < third < 0.25 and isinstance(third, float)
    before = calibration.corrected(draft).chances
    calibration.fade(budget.STALE)
    assert calibration.corrected(draft).chances[2] > before[2]
    for _ in range(6000):
        calibration.learn(draft, 0, [0])
    assert calibration.corrected(draft).chances == pytest.approx(fresh, rel=0.1)
    for _ in range(400):
        calibration.learn(draft, 3, [0, 1, 3] if rng.random() < 0.8 else [0, 2])
    assert calibration.corrected(draft).chances[0] > 0.7


def test_drafts_that_do_not_pay_pause_and_are_tried_again():
    def rounds(worth, value, n, streams=1):
        asked = []
        for _ in range(n):
            asked.append(not worth.rests())
            if asked[-1]:
                worth.learn(value, streams)
        return asked

    assert all(rounds(Worth(), 1.0, 500))
    for loss in (0.05, 0.3, 2.0):
        asked = rounds(Worth(), -loss, 5000)
        first = asked.index(False)
        assert first >= budget.TRIES and budget.LOSS <= loss * first <= max(budget.LOSS, loss) + loss + 0.1
        assert 0 < loss * sum(asked[1000:]) / 4000 < 1.1 * budget.SPEND
    assert rounds(Worth(), -2.0, 9, streams=2).index(False) == 1  # several drafts are not out of luck together
    worth = Worth()
    rounds(worth, -1.0, 300)
    assert sum(rounds(worth, 1.0, 500)) > 100


def test_a_draft_that_was_under_way_when_the_pause_began_makes_it_longer():
    worth = Worth()
    worth.learn(-2.0, 2)
    before = worth.paused
    worth.learn(-0.5, 2)
    assert before > 0 and worth.paused == before + math.ceil(0.5 / budget.SPEND)
    worth.learn(3.0, 2)
    assert worth.paused == before + math.ceil(0.5 / budget.SPEND)


def test_a_window_is_foretold_as_it_is_chosen():
    rng, sizes = random.Random(3), (1, 2, 4, 8, 16)
    for _ in range(200):
        dear = sorted(rng.uniform(1.0, 9.0) for _ in range(4))
        curve = Curve({1: dict(zip((1, 2, 8, 16), dear)), 16: {16: 9.0, 64: 12.0, 256: 30.0}}, sizes)
        chances = [sorted((rng.random() for _ in range(15)), reverse=True) for _ in range(rng.choice([1, 5, 16]))]
        drafts = [chain_of(one) for one in chances]
        gained, ms = budget.by_window(drafts, sizes)[1], rng.uniform(0.1, 3.0)
        size = sizes[budget.window(len(drafts), gained, curve, ms)]
        shared = share(drafts, curve, ms)
        assert shared.kept == [size - 1] * len(drafts)
        again = budget.planned(shared.kept, curve, size * len(drafts))
        assert again.kept == shared.kept and again[1:] == pytest.approx(shared[1:])


def test_what_a_reply_has_gained_is_held_against_its_own_losses_alone():
    for renewed in (False, True):
        worth = Worth()
        for _ in range(50):
            worth.learn(1.0, 1)
        if renewed:
            worth.begin()
        lost = 0
        while not worth.paused:
            worth.learn(-0.5, 1)
            lost += 0.5
        assert lost == budget.LOSS + 0.5 + (budget.START if renewed else budget.CREDIT)
    assert worth.paused == pytest.approx((budget.LOSS + 0.5 - budget.LUCK) / budget.SPEND, abs=1)
    for _ in range(budget.TRIES):
        worth.learn(-1e9, 1)  # the machine slept
    assert worth.paused == budget.LONGEST


def test_the_gain_of_a_draft():
    shared = share([chain_of([0.9, 0.8]), NOTHING], CURVE)
    assert shared.kept == [2, 0]
    rows = shared.planned_ms - shared.serial_ms
    assert gain(2, 2, shared, shared.kept, 1.5) == pytest.approx(2 - 2 * (rows + 1.5) / shared.serial_ms)
    assert gain(0, 0, shared, shared.kept, 0.0) == 0


def test_copies_are_trusted_by_their_record():
    record = Record()
    assert record.chance == USUAL
    for _ in range(20):
        record.learn(15, 15)
    assert record.chance > 0.97
    for _ in range(20):
        record.learn(7, 0)
    low = record.chance
    assert low < 0.4
    for _ in range(200):
        record.learn(0, 0)
    assert record.chance > 0.95 * USUAL and DOUBT < 1
