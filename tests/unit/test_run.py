"""The record of a run: folding events, the numbers' definitions, JSON both ways."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from tfmagic import protocol
from tfmagic.run import (
    DRAFTING,
    STATS,
    TTFT_PARTS,
    Node,
    Picture,
    Round,
    Run,
    Stream,
    Token,
    accepted_by_position,
    token_sha,
)

TTFT = dict(zip((*TTFT_PARTS, "total"), (1.0, 2.0, 0.0, 4.0, 8.0, 1.0, 16.0)))
ROUND = Round(
    20.0, 3, "copy", [Node("a", 0, 0.9, True), Node("b", 1, 0.6, True), Node(" no", 2, 0.5)], 4,
    draft_ms=1.0, verify_ms=4.0, commit_ms=1.0, serial_ms=4.0, planned_ms=5.0,
)  # fmt: skip
TREE = [
    Node("a", 0, 0.5), Node("b", 0, 0.4, True), Node("c", 2, 0.3, True), Node("d", 1, 0.2), Node("e", 3, 0.1),
    Node("f", 3, 0.1), Node("g", 5, 0.1),
]  # fmt: skip
"""Rows 2 and 3 accepted of seven; the deepest path is 2, 3, 5, 7."""
EVENTS = [
    protocol.Queued("r", 2),
    protocol.Prepared("r", 100, [Picture("a.png", 64, 48, 4, 9), Picture("b.png", 64, 48, 20, 9)]),
    protocol.Restored("r", 64, "ram"),
    protocol.Encoded("r", 1, [True, False]),
    protocol.Prefilled("r", 100),
    protocol.First("r", 0, Token(7, "A", "first"), 16.0, TTFT),
    protocol.First("r", 1, Token(8, "B", "first"), 17.0),
    protocol.Committed("r", 0, ROUND, [Token(1, "a", "draft"), Token(2, "b", "draft"), Token(3, "")]),
    protocol.Committed("r", 0, Round(24.0), [Token(4, "c")]),
    protocol.Finished("r", 0, "stop", "\ufffd"),
    protocol.Done("r", "stopped", 30.0),
]


def folded() -> Run:
    run = Run(id="r", created=1.0, streams=[Stream(), Stream(seed=5)])
    for event in EVENTS:
        run.apply(event)
    return run


def test_every_event_survives_the_wire_and_folds_into_the_same_record():
    far = Run(id="r", created=1.0, streams=[Stream(), Stream(seed=5)])
    frame = protocol.encode(protocol.Update(EVENTS))
    for event in protocol.decode_reply(frame).events:
        far.apply(event)
    assert far == folded()


def test_the_record_holds_what_the_events_said():
    run = folded()
    assert (run.status, run.total_ms, run.position) == ("stopped", 30.0, None)
    assert run.text == "Aabc\ufffd" and run.streams[0].token_ids == [7, 1, 2, 3, 4]
    assert [s.finish_reason for s in run.streams] == ["stop", "cancelled"]
    assert [p.kept for p in run.pictures] == [True, False]


def test_stats_have_exactly_the_defined_names():
    stats = folded().stats
    assert set(stats) == set(STATS)
    assert stats["ttft"] == TTFT and sum(TTFT[p] for p in TTFT_PARTS) == TTFT["total"]
    assert (stats["cached_tokens"], stats["cache_source"]) == (64, "ram")
    assert (stats["tower_calls"], stats["images_encoded"], stats["images_kept"]) == (1, 1, 1)
    assert (stats["rounds"], stats["drafted"], stats["accepted"]) == (2, 3, 2)
    assert stats["acceptance"] == pytest.approx(2 / 3) and stats["tokens_per_round"] == 2.0
    assert stats["accepted_by_position"] == [1.0, 1.0, 0.0]
    assert stats["draft_source"] == {"copy": 1, "none": 1}


def test_what_was_not_measured_is_none():
    stats = Run(id="r", created=0.0).stats
    assert all(v is None for v in stats["ttft"].values())
    for name in ("cached_tokens", "cache_source", "tower_calls", "images_encoded", "acceptance", "tokens_per_round"):
        assert stats[name] is None


def test_token_sha_is_sha256_over_little_endian_u32():
    data = b"".join(i.to_bytes(4, "little") for i in (7, 1, 2, 3, 4, 8))
    assert folded().stats["token_sha"] == hashlib.sha256(data).hexdigest()[:12] == token_sha([7, 1, 2, 3, 4, 8])


def chain(drafted: int, accepted: int) -> Round:
    return Round(1.0, accepted + 1, "block", [Node("x", k, 0.5, k < accepted) for k in range(drafted)])


def test_accepted_by_position_counts_only_rounds_that_drafted_it():
    assert accepted_by_position([chain(2, 2), chain(1, 0), Round(3)]) == [0.5, 1.0]


def test_a_tree_counts_rows_and_positions_apart():
    verified = Round(1.0, 3, "tree", TREE)
    assert (verified.drafted, verified.accepted, verified.depth) == (7, 2, 4)
    assert verified.expected == pytest.approx(1 + 0.5 + 0.4 + 0.3 + 0.2 + 0.3)
    assert verified.rejected == "eg", "the likelier continuation of the path that was taken"
    assert accepted_by_position([verified]) == [1.0, 1.0, 0.0, 0.0]
    assert chain(3, 0).rejected == "xxx" and chain(3, 3).rejected == "" and Round(1.0).depth == 0


def test_a_round_whose_nodes_come_before_their_parents_is_refused():
    for bad in ([Node("a", 1)], [Node("a", 0), Node("b", -1)]):
        with pytest.raises(ValueError, match="follow rows before them"):
            Round(1.0, nodes=bad)
    text = folded().to_json().replace('[" no",2', '[" no",9')
    with pytest.raises(msgspec.ValidationError):
        Run.from_json(text)


def test_speedups_are_sums_of_tokens_times_serial_time_over_sums_of_time():
    timed = {"draft_ms": 1.0, "verify_ms": 6.0, "commit_ms": 1.0, "serial_ms": 5.0}
    run = Run("r", 0.0, streams=[Stream(rounds=[ROUND]), Stream(rounds=[Round(9.0, **timed, planned_ms=5.0)])])
    drafting = run.drafting
    assert drafting["speedup"] == pytest.approx((3 * 4 + 1 * 5) / (6 + 8))
    assert drafting["expected_speedup"] == pytest.approx(((1 + 0.9 + 0.6 + 0.5) * 4 + 1 * 5) / (5 + 5))
    run.streams[1].rounds.append(Round(12.0, 2, "block", [Node("x", 0, None, True)], **timed))
    assert run.drafting["expected_speedup"] == drafting["expected_speedup"], "no chance and no plan: nothing expected"
    assert run.drafting["speedup"] == pytest.approx((3 * 4 + 1 * 5 + 2 * 5) / (6 + 8 + 8))


def test_a_commit_that_was_not_told_apart_is_in_verify():
    assert Round(1.0, draft_ms=1.0, verify_ms=4.0).spent_ms == 5.0
    assert Round(1.0, verify_ms=4.0, commit_ms=1.0).spent_ms is None


def test_what_drafting_did():
    drafting = folded().drafting
    assert set(drafting) == set(DRAFTING)
    assert drafting["by_source"] == {
        "copy": {"rounds": 1, "drafted": 3, "accepted": 2, "acceptance": 2 / 3},
        "none": {"rounds": 1, "drafted": 0, "accepted": 0, "acceptance": None},
    }
    assert drafting["accepted_by_position"] == [[1.0, 1.0, 0.0], []] and drafting["cut"] == 4
    assert (drafting["draft_ms"], drafting["verify_ms"], drafting["commit_ms"]) == (1.0, 4.0, 1.0)
    assert drafting["expected_tokens_per_round"] == pytest.approx((3.0 + 1.0) / 2)


def test_drafting_that_was_not_measured_is_none():
    for run in (Run("r", 0.0), Run("r", 0.0, streams=[Stream(rounds=[chain(2, 1)])])):
        for name in ("draft_ms", "verify_ms", "commit_ms", "expected_speedup", "speedup"):
            assert run.drafting[name] is None
    serial = Round(9.0, draft_ms=0.0, verify_ms=5.0, commit_ms=0.0, serial_ms=5.0, planned_ms=5.0)
    assert Run("r", 0.0, streams=[Stream(rounds=[serial])]).drafting["speedup"] is None, "nothing was drafted"


def test_tokens_per_second_needs_two_tokens():
    first, second = folded().streams
    assert first.tokens_per_second == pytest.approx(1e3 * 4 / (24 - 16)) and second.tokens_per_second is None


def test_json_both_ways_and_hostile_json():
    run = folded()
    assert Run.from_json(run.to_json()) == run
    for bad in ("{}", "[]", "null", '{"id": 3, "created": 1}'):
        with pytest.raises(msgspec.ValidationError):
            Run.from_json(bad)


def test_to_pandas_has_one_row_a_round():
    frame = folded().to_pandas()
    assert list(frame.columns) == [
        "stream", "round", "ms", "drafted", "accepted", "committed", "draft_source", "depth", "cut", "draft_ms",
        "verify_ms", "commit_ms", "serial_ms", "planned_ms", "expected",
    ]  # fmt: skip
    assert frame.drafted.tolist() == [3, 0] and frame.stream.tolist() == [0, 0]
    assert frame.cut.tolist() == [4, 0] and frame.depth.tolist() == [3, 0]
    assert frame.verify_ms[0] == 4.0 and frame.verify_ms.isna().tolist() == [False, True]
