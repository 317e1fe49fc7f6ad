"""What is owed to each client, in order, in bounded memory.

Frames wait in a short queue when a client does not read. When that overflows, its events are dropped and each of their
runs is owed whole instead: one `Record` once the client reads again. So a slow or a stopped client costs a bounded
queue, and no token is ever lost. One that hoards answers is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import zmq

from ... import protocol
from .place import CLIENT, Place, holder

BACKLOG = 64
"""Frames that may wait for one client, beside what ZeroMQ holds."""
HOARD = 256 << 20
"""Bytes of answers that may wait for one client."""
BATCH = 512
"""Events in one Update at most."""
SENT, BLOCKED, GONE = "sent", "blocked", "gone"


@dataclass
class Frame:
    data: bytes
    runs: frozenset[str] | None = None
    """The runs whose events it carries, or whose whole record; None: a reply, which is never dropped."""


@dataclass
class Peer:
    """One connection. `identity` is its ZeroMQ routing id and the name of its lock file."""

    identity: bytes
    following: set[str] = field(default_factory=set)
    events: list[tuple[str, msgspec.Raw]] = field(default_factory=list)
    """Encoded events that no frame carries yet."""
    frames: deque[Frame] = field(default_factory=deque)
    owed: set[str] = field(default_factory=set)
    """Runs whose events were dropped and whose whole record is to be sent."""

    def reply(self, answer: protocol.Reply) -> None:
        """Queue an answer behind everything that happened before it."""
        self.pack()
        self.frames.append(Frame(protocol.encode(answer)))

    def event(self, run: str, data: msgspec.Raw) -> None:
        if run in self.following and run not in self.owed:
            self.events.append((run, data))

    def pack(self) -> None:
        """Move events into frames; give up on events when too many frames wait."""
        for at in range(0, len(self.events), BATCH):
            part = self.events[at : at + BATCH]
            update = protocol.Update([data for _, data in part])
            self.frames.append(Frame(protocol.encode(update), frozenset(run for run, _ in part)))
        self.events = []
        if len(self.frames) > BACKLOG:
            self.owed.update(*(frame.runs for frame in self.frames if frame.runs))
            self.frames = deque(frame for frame in self.frames if frame.runs is None)

    def pump(self, socket: zmq.Socket, record: Callable[[str], bytes | None]) -> str:
        """Send what the client takes now: SENT all, BLOCKED, or GONE. `record(run)`: the Record frame of a run owed."""
        self.pack()
        while self.frames or self.owed:
            if not self.frames:
                run = self.owed.pop()
                if data := record(run):
                    self.frames.append(Frame(data, frozenset([run])))
                continue
            try:
                socket.send_multipart([self.identity, self.frames[0].data], zmq.NOBLOCK, copy=False)
            except zmq.Again:
                hoards = len(self.frames) > BACKLOG and sum(len(frame.data) for frame in self.frames) > HOARD
                return GONE if hoards else BLOCKED
            except zmq.ZMQError:  # EHOSTUNREACH: the connection is closed
                return GONE
            self.frames.popleft()
        return SENT


class Peers:
    """All connections of the engine."""

    def __init__(self, place: Place, socket: zmq.Socket, record: Callable[[str], bytes | None], left: Callable):
        """`record`: as of `Peer.pump`; `left(peer)` is called when a client is gone."""
        self.place, self.socket, self.record, self.left = place, socket, record, left
        self.peers: dict[bytes, Peer] = {}
        self.blocked = False
        """Whether some client does not take what it is owed."""

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self.peers.values()))

    def get(self, identity: bytes) -> Peer:
        return self.peers.setdefault(identity, Peer(identity))

    def publish(self, run: str, data: msgspec.Raw, last: bool) -> None:
        """Queue an event of a run, perhaps its last, for whoever follows it."""
        for peer in self:
            peer.event(run, data)
            if last:
                peer.following.discard(run)

    def flush(self) -> None:
        self.blocked = False
        for peer in self:
            result = peer.pump(self.socket, self.record)
            self.blocked |= result == BLOCKED
            if result == GONE:
                self.forget(peer)

    def reap(self) -> None:
        """Forget who no longer holds the lock of its connection's name."""
        for peer in self:
            if not self._locks(peer) or holder(self.place.path / peer.identity.decode()) is None:
                self.forget(peer)

    def forget(self, peer: Peer) -> None:
        self.peers.pop(peer.identity, None)
        if self._locks(peer):
            (self.place.path / peer.identity.decode()).unlink(missing_ok=True)
        self.left(peer)

    def _locks(self, peer: Peer) -> bool:
        """Whether the client has named its connection as ours do, and may thus have a lock file."""
        return CLIENT.fullmatch(peer.identity.decode("ascii", "replace")) is not None
