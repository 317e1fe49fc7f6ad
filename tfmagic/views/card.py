"""A finished run as static HTML: what a saved notebook keeps.

No script, style element or svg, for JupyterLab's sanitizer drops them from an untrusted notebook, and GitHub drops the
style attributes as well: so every number is words first, bars are extra, and a drafted token is underlined as well as
tinted. Backgrounds are translucent and text takes the page's colour, so it sits in light and dark pages alike.
A card holds at most `LIMIT` bytes whatever the run; what does not fit is counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from itertools import pairwise

from ..run import DRAFTING, STATS, Run
from . import tokens, words
from .tokens import AMBER, BLUE, GREEN

LIMIT = 20_000
"""Bytes of UTF-8."""
RESERVED = 160
"""Bytes for each reply, which an example of a round does not take from them."""
SHOWN = {"prompt": 400, "error": 600, "note": 300, "name": 60, "params": 800}
"""The most bytes, escaped, of a text that a run may hold without bound."""
PICTURES = 8
POSITIONS = 16

LINE = "1px solid rgba(128,128,128,0.28)"
RED, GREY = "#d9493d", "#8c959f"
PALE_GREEN, PALE_BLUE, FAINT_GREEN = GREEN + "80", BLUE + "80", GREEN + "40"
FAINT = GREY + "30"
QUIET = "opacity:0.72;font-size:0.86em"
PROSE = "white-space:pre-wrap;word-break:normal;overflow-wrap:break-word;"
"""Lines break between words; JupyterLab's own rule for pre breaks inside them."""
STATUS = {"done": GREEN, "stopped": AMBER, "failed": RED}
PARTS = {
    "queue": GREY,
    "prepare": PALE_BLUE,
    "restore": BLUE,
    "tower": PALE_GREEN,
    "prefill": GREEN,
    "first": FAINT_GREEN,
}
"""The colours of the parts of `ttft`."""


def render(run: Run) -> str:
    """The card, at most `LIMIT` bytes."""
    stats, drafting = run.stats, run.drafting
    facts = {fact.name: fact for fact in words.facts_of(run, stats, drafting)}
    top, example = _head(run) + _tiles(run, facts, stats, drafting) + _strip(run), _example(run)
    bottom = _details(run, facts, stats, drafting)
    heads = [_stream_head(run, i) for i in range(len(run.streams))]

    def card(texts: list[str]) -> str:
        return _frame(top + "".join(map(_reply, heads, texts)) + example + bottom)

    def room() -> int:
        return LIMIT - words.nbytes(card([" "] * len(heads)))

    if room() < RESERVED * len(heads):
        example = ""
    return card(tokens.share(run.streams, room()))


def _frame(inner: str) -> str:
    look = f"border:{LINE};border-radius:6px;max-width:980px;font-size:13px;line-height:1.5;overflow:hidden"
    return f'<div style="{look};font-variant-numeric:tabular-nums">{inner}</div>'


# The parts, top to bottom ------------------------------------------------------------------------


def _head(run: Run) -> str:
    status, _, rest = words.status_line(run).partition(" · ")
    dot = f'<span style="color:{STATUS.get(run.status, BLUE)}">●</span>'
    error = "".join(f"<div>{_cut(line, 'error')}</div>" for line in (run.error or "").splitlines()[:2])
    note = f'<div style="{QUIET}">{_cut(run.note, "note")}</div>' if run.note else ""
    line = f'{dot} <strong>{status}</strong> <span style="{QUIET}">{_cut(rest, "note")}</span>'
    return f'<div style="padding:8px 12px">{line}{error}{note}</div>'


def _tiles(run: Run, facts: dict[str, words.Fact], stats: dict, drafting: dict) -> str:
    ttft, cached, tower, drafts = (facts[n] for n in ("ttft", "cached_tokens", "tower_calls", "acceptance"))
    rounds = facts["tokens_per_round"]
    value, _, unit = ttft.value.partition(" ")
    hit, kept = _share_of(run.cached_tokens, run.prompt_tokens), _share_of(run.images_kept, len(run.pictures))
    calls = "" if run.tower_calls is None else "call" if run.tower_calls == 1 else "calls"
    rows = f"of {words.count(run.prompt_tokens)} rows" if run.cached_tokens is not None else ""
    tiles = [
        _tile("Time to first token", ttft, value, unit, _ttft_bar(run), _ttft_parts(run), grow=1.45),
        _tile("Prompt from cache", cached, words.count(run.cached_tokens), rows, _bar(hit, BLUE),
              *map(escape, cached.note.split(" · ", 1))),
        _tile("Vision tower", tower, tower.value, calls, _bar(kept, PALE_BLUE), escape(tower.note)),
        _tile("Drafts accepted", drafts, drafts.value, f"{rounds.value} tokens a round" if rounds.note else "",
              _bar(stats["acceptance"], GREEN), _gain(drafting), escape(drafts.note), escape(rounds.note)),
    ]
    return f'<div style="display:flex;flex-wrap:wrap;border-top:{LINE}">{"".join(tiles)}</div>'


def _tile(caption: str, fact: words.Fact, value: str, unit: str, bar: str, *notes: str, grow: float = 1) -> str:
    below = "".join(f'<div style="{QUIET}">{note}</div>' for note in notes if note)
    number = f'<strong style="font-size:1.5em">{value}</strong> <span style="{QUIET}">{unit}</span>'
    return (
        f'<div title="{fact.name}: {escape(fact.definition)}" style="flex:{grow} 1 150px;padding:8px 12px">'
        f'<div style="{QUIET}">{caption}</div>{number}{bar}{below}</div>'
    )


def _ttft_bar(run: Run) -> str:
    timed = [(part, value) for part, value in words.parts(run) if value]
    total = sum(value for _, value in timed)
    return _bars([(100 * value / total, PARTS[part], f"{part} {value:.1f} ms") for part, value in timed])


def _ttft_parts(run: Run) -> str:
    if not run.ttft:
        return ""
    timed = ((part, words.DASH if value is None else f"{value:.1f}") for part, value in words.parts(run))
    return " ".join(f"{_square(PARTS[part])}&nbsp;{part}&nbsp;{value}" for part, value in timed)


def _strip(run: Run) -> str:
    """The prompt row by row: what came from the cache, what was computed, and where its pictures are."""
    rows, cached = run.prompt_tokens, run.cached_tokens
    if not rows:
        return ""
    cells = []
    for start, end, picture in _segments(run):
        kept = cached is not None and end <= cached
        done = kept or end <= run.prefilled
        colour = BLUE if kept else GREEN if done else FAINT
        label = f"rows {start:,}–{end - 1:,} {'from cache' if kept else 'computed' if done else 'not reached'}"
        if picture is not None and done:
            colour = f"{PALE_BLUE if kept else PALE_GREEN};border:1px solid {colour};box-sizing:border-box"
            label += f", picture {picture + 1}"
        cells.append((100 * (end - start) / rows, colour, label))
    computed = words.count(None if cached is None else run.prefilled - cached)
    told = [
        f"{_square(BLUE)} {words.count(cached)} rows from cache {_square(GREEN)} {computed} computed",
        *(_picture(run, i) for i in range(min(len(run.pictures), PICTURES))),
    ]
    if len(run.pictures) > PICTURES:
        told.append(f"and {words.plural(len(run.pictures) - PICTURES, 'more picture')}")
    quiet = f'<div style="{QUIET}">'
    return _row(f"{quiet}Prompt, row by row</div>{_bars(cells, 10)}{quiet}{' · '.join(told)}</div>")


def _segments(run: Run) -> Iterator[tuple[int, int, int | None]]:
    """(start row, end row, picture or None), cut where a picture, the cache or the prompt pass begins or ends."""
    marks = {0, run.prompt_tokens, min(run.cached_tokens or 0, run.prompt_tokens), run.prefilled}
    pictures = run.pictures[:PICTURES]
    for picture in pictures:
        marks |= {picture.start, picture.start + picture.tokens}
    edges = sorted(mark for mark in marks if 0 <= mark <= run.prompt_tokens)
    for start, end in pairwise(edges):
        inside = (i for i, p in enumerate(pictures) if p.start <= start < p.start + p.tokens)
        yield start, end, next(inside, None)


def _picture(run: Run, i: int) -> str:
    picture = run.pictures[i]
    fate = {True: "kept", False: "encoded", None: "not reached"}[picture.kept]
    name = f"picture {i + 1} {_cut(picture.name, 'name')} {picture.width}×{picture.height}"
    return f"{name}: {picture.tokens:,} rows, {fate}"


def _stream_head(run: Run, i: int) -> str:
    stream = run.streams[i]
    name = f"<strong>Stream {i + 1}</strong> " if len(run.streams) > 1 else ""
    by_position = stream.accepted_by_position[:POSITIONS]
    accepted = f" · accepted by position {words.spark(by_position)}" if by_position and len(run.streams) > 1 else ""
    return f'{name}<span style="{QUIET}">{escape(words.stream_line(stream))}{accepted}</span>'


def _reply(head: str, text: str) -> str:
    pre = f'<pre style="{PROSE}margin:4px 0 0;padding:0;background:none;border:none">{text}</pre>'
    return _row(head + (pre if text else ""))


def _gain(drafting: dict) -> str:
    """`×2.9 faster (expected ×3.1) · 12 rows cut`"""
    true, expected, cut = drafting["speedup"], drafting["expected_speedup"], drafting["cut"]
    if not any(of["drafted"] for of in drafting["by_source"].values()):
        return ""
    faster = " speed-up" if true is None else " faster" if true >= 0.995 else ", slower"
    cut = f" · {words.plural(cut, 'row')} cut" if cut else ""
    return f"<strong>{words.times(true)}</strong>{faster} (expected {words.times(expected)}){cut}"


def _example(run: Run) -> str:
    """One round's tree."""
    place = words.best_round(run)
    if place is None:
        return ""
    stream, k = run.streams[place[0]], place[1]
    where = f"Stream {place[0] + 1}, round" if len(run.streams) > 1 else "Round"
    lines = "\n".join(escape(line, quote=False) for line in words.tree(stream, k))
    head = f"{where} {k + 1} of {len(stream.rounds):,}: {escape(words.round_line(stream.rounds[k]))}"
    pre = f'<pre style="white-space:pre;overflow:auto;margin:4px 0;padding:0;background:none;border:none">{lines}</pre>'
    every = f"every round: %tfold show {escape(run.id)} --live"
    key = f"● accepted ○ rejected, with its chance in percent ▸ the round’s own draw · {every}"
    return _row(f'<details><summary style="{QUIET}">{head}</summary>{pre}<div style="{QUIET}">{key}</div></details>')


def _details(run: Run, facts: dict[str, words.Fact], stats: dict, drafting: dict) -> str:
    gain = facts.get("speedup")
    params = json.dumps(run.params, ensure_ascii=False, sort_keys=True, default=str)
    rows = [
        ("prompt", _cut(run.prompt, "prompt")),
        ("system", _cut(run.system, "prompt")),
        ("params", _cut(params, "params")),
        ("accepted_by_position", " ".join(words.percent(share) for share in stats["accepted_by_position"][:POSITIONS])),
        ("draft_source", words.by_source(drafting).removeprefix(", ")),
        *([("speedup", f"{gain.value} · {gain.note}")] if gain else []),
        ("token_sha", facts["token_sha"].value),
        ("run", f"{escape(run.id)}, {words.plural(len(run.streams), 'stream')}, total {words.ms(run.total_ms)}"),
    ]
    cells = "".join(
        f'<tr style="background:none"><th style="text-align:left;vertical-align:top;padding:1px 12px 1px 0" '
        f'title="{escape(STATS.get(name) or DRAFTING.get(name, ""))}">{name}</th>'
        f'<td style="text-align:left;padding:1px 0;white-space:pre-wrap">{value or words.DASH}</td></tr>'
        for name, value in rows
    )
    return _row(f'<details><summary style="{QUIET}">Details{_legend(run)}</summary><table>{cells}</table></details>')


def _legend(run: Run) -> str:
    """How the tokens were made, as far as it differs in this run."""
    sources = {r.draft_source for stream in run.streams for r in stream.rounds if r.accepted}
    kinds = [f'<u style="{tokens.DRAFTED}">drafted</u>'] if sources - {"copy"} else []
    kinds += [f'<u style="{tokens.COPIED}">copied</u>'] if "copy" in sources else []
    return f" · accepted drafts: {', '.join(kinds)}; the others were drawn one at a time" if kinds else ""


# Small things ------------------------------------------------------------------------------------


def _row(inner: str) -> str:
    return f'<div style="border-top:{LINE};padding:8px 12px">{inner}</div>'


def _bar(share: float | None, colour: str) -> str:
    return _bars([] if share is None else [(100 * share, colour, "")])


def _bars(cells: list[tuple[float, str, str]], height: int = 6) -> str:
    """(width in percent, colour, tooltip) side by side. A page that drops styles drops them and loses no number."""
    inner = "".join(
        f'<div style="width:{width:.1f}%;background:{colour}"{_title(title)}></div>'
        for width, colour, title in cells
    )
    ground = "margin:3px 0;border-radius:2px;overflow:hidden;background:rgba(128,128,128,0.18)"
    return f'<div style="display:flex;height:{height}px;{ground}">{inner}</div>'


def _title(text: str) -> str:
    return f' title="{escape(text)}"' if text else ""


def _square(colour: str) -> str:
    return f'<span style="color:{colour}">■</span>'


def _share_of(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _cut(text: str | None, what: str) -> str:
    """The text, escaped, in no more bytes than `SHOWN` allows."""
    shown, used = [], 0
    for character in text or "":
        shown.append(escape(character, quote=False))
        used += words.nbytes(shown[-1])
        if used > SHOWN[what]:
            return "".join(shown[:-1]) + " …"
    return "".join(shown)
