"""Whatever comes over the socket, the engine answers and lives; and what it owes a slow client stays bounded."""

from __future__ import annotations

import os

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import LONG
from tfmagic import protocol
from tfmagic.engine.resident import peers
from tfmagic.engine.resident.peers import BACKLOG, BLOCKED, GONE, SENT, Peer
from tfmagic.protocol import Ask, Cancel, Committed, Follow, ImageRef, Images, List, Message, Record, Submit, Text
from tfmagic.run import Round, Run, Stream, Token

LOOSE = settings(max_examples=150)
VALID = [
    protocol.encode(request)
    for request in (
        Ask(7),
        List(7),
        Follow(7),
        Follow(7, "abc00000"),
        Cancel(7),
        Images(7, "abc00000", [b"x"]),
        Submit(7, "abc00000", [Message("user", [Text("hi"), ImageRef("0" * 64, "a")])], chat="c", streams=2),
    )
]


@pytest.fixture
def raw(engine, where):
    """A bare socket to the engine."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(f"ipc://{where.socket}")
    yield socket
    context.destroy()


def answers(raw, frame: bytes | list[bytes]) -> list:
    """What the engine answers to a frame, up to its answer to a question that follows it."""
    raw.send_multipart(frame if isinstance(frame, list) else [frame])
    raw.send(protocol.encode(Ask(10**15)))
    replies = []
    while raw.poll(60_000):
        replies.append(protocol.decode_reply(raw.recv()))
        if getattr(replies[-1], "call", None) == 10**15:
            return replies[:-1]
    raise AssertionError("the engine does not answer any more")


@LOOSE
@given(frame=st.binary(max_size=300))
def test_random_bytes_are_refused(raw, frame):
    [reply] = answers(raw, frame)
    assert isinstance(reply, protocol.Refused) and "not understood" in reply.problem


@LOOSE
@given(data=st.data())
def test_mutated_requests_are_answered(raw, data):
    frame = bytearray(data.draw(st.sampled_from(VALID)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        how = data.draw(st.sampled_from(("set", "delete", "insert", "cut")))
        if how == "set":
            frame[at] = data.draw(st.integers(0, 255))
        elif how == "insert":
            frame.insert(at, data.draw(st.integers(0, 255)))
        elif how == "delete" and len(frame) > 1:
            del frame[at]
        elif at:
            del frame[at:]
    answers(raw, bytes(frame))


@LOOSE
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    ),
    key=st.sampled_from(("call", "run", "messages", "params", "streams", "chat", "background", "new", "type")),
)
def test_requests_of_another_shape_are_answered(raw, value, key):
    request = {"type": "submit", "call": 7, "run": "abc00000", "messages": []} | {key: value}
    assert answers(raw, msgspec.msgpack.encode(request))


def test_deep_nesting_is_refused(raw):
    [reply] = answers(raw, b"\x91" * 100_000 + b"\xc0")
    assert isinstance(reply, protocol.Refused)


def test_a_frame_of_several_parts_is_refused(raw):
    [reply] = answers(raw, [b"a", b"b"])
    assert isinstance(reply, protocol.Refused)


def test_a_frame_over_the_limit_is_refused_by_its_size(raw):
    [reply] = answers(raw, bytes(protocol.MAX_FRAME + 1))
    assert isinstance(reply, protocol.Refused) and "limit of 64 MiB" in reply.problem


def test_a_wrong_version_is_refused_with_the_fix(raw):
    [reply] = answers(raw, protocol.encode(Ask(7, version=99)))
    assert isinstance(reply, protocol.Refused) and reply.call == 7 and "%tfold restart" in reply.fix


def test_images_unasked_and_wrong_images_are_refused(raw):
    [reply] = answers(raw, protocol.encode(Images(7, "abc00000", [b"x"])))
    assert "waits for images" in reply.problem
    submit = Submit(7, "abc00000", [Message("user", [ImageRef("0" * 64, "a")])])
    for data, words in (([b"x"], "not its own"), ([], "1 images were asked for, 0 came")):
        [need] = answers(raw, protocol.encode(submit))
        assert need.digests == ["0" * 64]
        [reply] = answers(raw, protocol.encode(Images(7, "abc00000", data)))
        assert isinstance(reply, protocol.Refused) and words in reply.problem


def test_a_connection_without_a_lock_has_no_claim_to_foreground_runs(raw, engine):
    raw.send(protocol.encode(Submit(7, "abc00000", [Message("user", [Text("forever")])])))
    assert isinstance(protocol.decode_reply(raw.recv()), protocol.Accepted)
    handle = engine.follow("abc00000")
    assert handle.wait(LONG) and handle.record.status == "stopped"


class Socket:
    """A client that takes `room` frames and then no more, or is gone."""

    def __init__(self, room: int = 10**9, gone: bool = False):
        self.room, self.gone, self.got = room, gone, []

    def send_multipart(self, frames, flags, copy):
        if self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if not self.room:
            raise zmq.Again
        self.room -= 1
        self.got.append(protocol.decode_reply(frames[1]))


def committed(i: int) -> msgspec.Raw:
    return msgspec.Raw(protocol.encode(Committed("abc00000", 0, Round(1.0), [Token(i, "x")])))


def test_events_are_batched_in_order():
    peer, socket = Peer(b"p", {"abc00000"}), Socket()
    for i in range(1000):
        peer.event("abc00000", committed(i))
    peer.event("other000", committed(-1))
    peer.reply(protocol.Okay(1))
    assert peer.pump(socket, lambda run: None) == SENT
    *updates, okay = socket.got
    assert [e.tokens[0].id for update in updates for e in update.events] == list(range(1000)) and len(updates) == 2
    assert okay == protocol.Okay(1)


def test_a_client_that_does_not_read_costs_a_bounded_queue_and_gets_the_whole_record_later():
    peer, socket = Peer(b"p", {"abc00000"}), Socket(room=5)
    run = Run(id="abc00000", created=0.0, streams=[Stream()])
    for i in range(500):
        run.apply(Committed("abc00000", 0, Round(1.0), [Token(i, "x")]))
        peer.event("abc00000", committed(i))
        if i == 100:
            peer.reply(protocol.Okay(1))
        assert peer.pump(socket, lambda id: protocol.encode(Record(0, run))) == (SENT if i < 5 else BLOCKED)
        assert len(peer.frames) <= BACKLOG + 1
    socket.room = 100
    assert peer.pump(socket, lambda id: protocol.encode(Record(0, run))) == SENT
    copy = Run(id="abc00000", created=0.0, streams=[Stream()])
    for reply in socket.got:
        if isinstance(reply, Record):
            copy = reply.record
        elif isinstance(reply, protocol.Update):
            for event in reply.events:
                copy.apply(event)
    assert copy == run and protocol.Okay(1) in socket.got


def test_a_client_that_asks_and_never_reads_is_forgotten(monkeypatch):
    monkeypatch.setattr(peers, "HOARD", 1000)
    peer, socket = Peer(b"p"), Socket(room=0)
    for _ in range(BACKLOG + 1):
        assert peer.pump(socket, lambda run: None) in (SENT, BLOCKED)
        peer.reply(protocol.Refused(1, "x" * 20, ""))
    assert peer.pump(socket, lambda run: None) == GONE


def test_a_client_that_is_gone_is_seen_at_the_next_frame():
    peer = Peer(b"p")
    peer.reply(protocol.Okay(1))
    assert peer.pump(Socket(gone=True), lambda run: None) == GONE


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_another_user_gets_no_answer(where, engine, client):
    where.path.chmod(0o755)
    where.socket.chmod(0o777)
    code = f"""
import zmq
os.setuid(65534)
s = zmq.Context().socket(zmq.DEALER); s.linger = 0
s.connect("ipc://{where.socket}")
from tfmagic import protocol
from tfmagic.engine.resident import peers
s.send(protocol.encode(protocol.Ask(1)))
print(s.poll(1000), flush=True); os._exit(0)
"""
    c = client(code)
    assert c.stdout.readline() == "0\n"
    where.path.chmod(0o700)
