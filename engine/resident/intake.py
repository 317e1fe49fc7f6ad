"""A submission's way to the engine: checked, its images gathered, its prompt prepared; then accepted or refused.

Until it is accepted it is no run: a refusal leaves nothing behind.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ... import pictures
from ...errors import Refusal, TfmagicError
from ...protocol import ImageRef, Images, Message, Need, Refused, Submit, Text
from ...run import Run
from .peers import Peer
from .runs import MIB, Chat, Chats, ImageStore, digests
from .worker import Inbox

TEXT_LIMIT = 16 * MIB
"""Characters of one submission's text."""
IMAGES_COUNT = 256
STREAMS_LIMIT = 256
PENDING_LIMIT = 256
RUN_ID = re.compile(r"[0-9a-z-]{8,32}")
STOPPED = Refusal("The run was stopped before it began.", "Run it again.")


@dataclass
class Pending:
    """A submission between its frame and the engine."""

    peer: Peer
    ask: Submit
    chat: Chat | None
    created: float = field(default_factory=time.time)
    submitted: float = field(default_factory=time.perf_counter)
    encoded: dict[str, bytes] = field(default_factory=dict)
    """Its images' bytes by digest, those of the chat's earlier turns among them."""
    preparing: bool = False
    cancelled: bool = False

    @property
    def messages(self) -> list[Message]:
        """Everything that is asked, earlier turns of the chat first."""
        if self.chat is None or not self.chat.turns:
            return self.ask.messages
        return [*self.chat.messages, *(message for message in self.ask.messages if message.role != "system")]

    @property
    def missing(self) -> list[str]:
        return [digest for digest in digests(self.ask.messages) if digest not in self.encoded]


class Intake:
    """All of it on the socket loop, but for `_prepare`."""

    def __init__(self, chats: Chats, inbox: Inbox, accept: Callable[[Pending, Any], None]):
        """`accept(pending, request)` is called on the socket loop when a request is ready for the engine."""
        self.chats, self.inbox, self.accept = chats, inbox, accept
        self.images = ImageStore()
        self.pending: dict[str, Pending] = {}
        self.opened: Any = None
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="prepare")

    def submit(self, peer: Peer, ask: Submit) -> None:
        """Raises Refusal for what is wrong at a glance; everything else is answered later."""
        check(ask)
        if ask.run in self.pending:
            raise Refusal(f"The run id {ask.run!r} is taken.", "Choose another.")
        if len(self.pending) >= PENDING_LIMIT:
            raise Refusal(f"{PENDING_LIMIT} submissions are being prepared.", "Submit again when some have begun.")
        chat = self.chats.begin(ask) if ask.chat is not None else None
        pending = self.pending[ask.run] = Pending(peer, ask, chat)
        if chat is not None:
            self.chats.hold(ask.chat, chat, ask.run)
            pending.encoded |= chat.images
        for digest in pending.missing:
            if (data := self.images.get(digest)) is not None:
                pending.encoded[digest] = data
        self._go_on(pending)

    def _go_on(self, pending: Pending) -> None:
        if missing := pending.missing:
            pending.peer.reply(Need(pending.ask.call, pending.ask.run, missing))
        else:
            pending.preparing = True
            self.pool.submit(self._prepare, pending)

    def take(self, peer: Peer, ask: Images) -> None:
        """The bytes that a `Need` asked for."""
        pending = self.pending.get(ask.run)
        if pending is None or pending.peer is not peer or pending.preparing:
            raise Refusal(f"No submission {ask.run!r} waits for images.", "Submit the run first.")
        missing = pending.missing
        try:
            if len(ask.data) != len(missing):
                raise Refusal(f"{len(missing)} images were asked for, {len(ask.data)} came.", "Send all, in order.")
            for digest, data in zip(missing, ask.data):
                self.images.put(digest, data, pictures.LIMIT)
                pending.encoded[digest] = data
        except Refusal as refusal:
            self.refuse(pending, refusal)
        else:
            self._go_on(pending)

    def settle(self, asked: Pending, record: Run, wake: Callable[[], None]) -> None:
        """The turn of a chat is over: let the engine prepare for the next one while nobody needs it."""
        label = f"chat “{record.chat}”, turn {record.turn}"
        self.pool.submit(self._settle, list(asked.chat.messages), asked.encoded, label, wake)

    def _settle(self, messages: list[Message], encoded: dict[str, bytes], label: str, wake: Callable) -> None:
        try:
            self.opened.settle(messages, encoded, label)
        except TfmagicError:  # a next turn would be refused, too
            return
        except Exception:
            traceback.print_exc()
        wake()

    def cancel(self, run: str) -> None:
        """Refuse a pending submission, as soon as nothing works on it."""
        pending = self.pending[run]
        pending.cancelled = True
        if not pending.preparing:
            self.refuse(pending, STOPPED)

    def of(self, peer: Peer) -> list[str]:
        return [run for run, pending in self.pending.items() if pending.peer is peer]

    def refuse(self, pending: Pending, refusal: TfmagicError) -> None:
        del self.pending[pending.ask.run]
        if pending.chat is not None:
            self.chats.release(pending.ask.chat)
        pending.peer.reply(Refused(pending.ask.call, refusal.problem, refusal.fix))

    def _prepare(self, pending: Pending) -> None:
        """On a thread of the pool: everything that precedes the queue."""
        try:
            request = self._request(pending)
        except TfmagicError as error:
            refusal = error
        except Exception as error:
            traceback.print_exc()
            refusal = Refusal(f"The prompt could not be prepared: {type(error).__name__}: {error}", "See tfmagic logs.")
        else:
            return self.inbox.call(lambda: self._ready(pending, request))
        self.inbox.call(lambda: self.refuse(pending, refusal))

    def _request(self, pending: Pending) -> Any:
        from ..stream import Request

        ask, opened = pending.ask, self.opened
        total = sum(map(len, pending.encoded.values()))
        if total > pictures.TOTAL:
            raise Refusal(
                f"The images have {total / MIB:.1f} MiB encoded; the limit is {pictures.TOTAL // MIB} MiB a prompt.",
                "Send fewer or smaller ones, or begin another chat.",
            )
        prompt = opened.prepare(pending.messages, pending.encoded)
        return Request(
            run=ask.run,
            prompt=prompt,
            sampling=opened.sampling(ask.params, prompt),
            streams=ask.streams,
            submitted=pending.submitted,
            prepare_ms=1e3 * (time.perf_counter() - pending.submitted),
            detokenizer=opened.text.detokenizer,
            cache=ask.params.cache == "on",
            label=f"chat “{ask.chat}”, turn {pending.chat.turns + 1}" if pending.chat is not None else "",
        )

    def _ready(self, pending: Pending, request: Any) -> None:
        try:
            if pending.cancelled:
                raise STOPPED
            self.accept(pending, request)
        except TfmagicError as refusal:
            self.refuse(pending, refusal)
        else:
            del self.pending[pending.ask.run]


def check(ask: Submit) -> None:
    """Refuse what is plainly wrong, before any work. Raises Refusal."""
    roles = [message.role for message in ask.messages]
    texts = sum(len(part.text) for m in ask.messages for part in m.parts if isinstance(part, Text))
    refs = [part for m in ask.messages for part in m.parts if isinstance(part, ImageRef)]
    malformed = any(not re.fullmatch("[0-9a-f]{64}", ref.digest) for ref in refs)
    for wrong, problem, fix in (
        (not RUN_ID.fullmatch(ask.run), "The run's id is malformed.", "Use 8 to 32 characters of 0-9, a-z and -."),
        (not roles or roles[-1] != "user", "The last message is not a user's.", "End the messages with a user turn."),
        ("system" in roles[1:], "A system message stands after others.", "Put one system message first."),
        (not 1 <= ask.streams <= STREAMS_LIMIT, f"{ask.streams} streams.", f"Ask for 1 to {STREAMS_LIMIT} streams."),
        (texts > TEXT_LIMIT, f"The text has {texts:,} characters.", f"The limit is {TEXT_LIMIT:,}; shorten it."),
        (not texts and not refs, "The prompt is empty.", "Write something in the cell."),
        (len(refs) > IMAGES_COUNT, f"The messages hold {len(refs)} images.", f"Send at most {IMAGES_COUNT}."),
        (malformed, "An image's digest is malformed.", "Give the SHA-256 of its encoded bytes, in hex."),
        (len(ask.chat or "x") > 200, "The chat's name is too long.", "Use at most 200 characters."),
        (ask.chat == "", "The chat's name is empty.", "Give it a name."),
        (ask.new and ask.chat is None, "A chat is to begin anew and none is named.", "Say which: chat=NAME."),
    ):
        if wrong:
            raise Refusal(problem, fix)
