"""The record of a run: what was asked, what the engine did, what came out.

A `Run` is plain data. The engine measures and emits events (`protocol.Event`); `Run.apply` folds an event into the
record; the renderers in `views` only read it. Engine and client fold the same events, so both hold the same record,
during the run and after it. The names and definitions of the numbers are one table: see `STATS`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from math import isnan, nan
from typing import Any, Literal

import msgspec

TTFT_PARTS = ("queue", "prepare", "restore", "tower", "prefill", "first")
"""The parts of the time to first token, in the order in which they happen. Their sum is `ttft["total"]`."""

STATS = {
    "ttft": "submit → first token delivered, ms; its parts queue, prepare, restore, tower, prefill, first add up to it",
    "cached_tokens": "prompt rows not recomputed",
    "cache_source": "where they came from: ram, disk or exact (the whole prompt but its last rows); none",
    "tower_calls": "vision-tower runs",
    "images_encoded": "images that went through the tower",
    "images_kept": "images spared by the kept state",
    "rounds": "verify rounds, all streams",
    "drafted": "draft rows verified",
    "accepted": "draft rows accepted",
    "acceptance": "accepted / drafted",
    "tokens_per_round": "1 + accepted / rounds",
    "accepted_by_position": "of the rounds that drafted position k, the share that accepted it",
    "draft_source": "rounds by where their draft came from: tree, block, copy, none",
    "token_sha": "first 12 hex of SHA-256 over the committed ids as little-endian u32, streams in order",
}
"""Every number a run shows, with its definition. A number that was not measured is None and is shown as a dash."""

DRAFTING = {
    "by_source": "of each source the rounds, drafted and accepted rows, and acceptance",
    "accepted_by_position": "as in `stats`, one list a stream",
    "cut": "draft rows at hand that the row budget left out",
    "draft_ms": "making the drafts, mean over the rounds; one that drafts for itself begins as the last one ends",
    "verify_ms": "the pass and its draws, mean over the rounds",
    "commit_ms": "moving the states, mean over the rounds",
    "expected_tokens_per_round": "1 + the drafters' chances, mean over the rounds",
    "expected_speedup": "expected tokens × a round's time without drafts / its planned time, summed over the rounds",
    "speedup": "tokens × a round's time without drafts / its true time, summed over the rounds",
}
"""The numbers of `Run.drafting`, with their definitions; None where not measured, the speed-ups where nothing was
drafted."""

Status = Literal["queued", "prefill", "decoding", "done", "stopped", "failed"]
Made = Literal["first", "plain", "draft"]
DraftSource = Literal["tree", "block", "copy", "none"]


class Token(msgspec.Struct, omit_defaults=True):
    """One committed token. `piece` is the text it completes: "" while a character's bytes are still incomplete."""

    id: int
    piece: str
    made: Made = "plain"
    """`first`: drawn by the prompt pass; `plain`: a round's own draw; `draft`: a draft row that was accepted."""
    logprob: float | None = None
    top: list[tuple[int, str, float]] | None = None
    """The K likeliest (id, piece, log probability) at this position, likeliest first, when `logprobs` was asked."""


class Node(msgspec.Struct, array_like=True):
    """One draft row of a round: a guessed token, verified together with the others."""

    piece: str
    parent: int
    """The row that it follows: 0 the round's pending token, k the k-th node. Parents come before their children."""
    chance: float | None = None
    """That it is accepted, as its drafter saw it before the round."""
    accepted: bool = False


class Round(msgspec.Struct, omit_defaults=True):
    """One verify round of one stream."""

    ms: float
    """Submit → tokens committed, milliseconds."""
    committed: int = 1
    """Tokens the round added to the stream: accepted + 1, fewer where it met a stop or the token limit."""
    draft_source: DraftSource = "none"
    nodes: list[Node] = []
    """The draft rows verified."""
    cut: int = 0
    """Draft rows at hand that the row budget left out."""
    draft_ms: float | None = None
    verify_ms: float | None = None
    commit_ms: float | None = None
    """The round's parts, shared with every stream of the pass: making the drafts, the pass and the draws, moving the
    states."""
    serial_ms: float | None = None
    """What the same streams' round takes without drafts, by the cost timed at load."""
    planned_ms: float | None = None
    """What this round was to take, by the same."""

    def __post_init__(self):
        if not all(0 <= node.parent <= i for i, node in enumerate(self.nodes)):
            raise ValueError("a round's nodes follow rows before them")

    @property
    def drafted(self) -> int:
        return len(self.nodes)

    @property
    def accepted(self) -> int:
        return sum(node.accepted for node in self.nodes)

    @property
    def depth(self) -> int:
        """Positions drafted: the longest path's nodes."""
        depths = [0]
        for node in self.nodes:
            depths.append(depths[node.parent] + 1)
        return max(depths)

    @property
    def expected(self) -> float:
        """Tokens that the drafter's chances promised: 1 + their sum; nan where it gave none."""
        return 1 + sum(nan if node.chance is None else node.chance for node in self.nodes)

    @property
    def spent_ms(self) -> float | None:
        """draft + verify + commit; None where it was not timed. A commit that was not told apart is in verify."""
        if self.draft_ms is None or self.verify_ms is None:
            return None
        return self.draft_ms + self.verify_ms + (self.commit_ms or 0.0)

    @property
    def rejected(self) -> str:
        """The text of the likeliest path that was not taken: from the first node that was refused where the walk
        ended, on through first children."""
        taken = [i for i, node in enumerate(self.nodes, 1) if node.accepted]
        row, pieces = taken[-1] if taken else 0, []
        for i, node in enumerate(self.nodes, 1):
            if node.parent == row and not node.accepted:
                row = i
                pieces.append(node.piece)
        return "".join(pieces)


class Stream(msgspec.Struct, omit_defaults=True):
    """One reply to the prompt."""

    seed: int | None = None
    """None: greedy."""
    tokens: list[Token] = []
    rounds: list[Round] = []
    finish_reason: Literal["stop", "length", "cancelled", "error"] | None = None
    """None while the stream runs. `length`: max tokens or the context's end."""
    first_ms: float | None = None
    """Submit → this stream's first token, milliseconds."""

    @property
    def text(self) -> str:
        return "".join(token.piece for token in self.tokens)

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def token_sha(self) -> str:
        return token_sha(self.token_ids)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first over the time from the first token to the last round; None before two tokens."""
        if self.first_ms is None or not self.rounds or self.rounds[-1].ms <= self.first_ms:
            return None
        return 1e3 * sum(r.committed for r in self.rounds) / (self.rounds[-1].ms - self.first_ms)

    @property
    def accepted_by_position(self) -> list[float]:
        return accepted_by_position(self.rounds)


class Picture(msgspec.Struct, omit_defaults=True):
    """One image of the prompt, in prompt order."""

    name: str
    width: int
    height: int
    """Size in pixels as submitted (after EXIF rotation)."""
    start: int
    tokens: int
    """The prompt rows it fills: start, start + 1, ... start + tokens - 1."""
    kept: bool | None = None
    """True: its rows came with the kept state; False: it was encoded by the tower; None: not reached."""


class Run(msgspec.Struct, omit_defaults=True):
    """The record of one `%%tfold` cell or `engine.run` call."""

    id: str
    created: float
    """Unix time of the submission, seconds."""
    model: str = ""
    device: str = ""
    prompt: str = ""
    """The text of the last user turn."""
    system: str | None = None
    chat: str | None = None
    turn: int = 1
    params: dict[str, Any] = {}
    """The sampling and drafting parameters in force, defaults filled in."""
    status: Status = "queued"
    error: str | None = None
    """What went wrong and what to do, two lines at most; None unless `status` is `failed`."""
    note: str | None = None
    """What a reader should know and no number says, such as a failed restore."""
    position: int | None = None
    """Place in the queue while `status` is `queued`; 0 is next."""
    prompt_tokens: int | None = None
    prefilled: int = 0
    """Prompt rows computed so far, cached rows included."""
    pictures: list[Picture] = []
    ttft: dict[str, float] = {}
    """Milliseconds by part (`TTFT_PARTS`) and `total`; empty until the first token."""
    cached_tokens: int | None = None
    cache_source: Literal["ram", "disk", "exact"] | None = None
    settled: int = 0
    """Of the cached rows, those of an earlier reply that were recomputed while the engine was idle."""
    miss: str | None = None
    """Why not more rows came from the cache, in one line; None where nothing longer was to be had."""
    tower_calls: int | None = None
    images_encoded: int | None = None
    images_kept: int | None = None
    total_ms: float | None = None
    """Submit → done, milliseconds."""
    streams: list[Stream] = []

    def apply(self, event: Any) -> None:
        """Fold one event of this run into the record. An event carries exactly the fields that it changes."""
        event.fold(self)

    @property
    def text(self) -> str:
        """The first stream's text."""
        return self.streams[0].text if self.streams else ""

    @property
    def finished(self) -> bool:
        return self.status in ("done", "stopped", "failed")

    @property
    def stats(self) -> dict[str, Any]:
        """The numbers of `STATS`, by exactly those names. None: not measured."""
        rounds = [r for stream in self.streams for r in stream.rounds]
        drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
        sources = [r.draft_source for r in rounds]
        return {
            "ttft": {part: self.ttft.get(part) for part in (*TTFT_PARTS, "total")},
            "cached_tokens": self.cached_tokens,
            "cache_source": self.cache_source,
            "tower_calls": self.tower_calls,
            "images_encoded": self.images_encoded,
            "images_kept": self.images_kept,
            "rounds": len(rounds),
            "drafted": drafted,
            "accepted": accepted,
            "acceptance": accepted / drafted if drafted else None,
            "tokens_per_round": 1 + accepted / len(rounds) if rounds else None,
            "accepted_by_position": accepted_by_position(rounds),
            "draft_source": {source: sources.count(source) for source in sorted(set(sources))},
            "token_sha": token_sha([id for stream in self.streams for id in stream.token_ids]),
        }

    @property
    def drafting(self) -> dict[str, Any]:
        """The numbers of `DRAFTING`, by exactly those names: what drafting did, and whether it paid."""
        rounds = [r for stream in self.streams for r in stream.rounds]
        gained, planned, true, spent = map(sum, zip(*map(gains, rounds))) if any(r.nodes for r in rounds) else [0] * 4
        return {
            "by_source": {source: _of_source(rounds, source) for source in sorted({r.draft_source for r in rounds})},
            "accepted_by_position": [stream.accepted_by_position for stream in self.streams],
            "cut": sum(r.cut for r in rounds),
            "draft_ms": _mean(r.draft_ms for r in rounds),
            "verify_ms": _mean(r.verify_ms for r in rounds),
            "commit_ms": _mean(r.commit_ms for r in rounds),
            "expected_tokens_per_round": _mean(None if isnan(r.expected) else r.expected for r in rounds),
            "expected_speedup": gained / planned if planned else None,
            "speedup": true / spent if spent else None,
        }

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Run:
        """Raises msgspec.ValidationError when the text is not a run."""
        return msgspec.json.decode(text, type=cls)

    def to_pandas(self):
        """One row a round: stream, round and the fields of `Round` by name, without its nodes; a time that was not
        measured is NaN. Needs pandas."""
        try:
            import pandas
        except ImportError:
            raise ImportError("Run.to_pandas needs pandas. Install it: pip install pandas") from None
        fields = ["ms", "drafted", "accepted", "committed", "draft_source", "depth", "cut", "draft_ms", "verify_ms"]
        fields += ["commit_ms", "serial_ms", "planned_ms", "expected"]
        rows = [
            (i, j, *(getattr(round, field) for field in fields))
            for i, stream in enumerate(self.streams)
            for j, round in enumerate(stream.rounds)
        ]
        times = {field: float for field in fields if field.endswith("ms")}
        return pandas.DataFrame(rows, columns=["stream", "round", *fields]).astype(times)

    def __str__(self) -> str:
        from .views.text import render

        return render(self)

    def __repr__(self) -> str:
        tokens = sum(len(stream.tokens) for stream in self.streams)
        return f"<Run {self.id} {self.status}: {len(self.streams)} stream(s), {tokens} tokens>"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        from .views import card, text

        return {"text/html": card.render(self), "text/plain": text.render(self)}


def token_sha(ids: list[int]) -> str:
    """First 12 hex digits of SHA-256 over the ids as little-endian u32."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()[:12]


def accepted_by_position(rounds: list[Round]) -> list[float]:
    """Of the rounds that drafted position k (counted from 1), the share that accepted it."""
    depths, accepted = [r.depth for r in rounds], [r.accepted for r in rounds]
    shares = []
    for k in range(1, max(depths, default=0) + 1):
        shares.append(sum(n >= k for n in accepted) / sum(n >= k for n in depths))
    return shares


def gains(verified: Round) -> tuple[float, float, float, float]:
    """What a round adds to the two speed-ups: the serial time of the tokens expected and the time planned for them, the
    serial time of the tokens committed and the time they took. Zeros where it was not measured. Milliseconds."""
    serial, planned, spent = verified.serial_ms, verified.planned_ms, verified.spent_ms
    expected = verified.expected
    told = (0.0, 0.0) if None in (serial, planned) or isnan(expected) else (expected * serial, planned)
    true = (0.0, 0.0) if None in (serial, spent) else (verified.committed * serial, spent)
    return (*told, *true)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _of_source(rounds: list[Round], source: str) -> dict[str, Any]:
    of = [r for r in rounds if r.draft_source == source]
    drafted, accepted = sum(r.drafted for r in of), sum(r.accepted for r in of)
    share = accepted / drafted if drafted else None
    return {"rounds": len(of), "drafted": drafted, "accepted": accepted, "acceptance": share}
