"""The engine with states on disk: the same tokens as cold, whatever came from where."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.engine.conftest import GREEDY, SEEDED, Bench, picture_prompt, pictures, text_prompt, tiny
from tests.patience import LONG
from tfmagic import attach, cli, client, magics
from tfmagic.engine import open as opening
from tfmagic.engine.cache.disk import Limits
from tfmagic.engine.cache.holdings import shelves
from tfmagic.engine.open import Settings
from tfmagic.engine.resident import __main__ as resident
from tfmagic.engine.resident.server import SETTINGS
from tfmagic.errors import Refusal

from .conftest import FREELY

__all__ = ["pictures", "tiny"]
BOTH = Limits(learned=1 << 30, spilled=1 << 30, free=0)


def ids(rows: int, seed: int = 0) -> list[int]:
    return [(seed + 7 * i * i + 3 * i) % 240 for i in range(rows)]


class Shelved(Bench):
    """A bench whose engine keeps states on disk; each one is an engine after a restart."""

    def __init__(self, model, shelf, limits: Limits = FREELY, budget: int = 1 << 30):
        super().__init__(model, budget)
        self.disk = self.engine.store.disk = shelf.disk(limits)

    def run(self, *args, **kwargs):
        run = super().run(*args, **kwargs)
        assert run.status == "done", run.error
        assert self.disk.flush(LONG)
        return run


def tokens(run):
    return [stream.token_ids for stream in run.streams]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_after_a_restart_resumed_is_cold(tiny, shelf, sampling):
    first = text_prompt(ids(200))
    reply = Shelved(tiny, shelf).run(first, sampling)
    second = text_prompt(first.ids + reply.streams[0].token_ids + ids(90, 5))
    cold = Bench(tiny).run(second, sampling, streams=2)
    bench = Shelved(tiny, shelf)
    again = bench.run(second, sampling, streams=2)
    assert (again.cache_source, again.cached_tokens) == ("disk", 192) and tokens(again) == tokens(cold)
    assert again.ttft["restore"] > 0
    third = bench.run(second, sampling, streams=2)
    assert third.cache_source in ("ram", "exact") and tokens(third) == tokens(cold)
    last = Shelved(tiny, shelf).run(second, sampling, streams=2)
    assert (last.cache_source, last.cached_tokens) == ("disk", 256 + 64 * (len(second.ids) > 320))
    assert tokens(last) == tokens(cold) and not shelf.lines


def test_every_state_on_disk_is_what_a_cold_pass_makes(tiny, shelf):
    """Also those of a prompt that itself resumed from disk."""
    prompt = text_prompt(ids(500))
    Shelved(tiny, shelf).run(text_prompt(prompt.ids[:200]))
    Shelved(tiny, shelf).run(prompt)
    cold = Bench(tiny)
    cold.run(text_prompt(prompt.ids[:200]))
    cold.run(prompt)
    last = Shelved(tiny, shelf)
    found = last.engine.store.find([*prompt.key, 1])
    assert found.source == "disk" and found.at == 448
    kept = cold.kept[found.key]
    assert all(found.tensors[name].equal(kept.tensors[name]) for name in kept.tensors)


def test_pictures_resume_from_disk_and_others_do_not(tiny, shelf, pictures):
    one, two = pictures
    mine = picture_prompt(tiny, [ids(10), one, ids(120)])
    Shelved(tiny, shelf).run(mine)
    again = Shelved(tiny, shelf).run(mine)
    assert (again.cache_source, again.tower_calls, again.images_kept) == ("disk", 0, 1)
    other = picture_prompt(tiny, [ids(10), replace(two, grid=one.grid), ids(120)])
    assert other.ids == mine.ids
    foreign = Shelved(tiny, shelf).run(other)
    assert (foreign.cache_source, foreign.cached_tokens, foreign.tower_calls) == (None, 0, 1)
    assert tokens(foreign) == tokens(Bench(tiny).run(other))


def test_evicted_states_come_back(tiny, shelf):
    prompts = [text_prompt(ids(100, seed)) for seed in range(5)]
    cold = [tokens(Bench(tiny).run(prompt)) for prompt in prompts]
    probe = Bench(tiny)
    probe.run(prompts[0])
    budget = int(2.5 * probe.engine.store.bytes)
    bench = Shelved(tiny, shelf, Limits(learned=None, spilled=1 << 30, free=0), budget)
    for prompt in prompts:
        bench.run(prompt)
    sources = []
    for prompt, expected in zip(prompts, cold):
        run = bench.run(prompt)
        sources.append(run.cache_source)
        assert tokens(run) == expected
    assert sources == ["disk"] * 5 and bench.engine.store.bytes <= budget
    assert {path.suffix for path in shelf.files()} == {".spilled"}


def test_without_memory_conversations_still_resume_from_disk(tiny, shelf):
    prompt = text_prompt(ids(150))
    cold = tokens(Bench(tiny).run(prompt))
    bench = Shelved(tiny, shelf, budget=0)
    assert tokens(bench.run(prompt)) == cold
    for _ in range(2):
        again = bench.run(prompt)
        assert (again.cache_source, again.cached_tokens) == ("disk", 128) and tokens(again) == cold
    assert len(bench.engine.store) == bench.engine.store.counts.refused == 0


def test_a_state_that_does_not_restore_is_forgotten_and_said(tiny, shelf):
    prompt = text_prompt(ids(150))
    cold = tokens(Shelved(tiny, shelf).run(prompt))
    bench = Shelved(tiny, shelf)
    found = bench.engine.store.find(prompt.key)
    bench.engine.store.clear()
    found.tensors.pop("0.S")
    path = shelf.files()[0]
    path.unlink()
    bench.disk.offer(bytes.fromhex(path.name.split("-")[0]), found)
    assert bench.disk.flush(LONG)
    run = bench.run(prompt)
    assert (run.cached_tokens, run.cache_source) == (0, None) and "could not be restored" in run.note
    assert tokens(run) == cold and "does not take it" in shelf.lines[-1]
    assert Shelved(tiny, shelf).run(prompt).cache_source == "disk", "kept anew"


def test_a_cold_run_neither_reads_nor_writes(tiny, shelf):
    prompt = text_prompt(ids(150))
    bench = Shelved(tiny, shelf)
    bench.submit(prompt, cache=False)
    bench.drain()
    assert bench.disk.flush(LONG) and not shelf.files()


def test_what_is_kept_where(tiny, shelf):
    bench = Shelved(tiny, shelf, BOTH)
    bench.run(text_prompt(ids(150)))
    places, states = shelves(bench.engine.store)
    assert [(place.where, place.states) for place in places] == [("ram", 1), ("disk", 1)]
    assert [(state.where, state.rows) for state in states] == [("ram", 128), ("disk", 128)]
    assert all(abs(state.made - time.time()) < 600 and state.bytes > 0 for state in states)
    assert states[0].label == states[1].label and places[1].directory == str(shelf.base)
    done = bench.engine.clear()
    bench.engine.step()
    assert done.is_set() and shelves(bench.engine.store)[0][0].states == 0


# Settings ----------------------------------------------------------------------------------------


def test_the_command_line_passes_them_on(tmp_path, monkeypatch):
    asked = {}

    def connect(*args, **options):
        asked.update(options)
        raise Refusal("No engine here.", "It is a test.")

    monkeypatch.setattr(client, "connect", connect)
    line = "start --learn-conversations --learn-dir x --learn-gib 3 --learn-daily-gib 0 --spill-gib 2"
    assert cli.main(line.split()) == 1
    assert asked["learn_conversations"] is True and (asked["learn_dir"], asked["learn_gib"]) == ("x", 3.0)
    assert (asked["learn_daily_gib"], asked["spill_gib"], asked["learn_min_free_gib"]) == (0.0, 2.0, None)


def test_notebook_and_python_take_the_same_options():
    assert magics.OPTIONS == client.OPTIONS


@pytest.mark.parametrize("name", ["spill_gib", "learn_gib", "learn_min_free_gib", "learn_daily_gib"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_strange_limit_is_refused_by_name(name, value):
    with pytest.raises(Refusal, match=name.replace("_", "-")):
        opening.check(Settings(**{name: value}))


def test_the_process_reads_what_the_client_writes():
    wish = {"spill_gib": 1.5, "learn_dir": "/a b", "learn_gib": 0.0, "learn_daily_gib": 9.0}
    for learn in (True, False):
        wish["learn_conversations"] = learn
        line = ["--runtime-dir=/x", *(attach.flag(name, value) for name, value in wish.items())]
        options = vars(resident.parser().parse_args(line))
        assert {name: options[name] for name in wish} == wish
    plain = vars(resident.parser().parse_args(["--runtime-dir=/x"]))
    assert Settings(**{name: plain[name] for name in SETTINGS}) == Settings()


def test_off_is_off():
    assert not Settings().disk and not Settings(learn_gib=5.0, learn_dir="x").disk
    assert Settings(learn_conversations=True).disk and Settings(spill_gib=0.5).disk


def test_off_opens_no_disk_and_on_says_what_it_does(tmp_path):
    model = str(opening.resolve(None))
    off = opening.open(model, "cpu", Settings(learn_dir=str(tmp_path / "s")), print)
    assert off.engine.store.disk is None and not (tmp_path / "s").exists()
    said: list[str] = []
    on = opening.open(
        model, "cpu", Settings(learn_conversations=True, learn_dir=str(tmp_path / "s")), print, said.append
    )
    assert "looking at the states on disk" in said and (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    on.close(LONG)
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(Refusal, match="chmod 700"):
        opening.open(model, "cpu", Settings(spill_gib=1.0, learn_dir=str(tmp_path / "open")), print)
