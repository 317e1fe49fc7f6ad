"""The real process with states on disk: a conversation goes on after a restart where it was."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.patience import patient, until
from tfmagic.client import connect
from tfmagic.engine.resident import place

pytestmark = pytest.mark.slow
SYSTEM = "You are a careful assistant. " * 20
QUESTION = "What is this, and what may it be good for? " * 10
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture
def where(monkeypatch):
    patient()
    path = Path(tempfile.mkdtemp(prefix="tfm-", dir="/tmp"))
    monkeypatch.setenv("TFMAGIC_RUNTIME_DIR", str(path))
    here = place.Place(path)
    yield here
    place.finish(here)
    shutil.rmtree(path)


def wait_for_states(engine, count: int):
    """Until the engine has written so many to disk since it started."""
    until(lambda: engine.cache().shelves[1].counts["written"] >= count)
    time.sleep(0.2)  # for the writer to let go of the last one
    return engine.cache()


@pytest.mark.slow
def test_a_conversation_with_a_picture_resumes_from_disk_after_a_restart(where, tmp_path):
    options = {"learn_conversations": True, "learn_dir": tmp_path / "states"}
    picture, other = Image.new("RGB", (96, 64), "red"), Image.new("RGB", (96, 64), "blue")
    with connect(**options) as engine:
        chat = engine.chat("kites", system=SYSTEM)
        first = chat.send([picture, QUESTION], **GREEDY)
        assert first.cache_source is None and first.tower_calls == 1
        again = [{"role": "user", "content": [picture, QUESTION]}, {"role": "assistant", "content": first.text}]
        second = {"messages": again, "system": SYSTEM, **GREEDY}
        cold = engine.run("And the colour?", **second, cache="off")
        held = wait_for_states(engine, 2)  # behind the system text and behind the picture
        assert held.shelves[1].directory == str(tmp_path / "states") and held.states[-1].where == "disk"
        assert held.states[-1].label == "chat “kites”, turn 1"
    os.kill(where.engine(), signal.SIGKILL)
    until(lambda: where.engine() is None)
    with connect(**options) as engine:
        assert engine.cache().shelves[0].states == 0
        resumed = engine.run("And the colour?", **second)
        assert resumed.cache_source == "disk" and resumed.cached_tokens > 64
        assert (resumed.tower_calls, resumed.images_kept) == (0, 1)
        assert resumed.streams[0].token_ids == cold.streams[0].token_ids
        assert sum(resumed.ttft[part] for part in resumed.ttft if part != "total") == pytest.approx(
            resumed.ttft["total"]
        )
        warm = engine.run("And the colour?", **second)
        assert warm.cache_source in ("ram", "exact") and warm.streams[0].token_ids == cold.streams[0].token_ids
    with connect(**options, restart=True) as engine:
        again[0]["content"] = [other, QUESTION]
        different = engine.run("And the colour?", **second)
        assert different.tower_calls == 1, "another picture is computed"
        wait_for_states(engine, 1)
        held = engine.cache(clear=True)
        assert [shelf.states for shelf in held.shelves] == [0, 0]
        assert engine.run("And the colour?", **second).cache_source is None
    assert not [*(tmp_path / "states").glob("*/*.spilled")]


def test_what_memory_has_no_room_for_comes_back_from_disk(where, tmp_path):
    options = {"spill_gib": 1, "learn_dir": tmp_path / "states", "prompt_cache_gib": 0.003}
    text = "Tell me about the sea and the wind and the birds. " * 8
    with connect(**options) as engine:
        first = engine.run("A " + text, **GREEDY)
        for letter in "BCD":
            engine.run(f"{letter} {text}", **GREEDY)
        evicted = engine.status().cache_counts["evicted"]
        assert evicted
        wait_for_states(engine, evicted)
        back = engine.run("A " + text, **GREEDY)
        assert back.cache_source == "disk" and back.cached_tokens >= 64
        assert back.streams[0].token_ids == first.streams[0].token_ids
    assert not [*(tmp_path / "states").glob("*/*.learned")]


def test_off_leaves_nothing_and_says_so(where, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with connect() as engine:
        engine.run("Tell me about the sea. " * 20, **GREEDY)
        assert [shelf.where for shelf in engine.cache().shelves] == ["ram"]
        threads = Path(f"/proc/{engine.status().pid}/task").iterdir()
        assert "states" not in [(thread / "comm").read_text().strip() for thread in threads]
    assert not list(tmp_path.rglob("*.learned")) and not (tmp_path / "tfmagic" / "states").exists()
