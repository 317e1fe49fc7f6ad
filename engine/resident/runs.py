"""What the process keeps while kernels come and go: runs, conversations, and the images that were sent."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import Refusal
from ...protocol import Event, ImageRef, Message, Params, Submit, Text
from ...run import Picture, Run, Stream

MIB = 1 << 20


@dataclass
class Entry:
    record: Run
    owner: bytes | None
    """The connection that it dies with; None: it lives on its own."""
    size: int = 0
    """Bytes of the finished record; 0 while it runs."""


class Runs:
    """Records by id, oldest first. Running ones stay; finished ones are bounded in count and bytes, newest kept."""

    def __init__(self, count: int = 200, size: int = 64 * MIB):
        self.count, self.size = count, size
        self.entries: dict[str, Entry] = {}

    def __contains__(self, run: str) -> bool:
        return run in self.entries

    def add(self, record: Run, owner: bytes | None) -> None:
        self.entries[record.id] = Entry(record, owner)

    def find(self, run: str | None) -> Entry:
        """By id or its unique beginning; None: the newest. Raises Refusal."""
        if run in self.entries:
            return self.entries[run]
        matches = [id for id in self.entries if run is None or id.startswith(run)]
        if not matches:
            raise Refusal(f"No run {run!r} is kept." if run else "No run is kept yet.", "See what is kept: %tfold runs")
        if run is not None and len(matches) > 1:
            raise Refusal(f"{run!r} is the beginning of {len(matches)} runs.", f"Say which: {', '.join(matches[:5])}")
        return self.entries[matches[-1]]

    def fold(self, event: Event) -> Run | None:
        """Fold an event into its record, which is returned; None when the run is not known or is already finished."""
        entry = self.entries.get(event.run)
        if entry is None or entry.record.finished:
            return None
        entry.record.apply(event)
        if entry.record.finished:
            entry.size = len(msgspec.msgpack.encode(entry.record))
            self._trim()
        return entry.record

    def unfinished(self, owner: bytes | None = None) -> list[str]:
        """Ids of unfinished runs, of one connection if `owner` is given."""
        return [id for id, entry in self.entries.items() if not entry.record.finished and owner in (None, entry.owner)]

    def listing(self) -> list[Run]:
        """Newest first, without tokens."""
        return [_without_tokens(entry.record) for entry in reversed(self.entries.values())]

    def _trim(self) -> None:
        finished = [id for id, entry in self.entries.items() if entry.record.finished]
        total = sum(self.entries[id].size for id in finished)
        for id in finished[:-1]:
            if len(finished) <= self.count and total <= self.size:
                break
            total -= self.entries.pop(id).size
            finished.remove(id)


def _without_tokens(run: Run) -> Run:
    streams = [msgspec.structs.replace(stream, tokens=[]) for stream in run.streams]
    return msgspec.structs.replace(run, streams=streams)


class ImageStore:
    """Encoded bytes by SHA-256 (hex): a bounded, least-recently-used store."""

    def __init__(self, size: int = 256 * MIB):
        self.size, self.held = size, 0
        self.data: OrderedDict[str, bytes] = OrderedDict()

    def get(self, digest: str) -> bytes | None:
        if digest in self.data:
            self.data.move_to_end(digest)
        return self.data.get(digest)

    def put(self, digest: str, data: bytes, limit: int) -> None:
        """Raises Refusal when the bytes are over `limit` or are not those of the digest."""
        if len(data) > limit:
            raise Refusal(
                f"An image has {len(data) / MIB:.1f} MiB encoded; the limit is {limit // MIB} MiB.",
                "Send it smaller, or as JPEG.",
            )
        if hashlib.sha256(data).hexdigest() != digest:
            raise Refusal(f"The bytes sent for image {digest[:12]} are not its own.", "Send the image again.")
        if digest not in self.data:
            self.held += len(data)
        self.data[digest] = data
        while self.held > self.size and len(self.data) > 1:
            self.held -= len(self.data.popitem(last=False)[1])


@dataclass
class Chat:
    messages: list[Message] = field(default_factory=list)
    images: dict[str, bytes] = field(default_factory=dict)
    """What its messages show: kept with it, because a later turn's client may never have had them."""
    turns: int = 0
    running: str | None = None
    before: Chat | None = None
    """The one of the same name that this one is to replace, until it has a turn."""


class Chats:
    """Conversations by name. A turn is added when its run ends; a failed run leaves its chat as it was."""

    def __init__(self, count: int = 1000, size: int = 512 * MIB):
        self.count, self.size = count, size
        self.chats: OrderedDict[str, Chat] = OrderedDict()
        self.dropped: OrderedDict[str, None] = OrderedDict()
        """Names of the chats that went for others' room, as many as chats are kept: who goes on with one is told."""

    def begin(self, ask: Submit) -> Chat:
        """The chat that the submission continues, made if new. Raises Refusal when it may not be continued now."""
        dropped = ask.chat in self.dropped
        self.dropped.pop(ask.chat, None)
        if dropped and not ask.new:
            raise Refusal(
                f"The chat {ask.chat!r} is not kept any more: {self.count:,} newer ones or {self.size // MIB} MiB are.",
                "Hand in its turns as messages=, or run again to begin it anew.",
            )
        chat = self.chats.get(ask.chat) or Chat()
        if chat.running:
            raise Refusal(
                f"The chat {ask.chat!r} is still answering (run {chat.running}).",
                f"Wait for it, or stop it: %tfold cancel {chat.running}",
            )
        if ask.new:
            return Chat(before=chat if chat.turns else None)
        said = [message for message in ask.messages if message.role == "system"]
        if chat.turns and said and said != chat.messages[:1]:  # the same again is no change: a cell may be run twice
            raise Refusal(
                f"The chat {ask.chat!r} has begun; its system text cannot change.",
                "Leave --system out, add --new, or begin another --chat.",
            )
        return chat

    def hold(self, name: str, chat: Chat, run: str) -> None:
        """From now on the chat is answering."""
        self.chats[name], chat.running = chat, run
        self.chats.move_to_end(name)

    def end(self, record: Run, messages: list[Message], images: dict[str, bytes]) -> None:
        """The run is over: add its turn and its reply, unless it failed or was stopped before it said anything.

        `messages`: all that was asked, in order; `images`: what they show.
        """
        chat = self.chats[record.chat]
        chat.running = None
        if record.status == "done" or (record.status == "stopped" and record.text):
            chat.messages = [*messages, Message("assistant", [Text(record.text)])]
            chat.images = images
            chat.turns, chat.before = chat.turns + 1, None
        self._settle(record.chat)
        self._trim()

    def release(self, name: str) -> None:
        """The turn was refused: nothing has happened."""
        self.chats[name].running = None
        self._settle(name)

    def _settle(self, name: str) -> None:
        """A chat without a turn is none: what it was to replace stays."""
        chat = self.chats[name]
        if not chat.turns and chat.before is not None:
            self.chats[name] = chat.before
        elif not chat.turns:
            del self.chats[name]

    def _trim(self) -> None:
        size = sum(_bytes(chat) for chat in self.chats.values())
        for name in [name for name, chat in self.chats.items() if not chat.running][:-1]:
            if len(self.chats) <= self.count and size <= self.size:
                break
            size -= _bytes(self.chats.pop(name))
            self.dropped[name] = None
        while len(self.dropped) > self.count:
            self.dropped.popitem(last=False)


def _bytes(chat: Chat) -> int:
    texts = sum(len(part.text) for message in chat.messages for part in message.parts if isinstance(part, Text))
    return texts + sum(map(len, chat.images.values()))


def digests(messages: list[Message]) -> list[str]:
    """The images that the messages show, each once, in order."""
    return list(dict.fromkeys(part.digest for m in messages for part in m.parts if isinstance(part, ImageRef)))


def begun(ask: Submit, messages: list[Message], created: float, turn: int, opened: Any, request: Any) -> Run:
    """The record as a run begins: what was asked, and what preparing its prompt has told.

    `messages`: all of the prompt's, earlier turns of its chat included.
    """

    def text(role: str) -> str | None:
        found = [m for m in messages if m.role == role]
        return "".join(part.text for part in found[-1].parts if isinstance(part, Text)) if found else None

    prompt, sampling = request.prompt, request.sampling
    params = {name: getattr(sampling, name, getattr(ask.params, name)) for name in Params.__struct_fields__}
    seed = params["seed"] if params["temperature"] else None
    return Run(
        id=ask.run,
        created=created,
        model=opened.name,
        device=str(opened.device),
        prompt=text("user") or "",
        system=text("system"),
        chat=ask.chat,
        turn=turn,
        params=params,
        prompt_tokens=len(prompt.ids),
        pictures=[Picture(i.name, i.width, i.height, i.start, i.tokens) for i in prompt.images],
        streams=[Stream(seed=None if seed is None else seed + i) for i in range(ask.streams)],
    )
