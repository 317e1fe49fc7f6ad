"""States are kept one a round, and before anyone asks for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .conftest import GREEDY, text_prompt
from .test_loop import ids

LONG = replace(GREEDY, max_tokens=40, stop_ids=frozenset(), draft="off")
MARKS = [64, 128, 192, 256]


@pytest.fixture
def begun(bench):
    """A run that has its first token, and none of its states kept."""
    run = bench.submit(text_prompt(ids(300), MARKS[:3]), LONG)
    while not run.streams[0].tokens:
        assert not bench.kept
        bench.engine.step()
    return run


def rows(bench) -> list[int]:
    return sorted(map(len, bench.kept))


def test_a_state_a_round_the_last_one_first(bench, begun):
    seen = [rows(bench)]
    for _ in range(4):
        bench.engine.step()
        seen.append(rows(bench))
    assert seen[-1] == MARKS and [len(one) for one in seen] in ([0, 1, 2, 3, 4], [1, 2, 3, 4, 4])
    assert all(one[-1] == 256 for one in seen if one) and begun.status != "done"


def test_a_prompt_that_comes_meanwhile_finds_them_all(bench, begun):
    same, other = (bench.submit(text_prompt(ids(n)), LONG) for n in (300, 200))
    bench.drain()
    assert (same.cached_tokens, other.cached_tokens) == (256, 192)
    assert same.streams[0].token_ids == begun.streams[0].token_ids


def test_a_reply_of_one_token_waits_for_none_of_them(bench):
    run = bench.submit(text_prompt(ids(300), MARKS[:3]), replace(LONG, max_tokens=1))
    while run.status != "done":
        bench.engine.step()
    assert not bench.kept
    bench.drain()
    assert rows(bench) == MARKS


def test_who_clears_clears_them_too(bench, begun):
    done = bench.engine.clear()
    bench.drain()
    assert done.is_set() and not bench.kept and begun.status == "done"


def test_one_that_cannot_be_kept_ends_nothing(bench, begun, monkeypatch, capfd):
    def broken():
        raise MemoryError("no room in host memory")

    def keep_each(*_, **__):
        yield
        broken()

    bench.drain()
    monkeypatch.setattr(bench.engine.store, "keep_each", keep_each)
    run = bench.run(text_prompt(ids(150, 1)), LONG)
    monkeypatch.undo()
    assert run.status == "done" and "no room in host memory" in capfd.readouterr().err
    bench.run(text_prompt(ids(150, 1)), LONG)
    assert 128 in rows(bench)
