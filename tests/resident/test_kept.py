"""What the process keeps is bounded, newest kept."""

from __future__ import annotations

import hashlib

import pytest

from tfmagic.engine.resident.runs import MIB, Chats, ImageStore, Runs
from tfmagic.errors import Refusal
from tfmagic.protocol import Done, First, Message, Submit, Text
from tfmagic.run import Run, Stream, Token


def run(id: str, **fields) -> Run:
    return Run(id=id, created=0.0, streams=[Stream()], **fields)


def finish(runs: Runs, id: str, text: str = "x") -> None:
    runs.add(run(id), None)
    runs.fold(First(id, 0, Token(1, text), 1.0, {}))
    runs.fold(Done(id, "done", 2.0))


def test_finished_runs_are_bounded_in_count_and_running_ones_stay():
    runs = Runs(count=3)
    runs.add(run("running0"), None)
    for i in range(5):
        finish(runs, f"run-{i:05}")
    assert list(runs.entries) == ["running0", "run-00002", "run-00003", "run-00004"]
    assert [r.id for r in runs.listing()] == ["run-00004", "run-00003", "run-00002", "running0"]


def test_finished_runs_are_bounded_in_bytes_and_the_newest_stays():
    runs = Runs(size=3000)
    for i in range(4):
        finish(runs, f"run-{i:05}", "x" * 1200)
    assert list(runs.entries) == ["run-00002", "run-00003"]
    finish(runs, "huge-0000", "x" * 5000)
    assert list(runs.entries) == ["huge-0000"]


def test_a_run_is_found_by_its_unique_beginning():
    runs = Runs()
    with pytest.raises(Refusal, match="No run is kept yet"):
        runs.find(None)
    finish(runs, "abc00000")
    finish(runs, "abd00000")
    assert runs.find("abc").record.id == "abc00000" and runs.find(None).record.id == "abd00000"
    with pytest.raises(Refusal, match=r"(?s)beginning of 2 runs.*abc00000, abd00000"):
        runs.find("ab")


def test_events_after_the_end_change_nothing():
    runs = Runs()
    finish(runs, "abc00000")
    assert runs.fold(First("abc00000", 0, Token(2, "y"), 1.0)) is None
    assert runs.find(None).record.text == "x"


def test_images_are_bounded_and_the_least_recently_used_goes():
    images = ImageStore(size=3)
    name = {data: hashlib.sha256(data).hexdigest() for data in (b"a", b"b", b"c", b"d")}
    for data in (b"a", b"b", b"c"):
        images.put(name[data], data, MIB)
    assert images.get(name[b"a"]) == b"a"
    images.put(name[b"d"], b"d", MIB)
    assert images.get(name[b"b"]) is None and images.get(name[b"a"]) == b"a" and images.held == 3


def test_bytes_that_are_not_the_digests_are_refused():
    with pytest.raises(Refusal, match="not its own"):
        ImageStore().put("0" * 64, b"a", MIB)
    with pytest.raises(Refusal, match="limit is 1 MiB"):
        ImageStore().put("0" * 64, bytes(MIB + 1), MIB)


def talk(chats: Chats, name: str, text: str, status: str = "done", reply: str = "fine", new: bool = False) -> None:
    ask = Submit(1, "abc00000", [Message("user", [Text(text)])], chat=name, new=new)
    chat = chats.begin(ask)
    chats.hold(name, chat, ask.run)
    record = run("abc00000", chat=name, status=status)
    record.streams[0].tokens = [Token(1, reply)] if reply else []
    chats.end(record, [*chat.messages, *ask.messages], {})


def said(chats: Chats, name: str) -> list[str]:
    return [message.parts[0].text for message in chats.chats[name].messages]


def test_a_turn_is_added_unless_it_failed_or_said_nothing():
    chats = Chats()
    talk(chats, "t", "lost", "failed")
    talk(chats, "t", "unsaid", "stopped", "")
    assert not chats.chats
    talk(chats, "t", "one", "stopped", "half")
    talk(chats, "t", "two", "failed")
    assert said(chats, "t") == ["one", "half"] and chats.chats["t"].turns == 1


def test_a_chat_begins_anew_with_a_reply_and_not_before():
    chats = Chats()
    talk(chats, "t", "never", new=True)
    talk(chats, "t", "one")
    talk(chats, "t", "lost", "failed", new=True)
    talk(chats, "t", "unsaid", "stopped", "", new=True)
    assert said(chats, "t") == ["never", "fine", "one", "fine"]
    chats.hold("t", chats.begin(Submit(1, "abc00000", [], chat="t", new=True)), "abc00000")
    with pytest.raises(Refusal, match="still answering"):
        chats.begin(Submit(2, "abc00001", [], chat="t", new=True))
    chats.release("t")
    talk(chats, "t", "two", new=True)
    assert said(chats, "t") == ["two", "fine"] and chats.chats["t"].turns == 1 and chats.chats["t"].before is None
    chats = Chats(count=1)
    for name in ("a", "b"):
        talk(chats, name, "hello")
    talk(chats, "a", "again", new=True)  # who begins anew need not be told that the old one is gone
    assert said(chats, "a") == ["again", "fine"] and list(chats.dropped) == ["b"]


def test_who_goes_on_with_a_dropped_chat_is_told_once():
    chats = Chats(count=2)
    for name in "abc":
        talk(chats, name, "hello")
    with pytest.raises(Refusal, match=r"(?s)'a' is not kept any more.*begin it anew"):
        talk(chats, "a", "and then?")
    assert set(chats.chats) == {"b", "c"}
    talk(chats, "a", "and then?")
    assert chats.chats["a"].turns == 1 and list(chats.dropped) == ["b"]


def test_chats_are_bounded_and_the_newest_stay():
    chats = Chats(count=2)
    for name in ("a", "b", "c"):
        talk(chats, name, "x")
    assert list(chats.chats) == ["b", "c"]
    chats = Chats(size=1000)
    for name in ("a", "b"):
        talk(chats, name, "x" * 800)
    assert list(chats.chats) == ["b"]
