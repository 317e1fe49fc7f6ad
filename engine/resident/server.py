"""The socket loop: the process's main thread. It answers at once and never waits for the engine."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import zmq

from ... import __version__, protocol
from ...errors import Refusal, TfmagicError
from ...protocol import Accepted, Ask, Cancel, Done, Follow, Images, List, Listing, Okay, Record, Refused, State, Submit
from .intake import STOPPED, Intake, Pending
from .log import ENDED, cap, log
from .peers import Peer, Peers
from .place import Failure, Info, Place
from .runs import MIB, Chats, Runs, begun
from .worker import Inbox, Worker

FLUSH = 0.025
"""Seconds between updates of a run that only makes progress."""
RETRY = 0.03
"""Seconds until a client that does not read is tried again."""
TICK = 0.3
"""Seconds between looks at who is alive."""
GRACE = 1.5
"""Seconds that running runs have to stop in when the engine ends."""
SAVING = 1.2
"""Seconds that states have to get to disk in when the engine ends; clients wait for three in all."""
SETTINGS = (
    *("prompt_cache_gib", "context", "learn_conversations", "spill_gib"),
    *("learn_dir", "learn_gib", "learn_min_free_gib", "learn_daily_gib", "drafter", "drafter_bits", "form", "kv_cache"),
)
"""The options that `engine.open.Settings` takes."""


class Server:
    def __init__(self, place: Place, options: argparse.Namespace, open: Callable):
        """`open(model, device, settings, emit, progress)` gives the opened model; see `worker.open_model`."""
        self.place, self.options = place, options
        settings = {name: getattr(options, name) for name in SETTINGS}
        self.info = Info(
            pid=os.getpid(),
            started=time.time(),
            protocol=protocol.VERSION,
            package=__version__,
            model=options.model,
            device=options.device,
            settings=settings | {"idle_minutes": options.idle_minutes},
        )
        self.phase, self.detail = "starting", "starting"
        self.opened: Any = None
        self.runs, self.chats, self.inbox = Runs(), Chats(), Inbox()
        self.intake = Intake(self.chats, self.inbox, self._accept)
        self.asked: dict[str, Pending] = {}
        """Accepted runs that continue a chat, until they end."""
        self.worker = Worker(
            open=lambda progress: open(options.model, options.device, settings, self.inbox.emit, progress),
            progress=lambda text: self.inbox.call(lambda: self._announce("loading", text)),
            ready=lambda opened: self.inbox.call(lambda: self._ready(opened)),
            failed=lambda failure: self.inbox.call(lambda: self._fail(failure)),
        )
        self.flushed = self.ticked = 0.0
        self.used = time.monotonic()
        """When a request came last, or a run was going on."""
        self.deadline: float | None = None
        """When to end whatever still runs; None: not stopping."""
        self.code = 0
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.peers = Peers(place, self.socket, self._record, self._left)
        self.answers = {
            Submit: self.submit,
            Images: self.intake.take,
            Cancel: self.cancel,
            Follow: self.follow,
            List: self.list,
            protocol.Cache: self.cache,
            Ask: self.ask,
            protocol.Stop: self.stop,
        }

    # The loop ------------------------------------------------------------------------------------

    def serve(self) -> int:
        """Until told to stop, or idle for long. Returns the exit status."""
        self.place.clean()
        for option, value in (
            (zmq.IPC_FILTER_UID, os.getuid()),  # the kernel checks who connects
            (zmq.ROUTER_MANDATORY, 1),  # tell when a client cannot be reached or does not read
            (zmq.SNDHWM, 64),
            (zmq.RCVHWM, 64),
            (zmq.MAXMSGSIZE, 2 * protocol.MAX_FRAME),
        ):
            self.socket.setsockopt(option, value)
        self.socket.bind(f"ipc://{self.place.socket}")
        signal.signal(signal.SIGTERM, lambda *_: self.inbox.call(self._end))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.place.write(self.info)
        self.worker.start()
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.inbox.fd, zmq.POLLIN)
        while not self._over():
            poller.poll(math.ceil(1e3 * self._patience()))
            self._receive()
            self._drain()
            self.peers.flush()
            self._tick()
        return self._close()

    def _patience(self) -> float:
        """Seconds until the clock has something to do."""
        if self.inbox.flush_due:
            return max(0.0, self.flushed + FLUSH - time.monotonic())
        return RETRY if self.peers.blocked or self.deadline else TICK

    def _receive(self) -> None:
        for _ in range(100):  # then events have their turn
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.used = time.monotonic()
            self._answer(self.peers.get(identity), b"".join(frames))

    def _answer(self, peer: Peer, frame: bytes) -> None:
        try:
            if len(frame) > protocol.MAX_FRAME:
                size, limit = len(frame) // MIB, protocol.MAX_FRAME // MIB
                raise Refusal(f"A request of {size} MiB is over the limit of {limit} MiB.", "Send smaller images.")
            try:
                ask = protocol.decode_request(frame)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                fix = "If tfmagic was updated meanwhile, restart the engine: %tfold restart"
                raise Refusal(f"The request is not understood: {error}.", fix) from None
            self.answers[type(ask)](peer, ask)
        except TfmagicError as error:
            peer.reply(Refused(_call(frame), error.problem, error.fix))

    def _drain(self) -> None:
        """Take what the other threads have, at once if it is urgent, else when the next flush is due."""
        self.inbox.clear()
        if not self.inbox.urgent and time.monotonic() - self.flushed < FLUSH:
            self.inbox.flush_due = bool(self.inbox.items)
            return
        # Cleared before the items are taken: who appends later finds them cleared and wakes the loop again.
        self.inbox.urgent = self.inbox.flush_due = False
        for _ in range(len(self.inbox.items)):
            item = self.inbox.items.popleft()
            if isinstance(item, protocol.Event):
                self._event(item)
                self.flushed = time.monotonic()
            else:
                item()

    def _event(self, event: protocol.Event) -> None:
        """Fold an event into its record and queue it for whoever follows the run."""
        data = msgspec.Raw(protocol.encode(event))  # before folding: a later event may change a token of this one
        try:
            record = self.runs.fold(event)
        except Exception as error:  # an event that does not fit its run costs that run alone
            traceback.print_exc()
            self._cancel([event.run])
            what = f"The run's record broke at {type(event).__name__}: {error!r}\nSee tfmagic logs."
            return self._event(Done(event.run, "failed", 0.0, what))
        if record is None:
            return
        self.peers.publish(event.run, data, record.finished)
        if record.finished and (asked := self.asked.pop(event.run, None)):
            self.chats.end(record, asked.messages, asked.encoded)
            if record.status == "done" and asked.ask.params.cache == "on":
                self.intake.settle(asked, record, self.worker.work.set)

    def _record(self, run: str) -> bytes | None:
        return protocol.encode(Record(0, self.runs.find(run).record)) if run in self.runs else None

    # Answers -------------------------------------------------------------------------------------

    def ask(self, peer: Peer, ask: Ask) -> None:
        if ask.version != protocol.VERSION:
            raise Refusal(
                f"The engine speaks protocol {protocol.VERSION} (tfmagic {__version__}), this client {ask.version}.",
                "Restart the engine: %tfold restart",
            )
        peer.reply(self._state(ask.call))

    def _state(self, call: int) -> State:
        state = State(
            call=call,
            version=protocol.VERSION,
            phase=self.phase,
            detail=self.detail,
            pid=self.info.pid,
            model=self.options.model or "embedded",
            device=self.options.device,
            started=self.info.started,
            runs=len(self.runs.entries),
            memory=psutil.Process().memory_info().rss,
        )
        if self.opened is None:
            return state
        counts = self.opened.engine.status()
        return msgspec.structs.replace(
            state,
            model=self.opened.name,
            device=str(self.opened.device),
            context=self.opened.context,
            drafter=self.opened.drafter,
            **{name: counts[name] for name in State.__struct_fields__ if name in counts},
        )

    def list(self, peer: Peer, ask: List) -> None:
        peer.reply(Listing(ask.call, self.runs.listing()))

    def cache(self, peer: Peer, ask: protocol.Cache) -> None:
        if self.opened is None:
            raise Refusal(f"The engine is not ready: {self.detail}.", "Wait until %tfold status says ready.")
        self.intake.pool.submit(self._look, peer, ask)

    def _look(self, peer: Peer, ask: protocol.Cache) -> None:
        """On a thread of the pool, for a disk may be slow."""
        try:
            if ask.clear:
                self.opened.clear(self.worker.work.set)
            answer = protocol.Holdings(ask.call, *self.opened.kept())
        except OSError as error:
            answer = Refused(ask.call, f"The states on disk are out of reach: {error.strerror}.", "See tfmagic logs.")
        self.inbox.call(lambda: peer.reply(answer))

    def follow(self, peer: Peer, ask: Follow) -> None:
        record = self.runs.find(ask.run).record
        peer.reply(Record(ask.call, record))
        if not record.finished:
            peer.following.add(record.id)

    def cancel(self, peer: Peer, ask: Cancel) -> None:
        if ask.run is None:
            runs = [*self.intake.of(peer), *self.runs.unfinished(peer.identity)]
        else:
            runs = [ask.run if ask.run in self.intake.pending else self.runs.find(ask.run).record.id]
        self._cancel(runs)
        peer.reply(Okay(ask.call))

    def stop(self, peer: Peer, ask: protocol.Stop) -> None:
        peer.reply(Okay(ask.call))
        self._end()

    def submit(self, peer: Peer, ask: Submit) -> None:
        if self.phase != "ready":
            raise Refusal(f"The engine is not ready: {self.detail}.", "Wait until %tfold status says ready.")
        if ask.run in self.runs:
            raise Refusal(f"The run id {ask.run!r} is taken.", "Choose another.")
        self.intake.submit(peer, ask)

    def _accept(self, pending: Pending, request: Any) -> None:
        if self.deadline:
            raise STOPPED
        self.opened.engine.submit(request)  # or raises Refusal
        self.worker.work.set()
        # The engine's events wait in the inbox, so none of them overtakes what is said and noted here.
        ask, peer, chat = pending.ask, pending.peer, pending.chat
        turn = chat.turns + 1 if chat else 1
        record = begun(ask, pending.messages, pending.created, turn, self.opened, request)
        if chat is not None:
            self.asked[ask.run] = pending
        self.runs.add(record, None if ask.background else peer.identity)
        peer.reply(Accepted(ask.call, record))
        peer.following.add(ask.run)

    def _cancel(self, runs: list[str]) -> None:
        for run in runs:
            if run in self.intake.pending:
                self.intake.cancel(run)
            elif not self.runs.find(run).record.finished:
                self.opened.engine.cancel(run)
                self.worker.work.set()

    # Life ----------------------------------------------------------------------------------------

    def _ready(self, opened: Any) -> None:
        self.opened = self.intake.opened = opened
        self._announce("ready", "ready")

    def _announce(self, phase: str, detail: str) -> None:
        if self.deadline:
            return
        self.phase, self.detail = phase, detail
        log(phase if phase == detail else f"{phase}: {detail}")
        for peer in self.peers:
            peer.reply(self._state(0))

    def _tick(self) -> None:
        """Look who is alive, and whether anybody needs the engine."""
        now = time.monotonic()
        if now - self.ticked < TICK:
            return
        self.ticked = now
        self.peers.reap()
        if self.intake.pending or self.runs.unfinished() or self.phase != "ready":
            self.used = now
        elif 0 < 60 * self.options.idle_minutes < now - self.used:
            log(f"idle for {self.options.idle_minutes:g} minutes")
            self._end()
        if not self.place.lock.exists():
            log("the runtime directory is gone, so nobody can find this engine any more")
            self._end()
        cap(self.place)
        if now // 3600 != (now - TICK) // 3600:
            self.place.touch()

    def _left(self, peer: Peer) -> None:
        """A client is gone: its foreground runs end, and so does what it was about to submit."""
        self._cancel([*self.intake.of(peer), *self.runs.unfinished(peer.identity)])

    def _end(self) -> None:
        """Cancel what runs, give it `GRACE` seconds, then leave."""
        if self.deadline:
            return
        self._announce("stopping", "stopping")
        self.deadline = time.monotonic() + GRACE
        self._cancel([*self.intake.pending, *self.runs.unfinished()])

    def _fail(self, failure: Failure) -> None:
        """The engine cannot go on: leave word in `engine.json`, tell every run, end at once."""
        log(failure.problem)
        self.info.failure = failure
        self.code, self.deadline = 1, time.monotonic()
        self._end_runs("failed", f"{failure.problem}\n{failure.fix}".strip())

    def _end_runs(self, status: str, error: str | None = None) -> None:
        for run in self.runs.unfinished():
            ms = 1e3 * (time.time() - self.runs.find(run).record.created)
            self._event(Done(run, status, ms, error))

    def _over(self) -> bool:
        if not self.deadline:
            return False
        return time.monotonic() >= self.deadline or not (self.intake.pending or self.runs.unfinished())

    def _close(self) -> int:
        self._end_runs("stopped")
        self.peers.flush()
        self.socket.close(linger=200)
        if self.opened is not None:
            self.opened.close(SAVING)
        self.context.term()
        self.place.clean()
        if self.info.failure:
            with contextlib.suppress(OSError):  # the directory may be gone
                self.place.write(self.info)
        log(ENDED)
        return self.code


class _Call(msgspec.Struct):
    call: int = 0


_decode_call = msgspec.msgpack.Decoder(_Call).decode


def _call(frame: bytes) -> int:
    """The number of a request that may be otherwise malformed; 0 when it has none."""
    try:
        return _decode_call(frame).call
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
