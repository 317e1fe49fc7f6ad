"""A miss explains itself."""

from __future__ import annotations

import re
from dataclasses import replace

from tfmagic.engine.cache.store import Store

from .conftest import GREEDY, Bench, letter, picture_prompt, text_prompt
from .test_loop import ids


def words(ids):
    return "".join(map(letter, ids))


def test_a_first_prompt_finds_nothing_and_a_short_one_is_told_so(bench):
    assert bench.run(text_prompt(ids(200))).miss == "nothing is kept yet"
    assert bench.run(text_prompt(ids(30, 1))).miss == "too short: prompts under 65 rows are not kept"
    assert bench.run(text_prompt(ids(200, 2)), cache=False).miss == "asked to run cold"


def test_a_repeated_and_a_continued_prompt_have_nothing_to_explain(bench):
    bench.run(text_prompt(ids(200)))
    assert bench.run(text_prompt(ids(200))).miss is None
    assert bench.run(text_prompt(ids(200) + ids(200, 1))).miss is None


def test_the_nearest_prompt_and_the_row_where_it_parts_are_named(bench):
    start = ids(300)
    bench.run(text_prompt(ids(300, 7)))
    first = bench.run(text_prompt(start, marks=[130]))
    edited = [*start[:200], (start[200] + 1) % 240, *start[201:]]
    run = bench.run(text_prompt(edited))
    assert run.cached_tokens == 128 and run.miss == (
        f"parts from run {first.id} at row 200 after “{words(start[192:200])}”: "
        f"“{words(edited[200:205])}” here, “{words(start[200:205])}” there"
    )
    miss = bench.run(text_prompt([*start[:3], 239, *start[4:]])).miss
    assert miss.startswith(f"parts from run {run.id} at row 3 after “{words(start[:3])}”"), "the latest of equals"


def test_a_prompt_that_ends_inside_a_kept_one_is_told_apart(bench):
    bench.run(text_prompt(ids(300)))
    assert "ends inside run run-0000" in bench.run(text_prompt(ids(150))).miss


def test_another_picture_is_called_a_picture(tiny, bench, pictures):
    bench.run(picture_prompt(tiny, [ids(70), pictures[0], ids(90)]))
    other = replace(pictures[0], content=b"other" * 4)
    run = bench.run(picture_prompt(tiny, [ids(70), other, ids(90)]))
    assert "at row 71" in run.miss and "“[picture]” here, “[picture]” there" in run.miss


def test_an_eviction_is_named_with_its_reason(tiny):
    one = Bench(tiny)
    one.run(text_prompt(ids(100)))
    bench = Bench(tiny, budget=2 * one.engine.store.bytes)
    for seed in range(3):
        bench.run(text_prompt(ids(100, seed)))
    assert bench.engine.store.counts.evicted == 1
    miss = bench.run(text_prompt(ids(100))).miss
    gone = r"the state of 64 rows of run run-0000 was evicted \d+ s ago \(least recently used, for run run-0002\)"
    assert re.fullmatch(gone, miss)


def test_a_cache_that_is_off_says_so(tiny):
    assert Bench(tiny, budget=0).run(text_prompt(ids(100)), GREEDY).miss == "the prompt cache is off"


def test_an_explanation_is_cheap_however_much_is_kept(monkeypatch):
    store, compared = Store(1 << 30, 64), []
    for salt in range(600):
        store.keep([*range(128), *range(salt * 7, salt * 7 + 200)], {192: lambda: {}})
    from tfmagic.engine.cache import store as module

    real = module.agree
    monkeypatch.setattr(module, "agree", lambda a, b: compared.append(len(a)) or real(a, b))
    kept, row = store.nearest([*range(128), *range(599 * 7, 599 * 7 + 30), -1, *range(100)], 128)
    assert row == 158 and kept.key[128] == 599 * 7
    assert len(compared) <= module.COMPARED and max(compared) <= 64
