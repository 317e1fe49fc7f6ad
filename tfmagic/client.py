"""The engine from plain Python: `connect()`, then `engine.run("...")`.

Nothing here imports torch or IPython. Every method may be called from any thread, and from a forked process, which
gets a connection of its own.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from . import pictures, protocol
from .attach import ANSWER, LEAVE, absolute, ask, attach
from .connection import Connection, Handle, check
from .engine.resident import place
from .errors import TfmagicError
from .protocol import ImageRef, Message, Params, State, Text
from .run import Run

__all__ = ["Chat", "Engine", "Handle", "Streaming", "connect"]

OPTIONS = (
    *("prompt_cache_gib", "context", "idle_minutes", "learn_conversations", "spill_gib"),
    *("learn_dir", "learn_gib", "learn_min_free_gib", "learn_daily_gib", "drafter", "drafter_bits", "form", "kv_cache"),
)
"""What `connect` passes on to an engine that it starts."""


def connect(
    model: str | os.PathLike | None = None,
    device: str = "auto",
    start: bool = True,
    *,
    restart: bool = False,
    ready: bool = True,
    progress: Callable[[str], None] | None = None,
    **options: bool | float | int | str | None,
) -> Engine:
    """The resident engine of this user, started when none runs; returns once it is ready, or at once if not `ready`.

    model: a folder or a Hugging Face id; None: whatever runs, else the model that ships. device: auto, cpu, cuda:N.
    options: prompt_cache_gib, context (tokens), idle_minutes; learn_conversations (True: prompt states are kept on disk
    too), spill_gib (disk for states that memory has no room for), and for both learn_dir, learn_gib,
    learn_min_free_gib, learn_daily_gib; drafter (a folder, a Hugging Face id or "none"), drafter_bits (4 or 16);
    form ("exact", the same on every device, or "bf16", a GPU's own), kv_cache ("bf16" or "fp8", which takes half the
    room and changes replies a little). restart: end the running engine first.
    progress: told what the engine does while it starts.
    Raises TfmagicError when another model or device runs than is asked for, or none runs and `start` is False;
    Refusal or EngineFailed when the model cannot be opened.
    """
    if unknown := [name for name in options if name not in OPTIONS]:
        raise TfmagicError(f"connect() has no option {unknown[0]!r}.", _near(unknown[0], ("model", "device", *OPTIONS)))
    if options.get("learn_dir") is not None:
        options["learn_dir"] = str(Path(options["learn_dir"]).expanduser().absolute())
    if options.get("drafter") != "none":
        options["drafter"] = absolute(options.get("drafter"))
    where = place.find()
    if restart:
        place.finish(where)
    wish = {"model": absolute(model), "device": device} | {k: v for k, v in options.items() if v is not None}
    return Engine(attach(where, wish, start, ready, progress or (lambda text: None)))


class Engine:
    """A client of the resident engine. Closing it, or losing it, stops its foreground runs."""

    def __init__(self, connection: Connection):
        self._own(connection)

    def _own(self, connection: Connection) -> None:
        self._held = connection
        self._finalizer = weakref.finalize(self, connection.close)

    @property
    def _connection(self) -> Connection:
        if self._held.pid != os.getpid():  # forked: the parent's connection is not ours to use or to close
            self._finalizer.detach()
            self._own(attach(self._held.place, {"model": None, "device": "auto"}, False, False, lambda text: None))
        return self._held

    @property
    def alive(self) -> bool:
        """Whether the connection holds; when not, `connect()` anew."""
        return self._held.alive

    def status(self) -> State:
        """The engine's own state."""
        return ask(self._connection)

    def submit(
        self,
        prompt: str | Sequence = "",
        *,
        images: Iterable = (),
        system: str | None = None,
        chat: str | None = None,
        new: bool = False,
        messages: Iterable | None = None,
        streams: int = 1,
        background: bool = False,
        **params: Any,
    ) -> Handle:
        """Hand in a prompt and return at once with its handle.

        prompt: text, or a sequence of texts and images in order. images: stand before the text; see `pictures.encode`,
        or (name, image) pairs. new: the chat of that name begins anew. messages: earlier turns, as `protocol.Message`
        or {"role": ..., "content": ...}. params: the fields of `protocol.Params`. Raises Refusal when the engine does
        not take it.
        """
        parameters = parse(params)
        book = _Book()
        turns = [book.message(turn) for turn in messages or ()]
        if system is not None:
            turns.insert(0, Message("system", [Text(system)]))
        content = [*(book.image(image) for image in _several(images)), *book.parts(prompt)]
        if content or not turns:
            turns.append(Message("user", content))
        run = secrets.token_hex(4)
        connection = self._connection
        asked = run, turns, parameters, streams, chat, background, new
        try:
            call = connection.call(lambda call: protocol.Submit(call, *asked), images=book.data)
        except KeyboardInterrupt:
            with contextlib.suppress(TfmagicError):
                connection.send(protocol.Cancel(0, run))
            raise
        return self._keep(call.handle)

    def run(self, prompt: str | Sequence = "", **arguments: Any) -> Run:
        """`submit` and wait. An interrupt stops the run. Raises EngineFailed when the run fails."""
        return _finish(self.submit(prompt, **arguments))

    def stream(self, prompt: str | Sequence = "", **arguments: Any) -> Streaming:
        """`submit`; iterate over the result for the pieces of text as they come. Leaving the loop stops the run."""
        return Streaming(self.submit(prompt, **arguments))

    def chat(self, name: str | None = None, system: str | None = None, new: bool = False) -> Chat:
        """The conversation of this name, kept in the engine; without a name, or `new`, one that begins."""
        return Chat(self, name or f"chat-{secrets.token_hex(4)}", system, new)

    def follow(self, run: str | None = None) -> Handle:
        """The handle of a run of any client, running or finished; None: the newest."""
        return self._keep(self._connection.call(lambda call: protocol.Follow(call, run), ANSWER).handle)

    def show(self, run: str | None = None) -> Run:
        """The record of a run so far; None: the newest."""
        return self.follow(run).record

    def runs(self) -> list[Run]:
        """The runs that the engine keeps, newest first, without their tokens."""
        return self._connection.call(lambda call: protocol.List(call), ANSWER).reply.runs

    def cache(self, clear: bool = False) -> protocol.Holdings:
        """What is kept where; `clear`: forget all of it first, that of other models on the disk too."""
        return self._connection.call(lambda call: protocol.Cache(call, clear), ANSWER).reply

    def cancel(self, run: str | None = None) -> None:
        """Stop a run; None: every unfinished run of this client."""
        self._connection.call(lambda call: protocol.Cancel(call, run), ANSWER)

    def stop(self) -> None:
        """End the engine process, and wait until it is gone."""
        where = self._held.place
        with contextlib.suppress(TfmagicError):
            self._connection.call(lambda call: protocol.Stop(call), ANSWER)
        deadline = time.monotonic() + LEAVE
        while where.engine() == self._held.engine_pid and time.monotonic() < deadline:
            time.sleep(0.02)
        if where.engine() == self._held.engine_pid:
            place.finish(where, grace=0.5)
        self.close()

    def close(self) -> None:
        """Leave; the engine lives on, the foreground runs of this client are stopped."""
        self._finalizer()

    def _keep(self, handle: Handle) -> Handle:
        handle.engine = self
        return handle

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine: process {self._held.engine_pid}{'' if self.alive else ', gone'}>"


class Streaming:
    """The reply's pieces of text as they come, and the record behind them."""

    def __init__(self, handle: Handle):
        self.handle = handle

    @property
    def record(self) -> Run:
        return self.handle.record

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self.handle.pieces()
        finally:
            with contextlib.suppress(TfmagicError):  # gone with its engine
                self.handle.cancel()


class Chat:
    """A conversation. Its turns are kept in the engine, so they survive this process."""

    def __init__(self, engine: Engine, name: str, system: str | None = None, new: bool = False):
        self.engine, self.name, self._begins = engine, name, {"system": system, "new": new}

    def submit(self, text: str | Sequence, images: Iterable = (), **arguments: Any) -> Handle:
        """Hand in the next turn."""
        handle = self.engine.submit(text, images=images, chat=self.name, **self._begins | arguments)
        self._begins = {}  # said once, at the chat's beginning
        return handle

    def send(self, text: str | Sequence, images: Iterable = (), **arguments: Any) -> Run:
        """Say something and wait for the reply."""
        return _finish(self.submit(text, images, **arguments))

    def __repr__(self) -> str:
        return f"<Chat {self.name!r}>"


def parse(params: dict[str, Any]) -> Params:
    """The sampling parameters. Raises TfmagicError for an unknown name or a value of the wrong type."""
    known = Params.__struct_fields__
    for name in params:
        if name not in known:
            raise TfmagicError(f"There is no parameter {name!r}.", _near(name, known))
    if isinstance(params.get("stop"), str):
        params = params | {"stop": [params["stop"]]}
    given = {name: value.item() if hasattr(value, "item") else value for name, value in params.items()}
    try:
        return msgspec.convert(given, Params)
    except msgspec.ValidationError as error:
        problem, _, name = str(error).partition(" - at `$.")
        raise TfmagicError(f"{name.rstrip('`') or 'A parameter'}: {problem}.", "Correct its value.") from None


class _Book:
    """Turns what a person gives into messages, and keeps the images' bytes by digest."""

    def __init__(self):
        self.data: dict[str, bytes] = {}

    def image(self, source: Any) -> ImageRef:
        if isinstance(source, ImageRef):
            return source
        name = None
        if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], str):
            name, source = source
        name, data = pictures.encode(source, name)
        digest = hashlib.sha256(data).hexdigest()
        self.data[digest] = data
        if (total := sum(map(len, self.data.values()))) > pictures.TOTAL:
            raise TfmagicError(
                f"The images have {total / 2**20:.1f} MiB encoded; the limit is {pictures.TOTAL >> 20} MiB a prompt.",
                "Send fewer or smaller ones.",
            )
        return ImageRef(digest, name)

    def parts(self, content: Any) -> list[Text | ImageRef]:
        """A str is text; in a sequence a str is text too and everything else is an image."""
        if isinstance(content, str):
            return [Text(content)] if content else []
        if not isinstance(content, Iterable):
            problem = f"A {type(content).__name__} is not a prompt."
            raise TfmagicError(problem, "Give text, or a list of texts and images.")
        items = [content] if not isinstance(content, list | tuple) else content
        return [i if isinstance(i, Text) else Text(i) if isinstance(i, str) else self.image(i) for i in items]

    def message(self, turn: Any) -> Message:
        if isinstance(turn, Message):
            return turn
        roles = ("system", "user", "assistant")
        if not isinstance(turn, dict) or set(turn) != {"role", "content"} or turn["role"] not in roles:
            fix = 'Give {"role": "system", "user" or "assistant", "content": text or a list}.'
            raise TfmagicError("A message is not understood.", fix)
        return Message(turn["role"], self.parts(turn["content"]))


def _several(images: Any) -> list:
    """`images=` takes one image as well as many."""
    pair = isinstance(images, tuple) and len(images) == 2 and isinstance(images[0], str)
    return list(images) if isinstance(images, list | tuple | set | dict) and not pair else [images]


def _finish(handle: Handle) -> Run:
    try:
        handle.wait()
    except KeyboardInterrupt:
        handle.cancel()
        raise
    return check(handle.record)


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}."
