from __future__ import annotations

import random

import pytest
import torch

from tfmagic.engine.cache.key import named, prefixes, whole
from tfmagic.engine.cache.store import Counts, Store, last_mark, marks


def key(n, salt=0):
    return [salt * 1000 + i for i in range(n)]


def state(floats=100):
    return lambda: {"x": torch.zeros(floats)}


def kept(store, rows, at, salt=0, floats=100):
    store.keep(key(rows, salt), {at: state(floats)})


@pytest.mark.parametrize("rows, last", [(1, 0), (63, 0), (64, 0), (65, 64), (127, 64), (128, 64), (129, 128)])
def test_the_last_mark_lies_strictly_before_the_last_row(rows, last):
    assert last_mark(rows, 64) == last


def test_marks_are_the_last_the_hinted_and_a_sparse_grid():
    assert marks(300, [], 0, 64) == [256]
    assert marks(300, [70, 130, 299, 5], 0, 64) == [64, 128, 256]
    assert marks(300, [70, 130], 64, 64) == [128, 256]
    assert marks(300, [], 256, 64) == []
    assert marks(2500, [], 0, 64) == [1024, 2048, 2496]
    assert marks(50, [10], 0, 64) == []
    assert len(marks(262_144, [], 0, 64)) == 32


def test_prefix_names_depend_on_all_that_went_before():
    a, b = prefixes(key(200), 64), prefixes([9, *key(200)[1:]], 64)
    assert len(a) == 3 and not set(a) & set(b)
    assert prefixes(key(130), 64) == a[:2] and prefixes(key(63), 64) == []
    assert all(named(key(n), 64) == (prefixes(key(n), 64), whole(key(n))) for n in (0, 63, 64, 200))
    assert whole(key(3)) != whole(key(4)) and prefixes([-(2**63)] * 64, 64)


def test_the_longest_state_that_leaves_a_row_to_compute_is_found():
    store = Store(1 << 20, 64)
    store.keep(key(300), {64: state(), 128: state(), 256: state()})
    assert store.find(key(300)).at == 256 and store.find(key(256)).at == 128 and store.find(key(257)).at == 256
    assert store.find([*key(100), 7]).at == 64 and store.find(key(63)) is None and store.find([7, *key(300)]) is None
    assert (store.counts.hits, store.counts.misses, store.counts.kept) == (4, 2, 3)


def test_a_name_is_never_trusted_alone(monkeypatch):
    store = Store(1 << 20, 64)
    kept(store, 100, 64)
    monkeypatch.setattr("tfmagic.engine.cache.store.named", lambda *_: named(key(64), 64))
    assert store.find(key(100, salt=1)) is None


def test_exact_is_the_whole_prompt_again():
    store = Store(1 << 20, 64)
    store.keep(key(100), {64: state()})
    again, longer = key(100), key(101)
    assert store.exact(store.find(again), again) and not store.exact(store.find(longer), longer)
    store.keep(longer, {})
    assert store.exact(store.find(longer), longer)


def test_the_least_recently_used_goes_first():
    one = 400 + 64 * 40
    store = Store(2 * one, 64)
    kept(store, 65, 64, salt=1)
    kept(store, 65, 64, salt=2)
    store.find(key(65, 1))
    kept(store, 65, 64, salt=3)
    assert store.find(key(65, 2)) is None and store.find(key(65, 1)) and store.find(key(65, 3))
    assert store.counts.evicted == 1 and store.bytes == 2 * one and len(store) == 2


def test_a_state_larger_than_the_budget_is_refused_and_evicts_nobody():
    store = Store(4000, 64)
    kept(store, 65, 64)
    kept(store, 65, 64, salt=1, floats=10_000)
    assert len(store) == 1 and store.counts.refused == 1 and store.counts.evicted == 0


def test_a_state_that_is_held_is_not_copied_again():
    store, calls = Store(1 << 20, 64), []

    def copy():
        calls.append(1)
        return {"x": torch.zeros(1)}

    store.keep(key(65), {64: copy})
    store.keep(key(70), {64: copy})
    assert len(calls) == 1 and len(store) == 1 and store.counts.kept == 1


def test_no_budget_keeps_nothing():
    store = Store(0, 64)
    kept(store, 65, 64)
    assert len(store) == 0 and store.counts == Counts()


def test_dropping_and_clearing_give_the_bytes_back():
    store = Store(1 << 20, 64)
    kept(store, 65, 64)
    kept(store, 65, 64, salt=1)
    store.drop(store.find(key(65)))
    assert len(store) == 1 and store.counts.failed == 1 and store.find(key(65)) is None
    store.clear()
    assert len(store) == 0 and store.bytes == 0


# Who goes first -----------------------------------------------------------------------------------

ONE = 400 + 40 * 64


def room_for(states: float) -> Store:
    return Store(int(states * ONE), 64)


def held(store):
    return {(k.key[0] // 1000, k.at) for k in store._kept.values()}


def test_a_state_that_a_longer_one_extends_goes_before_an_older_one():
    store = room_for(5.1)
    kept(store, 65, 64, salt=1)
    kept(store, 65, 64, salt=2)
    kept(store, 129, 128, salt=2)  # takes the room of two
    kept(store, 65, 64, salt=3)
    kept(store, 65, 64, salt=4)
    assert held(store) == {(1, 64), (2, 128), (3, 64), (4, 64)}
    assert (store.counts.evicted, store.counts.extended) == (1, 1)
    assert store.gone(key(200, 2), 0).why == "a longer state extends it"


def test_a_shared_system_block_goes_only_as_the_least_recently_used():
    store = room_for(4.1)
    store.keep(key(200, 1), {64: state()}, shared=64)
    store.keep(key(129, 1), {128: state()})
    kept(store, 65, 64, salt=2)
    kept(store, 65, 64, salt=3)
    assert held(store) == {(1, 128), (2, 64), (3, 64)}
    store = room_for(4.1)
    kept(store, 65, 64, salt=5)
    store.keep(key(200, 1), {64: state()}, shared=64)
    store.keep(key(129, 1), {128: state()})
    kept(store, 65, 64, salt=3)
    assert held(store) == {(1, 64), (1, 128), (3, 64)} and store.counts.extended == 0


def test_the_state_a_pass_resumed_from_outlives_its_sparse_marks():
    store = room_for(6.1)
    kept(store, 65, 64)
    base = store.find(key(65))
    long = key(1100)
    store.keep(long, {1024: state(), 1088: state()}, resumed=base)
    assert base in store._kept.values() and store.counts.refused == 2  # either is larger than what is left
    store = Store(400 + 40 * 64 + 400 + 40 * 128, 64)
    kept(store, 65, 64)
    store.keep(key(200), {128: state(), 192: state()}, resumed=store.find(key(65)))
    assert {k.at for k in store._kept.values()} == {192}, "only the last mark may take its place"


def test_what_states_share_is_charged_once():
    shared = {f"page {p}": torch.zeros(100) for p in range(3)}
    store, alone = Store(5 * 400 + 40 * (64 + 128), 64), 400 + 40 * 64
    store.keep(key(65), {64: lambda: {"S": torch.zeros(100), **dict([*shared.items()][:1])}})
    assert store.bytes == 400 + alone
    store.keep(key(129), {128: lambda: {"S": torch.zeros(100), **dict([*shared.items()][:2])}})
    assert store.bytes == 4 * 400 + 40 * (64 + 128) and len(store) == 2
    store.keep(key(65, 1), {64: state(300)})  # the first one's own part is not room enough
    assert held(store) == {(1, 64)} and store.bytes == 3 * 400 + 40 * 64
    store.clear()
    assert store.bytes == 0


def test_eviction_keeps_its_books():
    rng, store = random.Random(4), room_for(9)
    for _ in range(300):
        rows = rng.choice([65, 130, 200, 260])
        wanted = [at for at in (64, 128, 192, 256) if at < rows]
        store.keep(key(rows, rng.randrange(6)), {at: state() for at in rng.sample(wanted, rng.randint(1, len(wanted)))})
        assert store.bytes == sum(k.bytes for k in store._kept.values()) <= store.budget
    through = {name for names in store._through.values() for name in names}
    assert through == set(store._kept) and len(store._gone) <= store.counts.evicted
