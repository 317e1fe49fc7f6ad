"""The replies of a card: tokens tinted and underlined by how they were made, in as many bytes as there is room for."""

from __future__ import annotations

from html import escape
from itertools import zip_longest
from typing import NamedTuple

from ..run import Stream, Token
from .words import nbytes, plural

GREEN, BLUE, AMBER = "#2fa068", "#3a86dc", "#c08a1c"
"""Half way between the live panel's colours in light and in dark, because a card is saved once for both."""
DRAFTED = f"background:{GREEN}2e;text-decoration-color:{GREEN}"
COPIED = f"background:{AMBER}2e;text-decoration:none;border-bottom:1px dashed {AMBER}"
CLOSE = {"": "", "<u": "</u>", "<s": "</span>"}
ELISION = 64
"""Bytes kept for the count of what is left out."""
PIECE = 400
"""Characters after which a new piece begins, so that a cut leaves little out."""


class Piece(NamedTuple):
    """Neighbouring tokens that were made the same way."""

    tag: str
    """What opens the element around them; "" for none."""
    text: str
    """Escaped."""
    tokens: int

    @property
    def html(self) -> str:
        return self.tag + self.text + CLOSE[self.tag[:2]]


def share(streams: list[Stream], room: int) -> list[str]:
    """Each stream's HTML, in `room` bytes together: what short streams leave over goes to the longer ones."""
    replies = [pieces(stream, room) for stream in streams]
    waiting = sorted(range(len(streams)), key=lambda i: sum(len(piece.html) for piece in replies[i]))
    texts = [""] * len(streams)
    while waiting:
        i, budget = waiting.pop(0), room // (len(waiting) + 1)
        texts[i] = fit(replies[i], len(streams[i].tokens), budget)
        room -= nbytes(texts[i])
    return texts


def fit(reply: list[Piece], tokens: int, budget: int) -> str:
    """A reply of that many tokens in `budget` bytes: whole, or its beginning and how many tokens are left out."""
    html = [piece.html for piece in reply]
    if sum(map(nbytes, html)) <= budget:
        return "".join(html)
    used, shown = ELISION, 0
    while (used := used + nbytes(html[shown])) <= budget:
        shown += 1
    left = tokens - sum(piece.tokens for piece in reply[:shown])
    return "".join(html[:shown]) + f"<em>… {plural(left, 'more token')} not shown</em>"


def pieces(stream: Stream, room: int) -> list[Piece]:
    """The stream in pieces, as many as `room` bytes could hold and one more."""
    found: list[Piece] = []
    size = 0
    # The first token is the prompt pass's; then come the rounds'.
    sources = ["none", *(round.draft_source for round in stream.rounds for _ in range(round.committed))]
    for token, source in zip_longest(stream.tokens, sources[: len(stream.tokens)], fillvalue="none"):
        tag, text = opening(token, source), escape(token.piece, quote=False)
        size += len(text)
        if found and found[-1].tag == tag and token.logprob is None and len(found[-1].text) < PIECE:
            found[-1] = Piece(tag, found[-1].text + text, found[-1].tokens + 1)
            continue
        size += len(tag)
        found.append(Piece(tag, text, 1))
        if size > room:
            break
    return found


def opening(token: Token, source: str) -> str:
    """The tag that shows how a token was made, by a round whose draft was of this source."""
    title = "" if token.logprob is None else f' title="{escape(likeliest(token))}"'
    if token.made == "draft":
        return f'<u style="{COPIED if source == "copy" else DRAFTED}"{title}>'
    return f"<span{title}>" if title else ""


def likeliest(token: Token) -> str:
    """`log p -0.11; likeliest ' red' -0.11, ' blue' -2.40`"""
    others = [f"{piece!r} {logprob:.2f}" for _, piece, logprob in (token.top or [])[:5]]
    return f"log p {token.logprob:.2f}" + (f"; likeliest {', '.join(others)}" if others else "")
