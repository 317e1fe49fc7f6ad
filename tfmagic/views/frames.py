"""What the live panel's frames say of a run, counted as it grows, so that a frame costs what is new and not the whole.

Text travels as segments `[kind, text]`: `p` plain, `d` drafted and accepted, `c` copied and accepted, `x` rejected
drafts; in a shortened snapshot `e`, the number of characters left out. The likeliest rows that a round rejected stand
before its own draw, the token that was taken in their place. Every round travels as a bar
`[drafted, accepted, source, cut, committed]`, the latest ones also as trees (`tree`); the page asks for the others.
Bars and trees end at the stream's last round.
"""

from __future__ import annotations

from math import isnan
from typing import Any

from ..run import Round, Run, Stream, Token, gains

BARS = 120
"""A stream's last rounds that a snapshot holds as bars."""
TREES = 32
"""Trees in one frame or snapshot, all streams together."""
PIECE = 16
"""Characters of a token in a tree."""
ROWS = 32
"""Rows of a tree."""


class Tally:
    """What has been read of one stream so far."""

    def __init__(self):
        self.tokens = self.rounds = self.committed = 0
        self.tail = 0
        """Characters read of the last token, which may still grow by the stream's held-back text."""
        self.segments: list[list[str]] = []
        self.bars: list[list] = []
        self.trees: list[dict[str, Any]] = []
        self.cut = 0
        self.gains = [0.0] * 4
        """The sums of `run.gains`."""
        self.drafted_at: list[int] = []
        self.accepted_at: list[int] = []
        self.by_source: dict[str, list[int]] = {}
        self.fields: dict[str, Any] = {}

    def read(self, stream: Stream, trees: int = TREES) -> dict[str, Any]:
        """Take in what the stream has gained; what the page needs to follow, or {} when that is nothing: of the new
        rounds' trees the last `trees`.

        Another thread may be folding a round while this reads: a round counts when all its tokens are there.
        """
        segments: list[list[str]] = []
        bars: list[list] = []
        grown: list[dict[str, Any]] = []
        if not self.tokens and stream.tokens:
            self._take(segments, stream.tokens[:1], "d")
        while self.tokens and self.rounds < len(stream.rounds):
            verified = stream.rounds[self.rounds]
            if len(stream.tokens) < self.tokens + verified.committed:
                break
            tokens = stream.tokens[self.tokens : self.tokens + verified.committed]
            grown.append(tree(verified, stream.tokens[self.tokens - 1], tokens))
            drafts = sum(token.made == "draft" for token in tokens)
            copied = verified.draft_source == "copy"
            self._take(segments, tokens[:drafts], "c" if copied else "d")
            add(segments, "x", verified.rejected)
            self._take(segments, tokens[drafts:], "p")
            self._count(verified)
            bars.append(bar(verified))
        if stream.finish_reason and self.tokens == len(stream.tokens) and self.tokens:
            piece = stream.tokens[-1].piece
            add(segments, "p", piece[self.tail :])
            self.tail = len(piece)
        for kind, text in segments:
            add(self.segments, kind, text)
        self.bars = [*self.bars, *bars][-BARS:]
        self.trees = [*self.trees, *grown[-trees:]][-trees:]
        return self._changes(stream, segments, bars, grown[-trees:])

    def whole(self, limit: int) -> dict[str, Any]:
        """The stream so far, with at most about `limit` characters of text."""
        return {**self.fields, "segments": cut(self.segments, limit), "bars": self.bars, "trees": self.trees}

    def _take(self, segments, tokens, kind: str) -> None:
        for token in tokens:
            add(segments, kind if token.made == "draft" else "p", token.piece)
            self.tail = len(token.piece)
        self.tokens += len(tokens)

    def _count(self, verified: Round) -> None:
        self.rounds += 1
        self.committed += verified.committed
        self.cut += verified.cut
        self.gains = [a + b for a, b in zip(self.gains, gains(verified), strict=True)]
        depth, accepted = verified.depth, verified.accepted
        while len(self.drafted_at) < depth:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for k in range(depth):
            self.drafted_at[k] += 1
            self.accepted_at[k] += k < accepted
        source = self.by_source.setdefault(verified.draft_source, [0, 0, 0])
        for k, n in enumerate((1, verified.drafted, accepted)):
            source[k] += n

    def _speed(self, stream: Stream) -> float | None:
        """Tokens a second, as `Stream.tokens_per_second` defines it, of what has been read."""
        spent = stream.rounds[self.rounds - 1].ms - stream.first_ms if self.rounds else 0
        return 1e3 * self.committed / spent if spent > 0 else None

    def _changes(self, stream: Stream, segments, bars, trees) -> dict[str, Any]:
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
        lists = {"segments": segments, "bars": bars, "trees": trees}
        return changed | {name: new for name, new in lists.items() if new}


def head_of(run: Run, tallies: list[Tally]) -> dict[str, Any]:
    """The fields of the run that the panel shows, drafts counted by source: `{source: [rounds, drafted, accepted]}`,
    and what they gained: the true speed-up and the expected one."""
    drafts: dict[str, list[int]] = {}
    for tally in tallies:
        for source, counts in tally.by_source.items():
            drafts[source] = [a + b for a, b in zip(drafts.get(source, [0, 0, 0]), counts, strict=True)]
    gained, planned, true, spent = map(sum, zip([0.0] * 4, *(tally.gains for tally in tallies)))
    drafted = any(counts[1] for counts in drafts.values())
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
        "cut": sum(tally.cut for tally in tallies),
        "speedup": [round(true / spent, 3) if drafted and spent else None,
                    round(gained / planned, 3) if drafted and planned else None],
        "error": run.error,
        "note": run.note,
    }


def bar(verified: Round) -> list:
    drafted, accepted = verified.drafted, verified.accepted
    return [drafted, accepted, verified.draft_source, verified.cut, verified.committed]


def tree(verified: Round, pending: Token, tokens: list[Token]) -> dict[str, Any]:
    """A round for the page: the pending token, the rows' pieces, parents and chances (percent), the rows accepted, the
    round's own draw (None where it ended before it), the tokens expected, and milliseconds of draft, verify, commit."""
    nodes = verified.nodes[:ROWS]
    own = tokens[-1] if tokens and tokens[-1].made != "draft" else None
    return {
        "root": pending.piece[:PIECE],
        "pieces": [node.piece[:PIECE] for node in nodes],
        "parents": [node.parent for node in nodes],
        "chances": [None if node.chance is None else round(100 * node.chance) for node in nodes],
        "taken": [k for k, node in enumerate(nodes, 1) if node.accepted],
        "own": own and own.piece[:PIECE],
        "expected": None if isnan(verified.expected) else round(verified.expected, 2),
        "ms": [ms and round(ms, 2) for ms in (verified.draft_ms, verified.verify_ms, verified.commit_ms)],
    }


def rounds(stream: Stream, start: int, count: int) -> dict[str, Any]:
    """So many rounds of a stream from round `start` (counted from 0), as bars and trees, and where they end."""
    start = min(max(0, start), len(stream.rounds))
    found, at = stream.rounds[start : start + count], 1 + sum(r.committed for r in stream.rounds[:start])
    trees: list[dict[str, Any]] = []
    for verified in found:
        if at + verified.committed > len(stream.tokens):
            found = found[: len(trees)]  # another thread has folded the round and not yet its tokens
            break
        trees.append(tree(verified, stream.tokens[at - 1], stream.tokens[at : at + verified.committed]))
        at += verified.committed
    return {"end": start + len(found), "bars": [bar(verified) for verified in found], "trees": trees}


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
