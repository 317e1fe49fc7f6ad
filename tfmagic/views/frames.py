"""What the live panel's frames say of a run, counted as it grows, so that a frame costs what is new and not the whole.

Text travels as segments `[kind, text]`: `p` plain, `d` drafted and accepted, `c` copied and accepted, `x` rejected
drafts; in a shortened snapshot `e`, the number of characters left out. A round's rejected rows stand before its own
draw, the token that was taken in their place. Rounds travel as bars `[drafted, accepted, copied]`.
"""

from __future__ import annotations

from typing import Any

from ..run import Round, Run, Stream

BARS = 120
"""Rounds that a stream's bar chart holds."""


class Tally:
    """What has been read of one stream so far."""

    def __init__(self):
        self.tokens = self.rounds = self.committed = 0
        self.tail = 0
        """Characters read of the last token, which may still grow by the stream's held-back text."""
        self.segments: list[list[str]] = []
        self.bars: list[list[int]] = []
        self.drafted_at: list[int] = []
        self.accepted_at: list[int] = []
        self.by_source: dict[str, list[int]] = {}
        self.fields: dict[str, Any] = {}

    def read(self, stream: Stream) -> dict[str, Any]:
        """Take in what the stream has gained; what the page needs to follow, or {} when that is nothing.

        Another thread may be folding a round while this reads: a round counts when all its tokens are there.
        """
        segments: list[list[str]] = []
        bars: list[list[int]] = []
        if not self.tokens and stream.tokens:
            self._take(segments, stream.tokens[:1], "d")
        while self.tokens and self.rounds < len(stream.rounds):
            verified = stream.rounds[self.rounds]
            if len(stream.tokens) < self.tokens + verified.committed:
                break
            tokens = stream.tokens[self.tokens : self.tokens + verified.committed]
            drafts = sum(token.made == "draft" for token in tokens)
            copied = verified.draft_source == "copy"
            self._take(segments, tokens[:drafts], "c" if copied else "d")
            add(segments, "x", verified.rejected)
            self._take(segments, tokens[drafts:], "p")
            self._count(verified)
            bars.append([verified.drafted, verified.accepted, int(copied)])
        if stream.finish_reason and self.tokens == len(stream.tokens) and self.tokens:
            piece = stream.tokens[-1].piece
            add(segments, "p", piece[self.tail :])
            self.tail = len(piece)
        for kind, text in segments:
            add(self.segments, kind, text)
        self.bars = [*self.bars, *bars][-BARS:]
        return self._changes(stream, segments, bars)

    def whole(self, limit: int) -> dict[str, Any]:
        """The stream so far, with at most about `limit` characters of text."""
        return {**self.fields, "segments": cut(self.segments, limit), "bars": self.bars}

    def _take(self, segments, tokens, kind: str) -> None:
        for token in tokens:
            add(segments, kind if token.made == "draft" else "p", token.piece)
            self.tail = len(token.piece)
        self.tokens += len(tokens)

    def _count(self, verified: Round) -> None:
        self.rounds += 1
        self.committed += verified.committed
        while len(self.drafted_at) < verified.drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for k in range(verified.drafted):
            self.drafted_at[k] += 1
            self.accepted_at[k] += k < verified.accepted
        source = self.by_source.setdefault(verified.draft_source, [0, 0, 0])
        for k, n in enumerate((1, verified.drafted, verified.accepted)):
            source[k] += n

    def _speed(self, stream: Stream) -> float | None:
        """Tokens a second, as `Stream.tokens_per_second` defines it, of what has been read."""
        spent = stream.rounds[self.rounds - 1].ms - stream.first_ms if self.rounds else 0
        return 1e3 * self.committed / spent if spent > 0 else None

    def _changes(self, stream: Stream, segments, bars) -> dict[str, Any]:
        fields = {
            "tokens": self.tokens,
            "rounds": self.rounds,
            "speed": self._speed(stream),
            "positions": [round(a / d, 3) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)],
            "finish": stream.finish_reason,
            "seed": stream.seed,
        }
        changed = {k: v for k, v in fields.items() if k not in self.fields or self.fields[k] != v}
        self.fields = fields
        return changed | ({"segments": segments} if segments else {}) | ({"bars": bars} if bars else {})


def head_of(run: Run, tallies: list[Tally]) -> dict[str, Any]:
    """The fields of the run that the panel shows, drafts counted by source: `{source: [rounds, drafted, accepted]}`."""
    drafts: dict[str, list[int]] = {}
    for tally in tallies:
        for source, counts in tally.by_source.items():
            drafts[source] = [a + b for a, b in zip(drafts.get(source, [0, 0, 0]), counts, strict=True)]
    return {
        "run": run.id,
        "model": run.model,
        "device": run.device,
        "chat": run.chat,
        "turn": run.turn,
        "count": len(run.streams),
        "draft": run.params.get("draft"),
        "position": run.position,
        "rows": run.prompt_tokens,
        "prefilled": run.prefilled,
        "cached": run.cached_tokens,
        "source": run.cache_source,
        "miss": run.miss,
        "settled": run.settled,
        "pictures": [[p.name, p.width, p.height, p.start, p.tokens, p.kept] for p in run.pictures],
        "tower": run.tower_calls,
        "encoded": run.images_encoded,
        "kept": run.images_kept,
        "ttft": dict(run.ttft),
        "total": run.total_ms,
        "drafts": drafts,
        "error": run.error,
        "note": run.note,
    }


def add(segments: list[list[str]], kind: str, text: str) -> None:
    """Append the text to the last segment if it is of this kind, else as a new one."""
    if not text:
        return
    if segments and segments[-1][0] == kind:
        segments[-1] = [kind, segments[-1][1] + text]
    else:
        segments.append([kind, text])


def cut(segments: list[list[str]], limit: int) -> list[list[str]]:
    """A list of the segments, their middle replaced by `["e", N]` (N characters left out) if they hold over `limit`."""
    size = sum(len(text) for _, text in segments)
    if size <= limit:
        return list(segments)
    start, end = _leading(segments, limit // 4), _leading(segments[::-1], limit - limit // 4)[::-1]
    left = size - sum(len(text) for _, text in [*start, *end])
    return [*start, ["e", str(left)], *end]


def _leading(segments: list[list[str]], limit: int) -> list[list[str]]:
    """The first segments of at most `limit` characters together."""
    taken = 0
    for i, (_, text) in enumerate(segments):
        taken += len(text)
        if taken > limit:
            return segments[:i]
    return segments
