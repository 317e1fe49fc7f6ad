"""How the renderers say the numbers of a run: units, dashes for what was not measured, and the lines of `STATS`.

`facts` is the one list of what a finished run shows; the text view aligns it and the card lays it out.
"""

from __future__ import annotations

from itertools import accumulate
from math import isnan
from typing import NamedTuple

from ..run import DRAFTING, STATS, TTFT_PARTS, Round, Run, Stream

DASH = "–"
BLOCKS = "▁▂▃▄▅▆▇█"


class Fact(NamedTuple):
    """One number: its name in `STATS` or `DRAFTING`, what it reads, and a note beside it."""

    name: str
    value: str
    note: str = ""

    @property
    def definition(self) -> str:
        return STATS.get(self.name) or DRAFTING.get(self.name, "")


def ms(value: float | None) -> str:
    """Milliseconds as a person reads them: 0.4 ms, 14.2 ms, 221 ms, 1.8 s, 2 min 5 s."""
    if value is None:
        return DASH
    if value < 99.95:
        return f"{value:.1f} ms"
    if value < 999.5:
        return f"{value:.0f} ms"
    if value < 59_950:
        return f"{value / 1e3:.1f} s"
    return f"{int(value / 1e3) // 60} min {int(value / 1e3) % 60} s"


def count(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.0f} %"


def rate(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def times(ratio: float | None) -> str:
    """A speed-up: ×2.9, ×0.97."""
    return DASH if ratio is None else f"×{ratio:.2f}" if ratio < 1.995 else f"×{ratio:.1f}"


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def size(value: float) -> str:
    """Bytes: 512 B, 3.4 MiB, 1.0 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024


def nbytes(text: str) -> int:
    """Bytes of UTF-8."""
    return len(text.encode())


def spark(shares: list[float]) -> str:
    """Shares from 0 to 1 as a row of bars: ██▆▃."""
    return "".join(BLOCKS[round(share * (len(BLOCKS) - 1))] for share in shares)


def parts(run: Run) -> list[tuple[str, float | None]]:
    """The parts of `ttft` in order."""
    return [(part, run.ttft.get(part)) for part in TTFT_PARTS]


def status_line(run: Run) -> str:
    """`done · model · device · chat “kites”, turn 3 · 2 streams · 1.8 s`"""
    words = [run.status, run.model, run.device]
    if run.chat:
        words.append(f"chat “{run.chat}”, turn {run.turn}")
    if len(run.streams) > 1:
        words.append(f"{len(run.streams)} streams")
    if run.total_ms is not None:
        words.append(ms(run.total_ms))
    return " · ".join(word for word in words if word)


def stream_line(stream: Stream) -> str:
    """`128 tokens · 412 tokens/s · 19 rounds · seed 7 · length`"""
    words = [plural(len(stream.tokens), "token"), f"{rate(stream.tokens_per_second)} tokens/s"]
    words.append(plural(len(stream.rounds), "round"))
    words.append("greedy" if stream.seed is None else f"seed {stream.seed}")
    return " · ".join([*words, stream.finish_reason or "unfinished"])


def facts(run: Run) -> list[Fact]:
    """What a run shows, in the order in which it happened."""
    return facts_of(run, run.stats, run.drafting)


def facts_of(run: Run, stats: dict, drafting: dict) -> list[Fact]:
    """`facts` of numbers that are counted already: a long run's take a moment."""
    cached, rows = run.cached_tokens, run.prompt_tokens
    timed = " · ".join(f"{part} {DASH if value is None else f'{value:.1f}'}" for part, value in parts(run))
    told = [
        Fact("ttft", ms(run.ttft.get("total")), timed if run.ttft else ""),
        Fact("cached_tokens", DASH if cached is None else f"{count(cached)} of {count(rows)}", _source(run)),
        Fact("tower_calls", count(run.tower_calls), _images(run)),
        Fact("acceptance", percent(stats["acceptance"]), _drafts(run, stats)),
        Fact("tokens_per_round", DASH if stats["tokens_per_round"] is None else f"{stats['tokens_per_round']:.2f}",
             f"{plural(stats['rounds'], 'round')}{by_source(drafting)}" if stats["rounds"] else ""),
    ]
    if stats["drafted"]:
        told.append(Fact("speedup", times(drafting["speedup"]), gained(drafting)))
    return [
        *told,
        Fact("token_sha", stats["token_sha"] if any(s.tokens for s in run.streams) else DASH, f"run {run.id}"),
    ]


def cache(state) -> str:
    """The prompt cache in `protocol.State`: `12 states, 34.0 MiB of 1.0 GiB (2.8 MiB each) · 5 hits, 3 misses …`"""
    held = f"{plural(state.cache_states, 'state')}, {size(state.cache_bytes)} of {size(state.cache_budget)}"
    if state.cache_states:
        held += f" ({size(state.cache_bytes / state.cache_states)} each)"
    counts, said = state.cache_counts, []
    if counts:
        said = [f"{plural(counts['hits'], 'hit')}, {counts['misses']:,} missed, {counts['evicted']:,} evicted"]
        said[0] += f" ({counts['extended']:,} of them extended)" if counts["extended"] else ""
        said[0] += "".join(f", {counts[name]:,} {name}" for name in ("refused", "failed") if counts[name])
    settling = f"{state.settling} to settle while idle" if state.settling else ""
    return " · ".join(part for part in (held, *said, settling, state.cache_note) if part)


def _source(run: Run) -> str:
    if run.cached_tokens is None:
        return ""
    computed = f"{run.prefilled - run.cached_tokens:,} computed"
    where = {"ram": "from RAM", "disk": "from disk", "exact": "the whole prompt was kept", None: "nothing kept fitted"}
    settled = f"{run.settled:,} of them settled while idle" if run.settled else ""
    line = ", ".join(word for word in (where[run.cache_source], settled, computed) if word)
    return f"{line} · {run.miss[:400]}" if run.miss else line


def _images(run: Run) -> str:
    if not run.pictures:
        return "no image" if run.prompt_tokens is not None else ""
    return f"{plural(len(run.pictures), 'image')}: {count(run.images_kept)} kept, {count(run.images_encoded)} encoded"


def _drafts(run: Run, stats: dict) -> str:
    if not stats["drafted"]:
        return "nothing was drafted" if stats["rounds"] else ""
    by_position = stats["accepted_by_position"]
    shown = " ".join(f"{100 * share:.0f}" for share in by_position[:8]) + (" …" if len(by_position) > 8 else "")
    return f"{stats['accepted']:,} of {stats['drafted']:,} drafted · by position {spark(by_position[:32])} {shown}"


def gained(drafting: dict) -> str:
    """`expected ×3.1 · a round draft 0.4 · verify 5.5 · commit 0.2 ms · 12 rows cut`"""
    said = [f"expected {times(drafting['expected_speedup'])}"]
    timed = [(part, drafting[f"{part}_ms"]) for part in ("draft", "verify", "commit")]
    if any(value is not None for _, value in timed):
        parts = " · ".join(f"{part} {DASH if value is None else f'{value:.1f}'}" for part, value in timed)
        said.append(f"a round {parts} ms")
    if drafting["cut"]:
        said.append(f"{plural(drafting['cut'], 'row')} cut")
    return " · ".join(said)


def by_source(drafting: dict) -> str:
    """`, 2 block (0 % accepted), 3 copy (56 %), 1 undrafted`; nothing when no round drafted."""
    sources = drafting["by_source"]
    if set(sources) == {"none"}:
        return ""
    said = ""
    for source, of in sources.items():
        said += f", {of['rounds']:,} {'undrafted' if source == 'none' else source}"
        if of["drafted"]:
            said += f" ({percent(of['acceptance'])}{'' if '(' in said else ' accepted'})"
    return said


def best_round(run: Run) -> tuple[int, int] | None:
    """The stream and the round to show as an example: a tree if there is one, the deepest accepted."""
    places = []
    for i, stream in enumerate(run.streams):
        ends = accumulate((r.committed for r in stream.rounds), initial=1)
        told = sum(end <= len(stream.tokens) for end in ends) - 1  # a listed run has no tokens
        places += [(i, k) for k, r in enumerate(stream.rounds[: max(0, told)]) if r.nodes]

    def rank(place: tuple[int, int]) -> tuple:
        verified = run.streams[place[0]].rounds[place[1]]
        return verified.draft_source == "tree", verified.accepted, verified.drafted

    return max(places, key=rank, default=None)


def round_line(verified: Round) -> str:
    """`tree · 9 rows drafted, 4 accepted, 3 cut · expected 3.2 tokens, gave 5 · draft 0.4 · verify 5.1 · commit 0.2`"""
    rows = f"{plural(verified.drafted, 'row')} drafted, {verified.accepted} accepted"
    rows += f", {verified.cut} cut" if verified.cut else ""
    expected = DASH if isnan(verified.expected) else f"{verified.expected:.1f}"
    said = [verified.draft_source, rows, f"expected {expected} tokens, gave {verified.committed}"]
    parts = {"draft": verified.draft_ms, "verify": verified.verify_ms, "commit": verified.commit_ms}
    if any(value is not None for value in parts.values()):
        said.append(" · ".join(f"{part} {ms(value)}" for part, value in parts.items()))
    return " · ".join(said)


def tree(stream: Stream, k: int, rows: int = 15, piece: int = 14) -> list[str]:
    """Round k's draft rows as lines of text, the pending token at the root: ● accepted, ○ rejected, each with its
    chance in percent, ▸ the round's own draw. A first child stands beside its parent, the others below it."""
    verified, at = stream.rounds[k], 1 + sum(r.committed for r in stream.rounds[:k])
    labels, children = [_piece(stream.tokens[at - 1].piece, piece)], [[]]
    for node in verified.nodes[:rows]:
        chance = "" if node.chance is None else f" {100 * node.chance:.0f}"
        labels.append(f"{'●' if node.accepted else '○'} {_piece(node.piece, piece)}{chance}")
        children.append([])
        children[node.parent].append(len(labels) - 1)
    own = stream.tokens[at + verified.committed - 1]
    if own.made != "draft":
        labels.append(f"▸ {_piece(own.piece, piece)}")
        children.append([])
        path = [i for i, node in enumerate(verified.nodes[:rows], 1) if node.accepted]
        children[path[-1] if path else 0].append(len(labels) - 1)

    def lines(row: int) -> list[str]:
        drawn, pad = [], " " * len(labels[row])
        for i, child in enumerate(children[row]):
            last, (head, *below) = i == len(children[row]) - 1, lines(child)
            link = (" ─ " if last else " ┬ ") if i == 0 else (" └ " if last else " ├ ")
            drawn.append((labels[row] if i == 0 else pad) + link + head)
            drawn += [pad + ("   " if last else " │ ") + line for line in below]
        return drawn or [labels[row]]

    return lines(0)


def _piece(text: str, limit: int) -> str:
    """A token as it stands in a tree: one line, no longer than the limit."""
    shown = text.strip(" ").replace("\n", "↵").replace("\t", "⇥") or "␣"
    shown = "".join(c if c.isprintable() else "\ufffd" for c in shown[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
