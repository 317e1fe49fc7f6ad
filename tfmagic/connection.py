"""One connection to the resident engine: a socket that one thread owns, calls and handles that any thread may use."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from . import protocol
from .engine.resident.launch import last_words
from .engine.resident.log import ENDED
from .engine.resident.place import Place, take
from .errors import EngineDied, EngineFailed, Refusal, TfmagicError
from .protocol import Accepted, Cancel, Need, Record, Refused, State, Update
from .run import Run

PROBE = 0.3
"""Seconds between looks at the engine's lock."""
HANGING = 1.0
"""Seconds between the two signs of an engine's end, a free lock and a closed connection, when one is enough."""
CUT = EngineDied("The engine has cut the connection.", "Connect again; what the engine says: tfmagic logs")


class Handle:
    """A run under way: its record, folded as the events come, and the ways to wait for it and to stop it."""

    def __init__(self, connection: Connection, record: Run):
        self._connection = connection
        self.engine: Any = None
        """Kept, because an engine object that is no longer referenced closes its connection."""
        self.record = record
        self.version = 0
        """Grows with every change of the record."""

    @property
    def id(self) -> str:
        return self.record.id

    def wait(self, timeout: float | None = None) -> bool:
        """True once the run is finished; False after `timeout` seconds.

        Raises EngineDied when the engine went away. A KeyboardInterrupt passes at once; the run goes on.
        """
        self._connection.wait_for(lambda: self.record.finished, timeout)
        return self.record.finished

    def changed(self, version: int, timeout: float | None = None) -> int:
        """The record's version, as soon as it is not `version`, the run is finished, or `timeout` seconds are over.

        Raises EngineDied when the engine went away.
        """
        self._connection.wait_for(lambda: self.version != version or self.record.finished, timeout)
        return self.version

    def cancel(self) -> None:
        """Stop the run and keep what it has said. Does not wait; nothing happens to a finished run."""
        if not self.record.finished:
            self._connection.send(Cancel(0, self.record.id))

    def pieces(self, stream: int = 0):
        """The text of one stream in pieces, as they come. Raises EngineDied, or EngineFailed when the run fails."""
        sent = 0
        while True:
            version, finished = self.version, self.record.finished  # read before the text, which only grows
            text = self.record.streams[stream].text
            if len(text) > sent:
                yield text[sent:]
                sent = len(text)
            if finished:
                check(self.record)
                return
            self.changed(version)

    def __repr__(self) -> str:
        return f"<Handle of {self.record!r}>"


def check(record: Run) -> Run:
    """The record, or EngineFailed when the run failed."""
    if record.status == "failed":
        problem, _, fix = (record.error or "The run failed.").partition("\n")
        raise EngineFailed(problem, fix or "See the engine's log: %tfold logs")
    return record


class Call:
    """A request that waits for its answer."""

    def __init__(self, images: dict[str, bytes] | None = None):
        self.images = images or {}
        """What a `Need` may ask for, by digest."""
        self.reply: Any = None
        self.handle: Handle | None = None


class Connection:
    """Connects on construction. Every method may be called from any thread; none after a fork."""

    def __init__(self, place: Place, pid: int):
        self.place, self.engine_pid, self.pid = place, pid, os.getpid()
        self.name = f"client-{os.getpid()}-{secrets.token_hex(4)}"
        self.error: TfmagicError | None = None
        """Why the connection is over; None while it lives."""
        self.listener: Callable[[State], object] | None = None
        """Told of every State that comes unasked, on the reader thread."""
        self._lock = take(place.path / self.name)
        self._changed = threading.Condition()
        self._calls: dict[int, Call] = {}
        self._handles: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._outbox: deque[bytes] = deque()
        self._wake: int | None
        self._fd, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.ROUTING_ID, self.name.encode()),
            (zmq.LINGER, 0),
            # What was meant for one engine is not for the next. Not -1: that drops what is unread at a hang-up.
            (zmq.RECONNECT_IVL, 3_600_000),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 64),
        ):
            self._socket.setsockopt(option, value)
        ends = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self._monitor = self._socket.get_monitor_socket(ends)
        self._socket.connect(f"ipc://{place.socket}")
        self._thread = threading.Thread(target=self._read, name="tfmagic", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.error is None and self.pid == os.getpid()

    # For callers ---------------------------------------------------------------------------------

    def send(self, request: protocol.Request) -> None:
        """Queue a request whose answer nobody waits for."""
        self._put(protocol.encode(request))

    def call(
        self,
        make: Callable[[int], protocol.Request],
        timeout: float | None = None,
        images: dict[str, bytes] | None = None,
    ) -> Call:
        """Send `make(call number)` and wait for the answer, at most `timeout` seconds. `images`: see `Call`.

        Raises Refusal when that is the answer, EngineDied, or TfmagicError when none comes.
        """
        number, call = next(self._numbers), Call(images)
        frame = protocol.encode(make(number))
        if len(frame) > protocol.MAX_FRAME:
            raise Refusal(f"The request has {len(frame) >> 20} MiB; the limit is 64 MiB.", "Send a shorter prompt.")
        self._calls[number] = call
        try:
            self._put(frame)
            if not self.wait_for(lambda: call.reply is not None, timeout):
                problem = f"The engine (process {self.engine_pid}) does not answer."
                raise TfmagicError(problem, "End it: tfmagic stop. Its log: tfmagic logs")
        finally:
            self._calls.pop(number, None)
        if isinstance(call.reply, Refused):
            raise Refusal(call.reply.problem, call.reply.fix)
        return call

    def wait_for(self, true: Callable[[], bool], timeout: float | None = None) -> bool:
        """Until `true()`; False after `timeout` seconds. Raises why the connection is over, if it is over first."""
        if self.pid != os.getpid():
            raise TfmagicError("This run belongs to the process that forked this one.", "Use engine.follow(run) here.")
        with self._changed:
            self._changed.wait_for(lambda: true() or self.error, timeout)
            if not (done := true()) and self.error:
                raise self._copy()
            return done

    def close(self) -> None:
        """Leave. The engine stops the foreground runs of this connection."""
        if self.pid != os.getpid():
            return
        self._end(TfmagicError("The connection to the engine is closed.", "Open another: tfmagic.connect()"))
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _copy(self) -> TfmagicError:
        """Why it is over, anew for every raise: an exception that is raised twice collects both tracebacks."""
        return type(self.error)(self.error.problem, self.error.fix)

    # On the reader thread ------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._loop()
        except Exception as error:
            self._end(EngineDied(f"The connection to the engine broke: {error!r}.", CUT.fix))
        finally:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._context.term()
            with self._changed:  # nobody may write to a number that is another file's by then
                os.close(self._fd)
                os.close(self._wake)
                self._wake = None
            with contextlib.suppress(OSError):
                os.unlink(self.place.path / self.name)
            if self._lock is not None:
                os.close(self._lock)

    def _loop(self) -> None:
        """Until the engine is gone: it has hung up, so that all its words are here, and its lock is free."""
        poller = zmq.Poller()
        for source in (self._socket, self._fd, self._monitor):
            poller.register(source, zmq.POLLIN)
        probed, missed = time.monotonic(), None
        hung_up = gone = False
        while self.error is None:
            ready = dict(poller.poll(1e3 * (PROBE if missed is None else 0.01)))
            if self._fd in ready:
                os.read(self._fd, 4096)
            while self._outbox:
                self._socket.send(self._outbox.popleft(), zmq.NOBLOCK)
            if self._monitor in ready:
                self._monitor.recv_multipart()
                hung_up = True
            if self._socket in ready:
                self._receive()
            now = time.monotonic()
            if hung_up or now - probed >= PROBE:
                probed, gone = now, self.place.engine() != self.engine_pid
            if (hung_up or gone) and missed is None:
                missed = now
            if (hung_up and gone) or (missed is not None and now - missed > HANGING):
                self._receive()
                self._end(died(self.place, self.engine_pid) if gone else CUT)

    def _receive(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            with self._changed:
                self._take(protocol.decode_reply(frame))
                self._changed.notify_all()

    def _take(self, reply: protocol.Reply) -> None:
        if isinstance(reply, Update):
            for event in reply.events:
                if (handle := self._handles.get(event.run)) is not None:
                    handle.record.apply(event)
                    handle.version += 1
            return
        call = self._calls.get(reply.call)
        if isinstance(reply, Need):
            data = [call.images[digest] for digest in reply.digests if digest in call.images] if call else []
            self._outbox.append(protocol.encode(protocol.Images(reply.call, reply.run, data)))
            self._notify()
            return
        if isinstance(reply, Accepted | Record):
            # Made here, before any of the run's events is read.
            handle = self._handles.get(reply.record.id)
            if handle is None:
                handle = self._handles[reply.record.id] = Handle(self, reply.record)
            for name in Run.__struct_fields__:  # in place: whoever has the record goes on seeing it grow
                setattr(handle.record, name, getattr(reply.record, name))
            handle.version += 1
            if call:
                call.handle = handle
        if isinstance(reply, State) and call is None and self.listener:
            self.listener(reply)
        if call:
            call.reply = reply

    def _put(self, frame: bytes) -> None:
        if self.pid != os.getpid():
            raise TfmagicError("This connection belongs to the process that forked this one.", "Connect again here.")
        if self.error:
            raise self._copy()
        self._outbox.append(frame)
        self._notify()

    def _notify(self) -> None:
        with self._changed, contextlib.suppress(BlockingIOError):  # full: it has been told often enough
            if self._wake is not None:
                os.write(self._wake, b"\0")

    def _end(self, error: TfmagicError) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        self._notify()


def died(place: Place, pid: int) -> TfmagicError:
    """Why the engine of this process id is no more, from what it left behind."""
    info = place.read()
    if info is not None and info.pid == pid and info.failure:
        return EngineFailed(info.failure.problem, info.failure.fix or last_words(place))
    afresh = "The next cell, or tfmagic.connect(), starts a fresh one."
    if place.tail(1)[-1:] and place.tail(1)[-1].endswith(ENDED):
        return EngineDied("The engine was stopped.", afresh)
    return EngineDied(f"The engine (process {pid}) died.", f"{afresh} {last_words(place)}")
