"""One request and its streams: plain data, and the rules by which a stream takes a token and ends."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

from tfmagic.protocol import Token

from .drafting.draft import Likely, Walk
from .drafting.drafting import Guesses
from .sampling import Draw, Sampling

Reason = Literal["stop", "length"]


@dataclass
class Request:
    """What the engine is asked to do."""

    run: str
    prompt: Any
    """`engine.prompt.Prompt`."""
    sampling: Sampling
    streams: int
    submitted: float
    """`time.perf_counter()` when the request came in."""
    prepare_ms: float
    """From then until the prompt was ready."""
    detokenizer: Callable[[], Any]
    """Makes a reply's decoder: `push(id) -> str`, `flush() -> str`."""
    cache: bool = True
    """False: a cold run, which neither reads nor feeds the prompt cache."""
    label: str = ""
    """What a person calls it, such as its chat and turn; by default its run."""

    @property
    def name(self) -> str:
        return self.label or f"run {self.run}"


class StopText:
    """A reply's text as it may be shown: cut before the stop string that ends first, however pieces fall."""

    def __init__(self, stops: list[str]):
        self.stops, self.held = stops, ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is sure now, and whether a stop string has come. What may begin one is held back."""
        text = self.held + piece
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.held = ""
            return text[: min(found)[1]], True
        hold = max((overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - hold :]
        return text[: len(text) - hold], False


def overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Stream:
    """One reply as it grows."""

    def __init__(self, index: int, request: Request, piece: Callable[[int], str]):
        """`piece`: the text of a token alone, for the likeliest tokens' list."""
        s = request.sampling
        self.index, self.sampling, self.seed = index, s, s.seed + index
        self.ids = list(request.prompt.ids)
        """The context: prompt and reply."""
        self.room = s.max_tokens
        """Tokens that may still come."""
        self.state: Any = None
        """The family's; it has every row but the last token's."""
        self.finished: Reason | None = None
        self.told = False
        """Whether its end was."""
        self.tail = ""
        """Text held back when the reply ended."""
        self._piece, self._decoder, self._text = piece, request.detokenizer(), StopText(s.stop)
        self.guesses = Guesses(self.ids, s.draft)

    def draws(self) -> Draw:
        """How the next token is drawn, and those behind it."""
        return Draw(self.sampling, self.seed, len(self.ids))

    def accept(self, walk: Walk, likely: list[Likely | None]) -> list[Token]:
        """Take the tokens of a walk until the reply ends; `likely`: what is told of each."""
        tokens: list[Token] = []
        for i, (id, told) in enumerate(zip(walk.ids, likely), 1):
            tokens.append(self.take(id, told, "draft" if i < len(walk.ids) else "plain"))
            if self.finished:
                break
        return tokens

    def take(self, id: int, likely: Likely | None, made: Literal["first", "plain", "draft"]) -> Token:
        """Add a token; sets `finished` where the reply ends with it."""
        self.ids.append(id)
        self.room -= 1
        piece, stopped = self._text.push(self._decoder.push(id))
        if stopped or id in self.sampling.stop_ids:
            self.finished = "stop"
        elif not self.room:
            self.finished = "length"
        if self.finished and not stopped:
            self.end()
        token = Token(id, piece, made)
        if likely is not None:
            token.logprob, token.top = likely.drawn, [(i, self._piece(i), value) for i, value in likely.top]
        return token

    def end(self) -> None:
        """Let go of held text, as `tail`."""
        text, stopped = self._text.push(self._decoder.flush())
        self.tail = text if stopped else text + self._text.held
        self._text.held = ""


@dataclass(eq=False)
class Job:
    """A request on its way through the engine."""

    request: Request
    bytes: int = 0
    """What its sequences may come to take."""
    streams: list[Stream] = field(default_factory=list)
    work: Generator[int, None, None] | None = None
    """What precedes the prompt pass, a piece at a time, until it is done."""
    rows: Any = None
    """`prefill.Rows` from then until the first tokens."""
    parts: dict[str, float] = field(default_factory=dict)
    """Milliseconds of the time to first token by part, so far."""
    at: float = 0.0
    """When the last of `parts` ended."""
    position: int | None = None
    """The place in the queue that was last told."""

    @property
    def run(self) -> str:
        return self.request.run

    @property
    def live(self) -> list[Stream]:
        """Streams that decode."""
        return [stream for stream in self.streams if stream.state is not None and not stream.finished]

    def ended(self, part: str, now: float) -> None:
        """A part of the time to first token ends; it is charged with everything since the last one ended."""
        self.parts[part], self.at = self.parts.get(part, 0.0) + 1e3 * (now - self.at), now
