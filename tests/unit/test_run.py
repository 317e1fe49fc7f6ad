"""The record of a run: folding events, the numbers' definitions, JSON both ways."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from tfmagic import protocol
from tfmagic.run import STATS, TTFT_PARTS, Picture, Round, Run, Stream, Token, accepted_by_position, token_sha

TTFT = dict(zip((*TTFT_PARTS, "total"), (1.0, 2.0, 0.0, 4.0, 8.0, 1.0, 16.0)))
EVENTS = [
    protocol.Queued("r", 2),
    protocol.Prepared("r", 100, [Picture("a.png", 64, 48, 4, 9), Picture("b.png", 64, 48, 20, 9)]),
    protocol.Restored("r", 64, "ram"),
    protocol.Encoded("r", 1, [True, False]),
    protocol.Prefilled("r", 100),
    protocol.First("r", 0, Token(7, "A", "first"), 16.0, TTFT),
    protocol.First("r", 1, Token(8, "B", "first"), 17.0),
    protocol.Committed(
        "r", 0, Round(20.0, 3, 2, 3, "copy", " no"), [Token(1, "a", "draft"), Token(2, "b", "draft"), Token(3, "")]
    ),
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


def test_accepted_by_position_counts_only_rounds_that_drafted_it():
    rounds = [Round(1, drafted=2, accepted=2), Round(2, drafted=1, accepted=0), Round(3)]
    assert accepted_by_position(rounds) == [0.5, 1.0]


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
    assert list(frame.columns) == ["stream", "round", "ms", "drafted", "accepted", "committed", "draft_source"]
    assert frame.drafted.tolist() == [3, 0] and frame.stream.tolist() == [0, 0]
