from __future__ import annotations

import random

from tfmagic.engine.drafting.copy import Copier, Width


def run(a, b):
    return list(range(a, b + 1))


def test_what_followed_the_last_eight_tokens_is_proposed():
    assert Copier(run(1, 17) + run(1, 8)).propose(8) == run(9, 16)


def test_a_context_without_room_for_two_matches_proposes_nothing():
    assert Copier(run(1, 7) + run(1, 8)).propose(8) == []
    assert Copier(run(1, 8) + run(1, 8)).propose(3) == run(1, 3)


def test_nothing_matches_nothing_is_proposed():
    assert Copier(run(1, 40)).propose(8) == []
    assert Copier(run(1, 17) + run(2, 8)).propose(8) == []
    assert Copier([]).propose(8) == []


def test_the_latest_place_wins():
    assert Copier([*run(1, 8), 50, *run(1, 8), 60, *run(1, 8)]).propose(1) == [60]


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    assert Copier([1, 2, 3] * 6).propose(7) == [1, 2, 3, 1, 2, 3, 1]
    assert Copier([4] * 16).propose(5) == [4] * 5


def test_the_index_grows_with_the_context():
    ids = run(1, 20)
    copier = Copier(ids)
    assert copier.propose(4) == []
    for id in run(1, 9):
        ids.append(id)
        copier.propose(4)
    assert copier.propose(4) == run(10, 13)


def test_the_window_doubles_after_a_whole_copy_and_halves_after_a_broken_one():
    width = Width()
    seen = [width.rows]
    for drafted, accepted in ((7, 7), (15, 15), (15, 14), (7, 0), (3, 1), (1, 0), (0, 0), (1, 1)):
        width.learn(drafted, accepted)
        seen.append(width.rows)
    assert seen == [8, 16, 16, 8, 4, 2, 2, 2, 4]


def test_a_copy_never_begins_where_none_was_near():
    rng, seen = random.Random(3), set()
    for _ in range(60):
        whole = [rng.randrange(3) for _ in range(rng.randrange(10, 60))]
        ids = whole[:9]
        copier = Copier(ids)
        for id in whole[9:]:
            near = copier.near()
            ids.append(id)
            seen.add((near, bool(copier.propose(1))))
    assert seen == {(False, False), (True, False), (True, True)}
