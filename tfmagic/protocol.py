"""What travels between a client and the resident engine: msgspec structs as msgpack over one Unix socket.

A client (ZeroMQ DEALER) sends one `Request` a frame; the engine (ROUTER) answers with `Reply` frames. `Update` carries
the events of a run to whoever submitted or follows it; everything else answers the request with the same `call`.
Events fold themselves into a `Run`, so the record is built by one piece of code on both sides.
Nothing is pickled; a frame over `MAX_FRAME` bytes or of an unknown shape is refused, never guessed at.
"""

from __future__ import annotations

from typing import Literal, Union

import msgspec
from msgspec.structs import replace

from .run import Picture, Round, Run, Token

VERSION = 3
"""Raised with every change that an older peer would misread."""
MAX_FRAME = 64 * 1024 * 1024
"""Bytes. Holds a request's images at their limit with room to spare."""


# What a client may ask ---------------------------------------------------------------------------


class Text(msgspec.Struct, tag="text"):
    text: str


class ImageRef(msgspec.Struct, tag="image"):
    """An image by the SHA-256 (hex) of its encoded bytes; the bytes are sent only if the engine asks (`Need`)."""

    digest: str
    name: str


class Message(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    parts: list[Union[Text, ImageRef]]


class Params(msgspec.Struct, omit_defaults=True):
    """Sampling and drafting. None: the checkpoint's own default (its generation_config)."""

    max_tokens: int | None = None
    temperature: float | None = None
    """0: greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """Stream i draws with seed + i. None: derived from the prompt, so that a repeated cell repeats."""
    draft: Literal["on", "off", "copy", "block", "tree"] = "on"
    cache: Literal["on", "off"] = "on"
    """off: a cold run; the prompt cache is neither read nor written."""
    logprobs: int = 0
    """How many likeliest tokens to report a position, 0-20."""
    stop: list[str] = []
    """A reply ends before the first of these strings."""


class Submit(msgspec.Struct, tag="submit"):
    call: int
    run: str
    """The run's id, chosen by the client; 8-32 characters of [0-9a-z-]."""
    messages: list[Message]
    """The turns to add: a system turn at most, earlier turns if any, and the user's turn last."""
    params: Params = msgspec.field(default_factory=Params)
    streams: int = 1
    chat: str | None = None
    """Continue the conversation of this name, kept in the engine."""
    background: bool = False
    """False: the run is cancelled when its client goes away."""
    new: bool = False
    """The chat begins with this turn; what was said before under its name goes once there is a reply."""


class Images(msgspec.Struct, tag="images"):
    """The encoded bytes that a `Need` asked for, in its order."""

    call: int
    run: str
    data: list[bytes]


class Cancel(msgspec.Struct, tag="cancel"):
    call: int
    run: str | None = None
    """None: every unfinished run of this client."""


class Follow(msgspec.Struct, tag="follow"):
    """Send me this run's record so far, then its events."""

    call: int
    run: str | None = None
    """None: the newest run."""


class List(msgspec.Struct, tag="list"):
    call: int


class Cache(msgspec.Struct, tag="cache"):
    """What is kept where; with `clear`, after all of it was forgotten."""

    call: int
    clear: bool = False


class Ask(msgspec.Struct, tag="ask"):
    """How are you? The first frame of every connection, and `%tfold status`."""

    call: int
    version: int = VERSION


class Stop(msgspec.Struct, tag="stop"):
    """Finish: cancel what runs, give everything back, end the process."""

    call: int


Request = Union[Submit, Images, Cancel, Follow, List, Cache, Ask, Stop]


# What happens to a run ---------------------------------------------------------------------------


class Event(msgspec.Struct):
    """An event is shared by everyone who folds or sends it: `fold` changes the record, never the event."""

    run: str

    def fold(self, run: Run) -> None:
        raise NotImplementedError


class Queued(Event, tag="queued"):
    position: int

    def fold(self, run: Run) -> None:
        run.position = self.position


class Prepared(Event, tag="prepared"):
    """The prompt's rows are known."""

    prompt_tokens: int
    pictures: list[Picture]

    def fold(self, run: Run) -> None:
        run.prompt_tokens, run.pictures = self.prompt_tokens, list(self.pictures)


class Restored(Event, tag="restored"):
    """The pass starts: at row `cached_tokens`, from `cache_source`."""

    cached_tokens: int
    cache_source: Literal["ram", "disk", "exact"] | None = None
    note: str | None = None
    miss: str | None = None
    settled: int = 0

    def fold(self, run: Run) -> None:
        run.status, run.position = "prefill", None
        run.cached_tokens, run.cache_source, run.prefilled = self.cached_tokens, self.cache_source, self.cached_tokens
        run.note, run.miss, run.settled = self.note or run.note, self.miss, self.settled


class Encoded(Event, tag="encoded"):
    """The tower's work for this run is done: one flag a picture, True where the kept state spared it."""

    tower_calls: int
    kept: list[bool]

    def fold(self, run: Run) -> None:
        run.tower_calls = self.tower_calls
        run.images_kept, run.images_encoded = sum(self.kept), len(self.kept) - sum(self.kept)
        run.pictures = [replace(picture, kept=kept) for picture, kept in zip(run.pictures, self.kept, strict=True)]


class Prefilled(Event, tag="prefilled"):
    """The prompt pass has reached this row."""

    rows: int

    def fold(self, run: Run) -> None:
        run.prefilled = self.rows


class First(Event, tag="first"):
    """A stream's first token. `ttft` (parts and total, milliseconds) comes with the run's first stream."""

    stream: int
    token: Token
    ms: float
    ttft: dict[str, float] = {}

    def fold(self, run: Run) -> None:
        stream = run.streams[self.stream]
        run.status, run.ttft = "decoding", run.ttft or self.ttft
        stream.first_ms = self.ms
        stream.tokens.append(self.token)


class Committed(Event, tag="committed"):
    """One round of one stream, with the tokens that it added."""

    stream: int
    round: Round
    tokens: list[Token]

    def fold(self, run: Run) -> None:
        run.streams[self.stream].rounds.append(self.round)
        run.streams[self.stream].tokens += self.tokens


class Finished(Event, tag="finished"):
    stream: int
    reason: Literal["stop", "length", "cancelled", "error"]
    tail: str = ""
    """Text still held back (bytes of an unfinished character as U+FFFD); it belongs to the last token."""

    def fold(self, run: Run) -> None:
        stream = run.streams[self.stream]
        stream.finish_reason = self.reason
        if self.tail and stream.tokens:
            last = stream.tokens[-1]
            stream.tokens[-1] = replace(last, piece=last.piece + self.tail)


class Done(Event, tag="done"):
    status: Literal["done", "stopped", "failed"]
    ms: float
    error: str | None = None

    def fold(self, run: Run) -> None:
        run.status, run.total_ms, run.error, run.position = self.status, self.ms, self.error, None
        for stream in run.streams:
            stream.finish_reason = stream.finish_reason or ("cancelled" if self.status == "stopped" else "error")


AnyEvent = Union[Queued, Prepared, Restored, Encoded, Prefilled, First, Committed, Finished, Done]


# What the engine answers -------------------------------------------------------------------------


class State(msgspec.Struct, tag="state"):
    """The engine's own state; also sent unasked to every client while it starts."""

    call: int
    version: int
    phase: Literal["starting", "loading", "ready", "stopping"]
    detail: str
    """What it does now, in words: "reading weights 3 of 8"."""
    pid: int
    model: str
    device: str
    started: float
    """Unix time, seconds."""
    runs: int = 0
    running: int = 0
    waiting: int = 0
    cache_states: int = 0
    cache_bytes: int = 0
    cache_budget: int = 0
    cache_note: str = ""
    """Why the budget is not what was asked for."""
    cache_counts: dict[str, int] = {}
    """hits, misses, kept, evicted, extended (of the evicted, by a longer state), refused, failed."""
    settling: int = 0
    """Replies whose rows wait to be recomputed while the engine is idle."""
    memory: int = 0
    """The process's resident bytes."""
    context: int | None = None
    """The longest prompt and reply together, tokens."""
    drafter: str = ""
    """The block drafter in words; "none"; "" while the model is being opened."""
    plan: str = ""
    """Where the device's memory went, in words; "" where it is not given out at start."""


class Accepted(msgspec.Struct, tag="accepted"):
    """The submission is in. `record` is the run as it starts: streams, parameters and turn filled in."""

    call: int
    record: Run


class Need(msgspec.Struct, tag="need"):
    """These images of the submission are not known here; send their bytes (`Images`)."""

    call: int
    run: str
    digests: list[str]


class Record(msgspec.Struct, tag="record"):
    call: int
    record: Run


class Listing(msgspec.Struct, tag="listing"):
    """Runs kept, newest first, without their tokens."""

    call: int
    runs: list[Run]


class Shelf(msgspec.Struct):
    """A place for kept states."""

    where: Literal["ram", "disk"]
    states: int
    bytes: int
    budget: int
    """Bytes."""
    directory: str = ""
    counts: dict[str, int] = {}
    """Of the disk since the engine started: written, bytes_written, read, skipped, failed, damaged, removed."""


class KeptState(msgspec.Struct):
    """A prompt's first rows, kept."""

    where: Literal["ram", "disk"]
    rows: int
    bytes: int
    """Of it alone: states of one conversation may share some."""
    label: str
    """Whose it is, in words."""
    made: float
    """Unix time, seconds."""


class Holdings(msgspec.Struct, tag="holdings"):
    """The places, and of each the states used most recently."""

    call: int
    shelves: list[Shelf]
    states: list[KeptState]


class Update(msgspec.Struct, tag="update"):
    """Events in order; batched, so that a fast stream costs few frames."""

    events: list[AnyEvent]


class Refused(msgspec.Struct, tag="refused"):
    """No. What was wrong, then what to do; one line each."""

    call: int
    problem: str
    fix: str


class Okay(msgspec.Struct, tag="okay"):
    call: int


Reply = Union[State, Accepted, Need, Record, Listing, Holdings, Update, Refused, Okay]

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
