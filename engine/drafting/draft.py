"""What a drafter gives, and the window that is verified: plain data, shared by drafters, rounds and families."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfmagic.run import DraftSource

ROWS = 16
"""Rows of a window at most: the pending token and its drafts."""


class Window(NamedTuple):
    """The rows of one stream's round. Row 0 holds the pending token, the rows behind it a tree of guesses."""

    ids: list[int]
    parents: list[int]
    """Of each row the row that it follows, an earlier one; -1 for row 0."""

    @property
    def depths(self) -> list[int]:
        """Rows between row 0 and each row's place: 0 for row 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @property
    def chain(self) -> bool:
        return all(parent == row - 1 for row, parent in enumerate(self.parents))


def chain(ids: list[int]) -> Window:
    """A window whose rows follow one another."""
    return Window(list(ids), list(range(-1, len(ids) - 1)))


class Draft(NamedTuple):
    """Guesses behind a pending token, the likeliest first, parents before their children."""

    ids: list[int]
    parents: list[int]
    """Window rows: 0 the pending token, k the k-th guess."""
    chances: list[float]
    """Of each guess, that it will be on the accepted path."""
    source: DraftSource

    def first(self, nodes: int) -> Draft:
        """The first so many guesses: a tree still, since parents come first."""
        if nodes >= len(self.ids):
            return self
        return Draft(self.ids[:nodes], self.parents[:nodes], self.chances[:nodes], self.source if nodes else "none")

    def window(self, pending: int) -> Window:
        return Window([pending, *self.ids], [-1, *self.parents])


NOTHING = Draft([], [], [], "none")


class Walk(NamedTuple):
    """What a window came to: the path from row 0 along the guesses that equalled the model's own draws."""

    rows: list[int]
    """The path's rows, 0 first."""
    ids: list[int]
    """The token drawn at each of them; all but the last are the guesses walked over."""
    error: str | None = None
    """Why the walk ended early, such as numbers that are not finite; with no rows the stream cannot go on."""


ENDED = Walk([], [], "the stream has ended")
"""Of a round that had begun before that was known."""


class Likely(NamedTuple):
    """Log probabilities at one place, before any cut or temperature."""

    drawn: float
    """Of the token drawn there."""
    top: list[tuple[int, float]]
    """As many of the likeliest ids as were asked for, with theirs; the likeliest first, of equal ones the lower id."""


class Outcome(NamedTuple):
    """What a stream's window gave."""

    walk: Walk
    likely: list[Likely | None]
    """At every row walked; None where log probabilities were not asked for."""
    taps: Any = None
    """Tensor [len(walk.rows), taps · D], the tapped layers' rows along the walk, where the model is tapped."""


class Lattice(NamedTuple):
    """A block drafter's candidates for the places behind a pending token; all numpy, K candidates a place."""

    ids: Any
    """int64 [places, K], likeliest first."""
    logits: Any
    """float32 [places, K]: each candidate's own logit."""
    edges: Any
    """float32 [places, K, K]: what candidate j of a place gains behind candidate i of the place before; of the first
    place, row 0 stands behind the pending token. Zeros for a drafter without a selector."""
