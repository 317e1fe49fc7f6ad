"""What the panel is told: frames add up to the record, and a snapshot stays bounded."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import nbformat
import pytest
import scripted
from nbclient import NotebookClient

from tfmagic import protocol
from tfmagic.run import Node, Round, Run, Stream, Token
from tfmagic.views import frames, live


def told(name: str, every: int) -> tuple[Run, list[dict], live.Panel]:
    """A scenario's record, the frames that `every` events apart tell of it, and the panel that told them."""
    record, script = scripted.scenario(name)
    panel = live.Panel(SimpleNamespace(record=record, version=0))
    out = [panel._frame()]
    for i, (_, event) in enumerate(script):
        record.apply(event)
        if i % every == 0:
            out.append(panel._frame())
    return record, [*out, panel._frame()], panel


def chain(drafted: int, accepted: int) -> list[Node]:
    return [Node(" x", k, 0.5, k < accepted) for k in range(drafted)]


def text_of(segments) -> str:
    return "".join(text for kind, text in segments if kind in "pdc")


@pytest.mark.parametrize("every", [1, 3, 1000])
@pytest.mark.parametrize("name", ["warm", "four", "plain", "failed"])
def test_frames_add_up_to_the_record(name, every):
    record, out, panel = told(name, every)
    assert [frame["seq"] for frame in out] == list(range(1, len(out) + 1))
    head, segments = {}, {}
    for frame in out:
        head |= frame["head"]
        for i, stream in frame["streams"].items():
            segments.setdefault(i, []).extend(stream.get("segments", []))
    assert head["status"] == record.status and head["cached"] == record.cached_tokens and head["error"] == record.error
    rounds, drafted, accepted = (sum(counts) for counts in zip(*head["drafts"].values()))
    stats = record.stats
    assert (rounds, drafted, accepted) == (stats["rounds"], stats["drafted"], stats["accepted"])
    for i, stream in enumerate(record.streams):
        assert text_of(segments[i]) == stream.text
        tally = panel._tallies[i]
        assert tally.fields["tokens"] == len(stream.tokens) and tally.fields["rounds"] == len(stream.rounds)
        assert tally.fields["positions"] == [round(share, 3) for share in stream.accepted_by_position]
        assert tally.fields["speed"] == pytest.approx(stream.tokens_per_second)
        rejected = "".join(text for kind, text in segments[i] if kind == "x")
        assert rejected == "".join(r.rejected for r in stream.rounds)


def test_a_frame_holds_only_what_is_new():
    _, out, _ = told("long", 1)
    steady = [frame for frame in out if frame["seq"] > 100][:-4]
    assert max(len(json.dumps(frame)) for frame in steady) < 1600
    assert all(set(frame["head"]) <= {"drafts", "cached", "cut", "speedup"} for frame in steady)


def test_a_snapshot_stays_bounded():
    record, _, panel = told("long", 50)
    stream = record.streams[0]
    stream.tokens += [Token(1, " word", "plain" if i % 2 else "draft") for i in range(40_000)]
    stream.rounds += [Round(9_000 + i, 2, "block", chain(7, 1)) for i in range(20_000)]
    panel._frame()
    state = panel._snapshot()
    segments = state["streams"][0]["segments"]
    assert len(json.dumps(state)) < 8 * live.SNAPSHOT_TEXT
    assert sum(len(text) for kind, text in segments) <= live.SNAPSHOT_TEXT + 10
    left = next(int(text) for kind, text in segments if kind == "e")
    assert left + sum(len(text) for kind, text in segments if kind != "e") == sum(
        len(text) for _, text in panel._tallies[0].segments
    )
    assert len(state["streams"][0]["bars"]) == frames.BARS


def test_a_round_waits_for_its_tokens():
    """Another thread folds a round before its tokens: the panel must not take half of it."""
    stream = Stream(tokens=[Token(1, "A", "first")], rounds=[Round(5.0, 2, "block", chain(2, 1))], first_ms=1.0)
    tally = frames.Tally()
    assert tally.read(stream)["segments"] == [["p", "A"]] and tally.rounds == 0
    stream.tokens += [Token(2, " b", "draft"), Token(3, " c")]
    assert tally.read(stream)["segments"] == [["d", " b"], ["x", " x"], ["p", " c"]]
    assert tally.read(stream) == {}


def test_held_back_text_belongs_to_the_last_token():
    run = Run("r", 0.0, streams=[Stream(tokens=[Token(1, "", "first")], first_ms=1.0)])
    tally = frames.Tally()
    tally.read(run.streams[0])
    run.apply(protocol.Finished("r", 0, "length", "\ufffd"))
    assert tally.read(run.streams[0])["segments"] == [["p", "\ufffd"]]
    assert tally.read(run.streams[0]) == {}


def test_copies_are_told_apart():
    _, out, _ = told("warm", 1)
    kinds = {kind for frame in out for stream in frame["streams"].values() for kind, _ in stream.get("segments", [])}
    assert kinds == {"p", "d", "c", "x"}


def test_cut_keeps_both_ends():
    segments = [[kind, text] for kind, text in zip(itertools.cycle("pd"), (f"{i:04d}" for i in range(100)))]
    short = frames.cut(segments, 100)
    assert short[0] == segments[0] and short[-1] == segments[-1]
    assert [int(text) for kind, text in short if kind == "e"] == [400 - 4 * (len(short) - 1)]
    assert frames.cut(segments, 400) == segments


def test_a_snapshot_is_not_changed_by_what_comes_after():
    """The trait is sent again to a page that reloads: it must hold what it held."""
    record, script = scripted.scenario("warm")
    panel = live.Panel(SimpleNamespace(record=record, version=0))
    before = []
    for _, event in script:
        record.apply(event)
        panel._frame()
        state = panel._snapshot()
        before.append((state, json.dumps(state)))
    assert all(json.dumps(state["streams"]) == json.dumps(json.loads(then)["streams"]) for state, then in before)


def test_there_is_no_panel_where_no_page_runs_the_cell():
    """nbclient would save the widget's state into the notebook."""
    cell = nbformat.v4.new_code_cell("from tfmagic.views import live; print(live.available())")
    book = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(book, kernel_name="python3", timeout=600).execute()
    assert book.cells[0].outputs[0].text == "False\n"
    assert live.available() is False, "nor outside a kernel"


def test_the_module_is_small_and_asks_for_nothing():
    code = [(live.Path(live.__file__).with_name(name)).read_text() for name in ("live.js", "live.css")]
    assert all(len(text.encode()) <= most for text, most in zip(code, (40 * 1024, 14 * 1024), strict=True))
    addresses = [word for text in code for word in text.split('"') if "://" in word]
    assert addresses == ["http://www.w3.org/2000/svg"]
    assert not any(word in text for text in code for word in ("import(", "import ", "@import", "url(", "eval("))


def test_sixteen_long_streams_stay_small():
    """A frame and a snapshot are bounded whatever the run; trees that they leave out can be asked for."""
    run = Run("r", 0.0, streams=[Stream(first_ms=1.0) for _ in range(16)])
    piece = " wonderfully-long-token" * 3
    for stream in run.streams:
        stream.tokens = [Token(1, piece, "first")]
        for i in range(2_000):
            nodes = [Node(piece, k // 2, 0.123, k == 0) for k in range(15)]
            stream.rounds.append(Round(9.0 + i, 2, "tree", nodes, 3, 0.5, 5.0, 0.2, 5.0, 6.0))
            stream.tokens += [Token(1, piece, "draft"), Token(1, piece)]
    panel = live.Panel(SimpleNamespace(record=run, version=0))
    panel._frame()
    assert len(json.dumps(panel._snapshot())) < 120_000
    for stream in run.streams:
        stream.rounds += stream.rounds[:9]
        stream.tokens += stream.tokens[1:19]
    frame = panel._frame()
    assert sum(len(stream["trees"]) for stream in frame["streams"].values()) == frames.TREES
    assert all(len(stream["bars"]) == 9 for stream in frame["streams"].values())
    assert len(json.dumps([stream["trees"] for stream in frame["streams"].values()])) < 24_000


def test_a_round_of_a_tree_in_a_frame():
    nodes = [Node(" red", 0, 0.5, True), Node(" blue", 0, None), Node(" kite", 1, 0.25)]
    stream = Stream(tokens=[Token(1, "A", "first"), Token(2, " red", "draft"), Token(3, " and")], first_ms=1.0)
    stream.rounds = [Round(9.0, 2, "tree", nodes, 4, 0.52, 5.128, None)]
    news = frames.Tally().read(stream)
    assert news["bars"] == [[3, 1, "tree", 4, 2]] and news["positions"] == [1.0, 0.0]
    assert news["trees"] == [{
        "root": "A", "pieces": [" red", " blue", " kite"], "parents": [0, 0, 1], "chances": [50, None, 25],
        "taken": [1], "own": " and", "expected": None, "ms": [0.52, 5.13, None],
    }]  # fmt: skip


def test_rounds_are_told_from_anywhere_in_the_run():
    record, out, _ = told("long", 1)
    stream = record.streams[0]
    sent = [tree for frame in out for tree in frame["streams"].get(0, {}).get("trees", [])]
    n = len(stream.rounds)
    assert len(sent) == n > 100
    for start, count, first, last in ((-12, 24, 0, 24), (50, 24, 50, 74), (n - 3, 24, n - 3, n), (n + 5, 24, n, n)):
        told_of = frames.rounds(stream, start, count)
        assert told_of["end"] == last and told_of["trees"] == sent[first:last], "as the frames told them"
        assert len(told_of["bars"]) == last - first
    stream.tokens = stream.tokens[:40]  # a round is folded before its tokens
    known = frames.rounds(stream, 0, 100)
    assert 0 < known["end"] == len(known["trees"]) == len(known["bars"]) < 40


def test_what_the_page_asks_for_is_answered_or_ignored():
    record, _, panel = told("warm", 1)
    sent = []
    panel._widget = SimpleNamespace(send=sent.append, close=lambda: None)
    for wish in ({"stream": 0, "round": 3}, {"stream": 7, "round": 0}, {"stream": "0", "round": None}, {}):
        live._heard({"op": "trees", "panel": panel.name, **wish}, control=True)
    panel.answer()
    assert [message["asked"]["stream"] for message in sent] == [0]
    assert len(sent[0]["asked"]["trees"]) == min(len(record.streams[0].rounds), live.ASKED)
    live._heard({"op": "trees", "panel": "no such panel", "stream": 0, "round": 1}, control=True)
    panel.close()


def test_the_tile_knows_what_the_record_knows():
    record, out, _ = told("two", 3)
    head = {}
    for frame in out:
        head |= frame["head"]
    drafting = record.drafting
    assert head["cut"] == drafting["cut"] > 0
    assert head["speedup"] == [round(drafting["speedup"], 3), round(drafting["expected_speedup"], 3)]
    plain, out, _ = told("plain", 3)
    assert out[-1]["head"].get("speedup", [None, None]) == [None, None] and plain.drafting["speedup"] is None
