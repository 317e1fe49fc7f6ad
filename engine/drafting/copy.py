"""Copied continuation: what followed the last eight tokens when they stood in the context before."""

from __future__ import annotations

from .draft import NOTHING, ROWS, Draft

MATCH = 8
"""Tokens that must agree before anything is copied."""
FIRST, WIDEST = 8, ROWS
"""Rows of the first window, and of the widest: the pending token and its drafts."""
USUAL, WEIGHT = 0.8, 2.0
"""The chance that a copied token is right behind right ones, before a stream has copied; it counts as so many copied
tokens."""
MEMORY, DOUBT = 0.7, 0.98
"""What is left of a stream's record after a copy was verified, and after one was not worth it."""


class Copier:
    """An index of one stream's context, fed as it grows."""

    def __init__(self, ids: list[int]):
        """`ids`: the context, shared with the stream and read again at every call."""
        self.ids, self._indexed = ids, MATCH
        self._ends: dict[tuple[int, ...], int] = {}
        self._begun: set[int] = set()  # hashes, which take less memory

    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens that followed the latest earlier place of the context's last eight; may be empty.

        A copy that reaches the context's end goes on with what it has copied, so a repetition continues.
        """
        self._index()
        start = self._ends.get(tuple(self.ids[-MATCH:])) if len(self.ids) >= 2 * MATCH else None
        if start is None:
            return []
        period = len(self.ids) - start
        return [self.ids[start + i % period] for i in range(limit)]

    def near(self) -> bool:
        """Whether there may be something to propose behind the next token, whatever it is. Never wrongly False."""
        self._index()
        last = tuple(self.ids[-MATCH:])
        return hash(last[1:]) in self._begun or last[1:] == last[:-1]

    def _index(self) -> None:
        """Each eight tokens that something follows: where it follows, the latest place winning; and the seven that they
        begin with."""
        for end in range(self._indexed, len(self.ids)):
            eight = tuple(self.ids[end - MATCH : end])
            self._ends[eight] = end
            self._begun.add(hash(eight[:-1]))
        self._indexed = max(self._indexed, len(self.ids))


class Width:
    """Rows of a stream's windows: doubled after a copy that was accepted whole, halved after one that was not."""

    def __init__(self):
        self.rows = FIRST

    def learn(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.rows = min(2 * self.rows, WIDEST) if accepted == drafted else max(self.rows // 2, 2)


class Record:
    """How often a stream's copied tokens were right: the chance that the next one is, if those before it are.

    A copy that was not worth its rows teaches nothing, so doubt fades with every one, and one day a copy is tried
    again.
    """

    def __init__(self):
        self.right = self.tried = 0.0

    @property
    def chance(self) -> float:
        return (self.right + USUAL * WEIGHT) / (self.tried + WEIGHT)

    def learn(self, drafted: int, accepted: int) -> None:
        """Of a copy at hand `drafted` tokens were verified and `accepted` were right."""
        kept = MEMORY if drafted else DOUBT
        self.right = kept * self.right + accepted
        self.tried = kept * self.tried + accepted + (accepted < drafted)


class Copies:
    """One stream's copies: what to copy, how much of it, and how likely it is."""

    def __init__(self, ids: list[int]):
        self.copier, self.width, self.record = Copier(ids), Width(), Record()

    def draft(self, limit: int) -> Draft:
        """At most `limit` guesses, a chain."""
        ids = self.copier.propose(min(self.width.rows - 1, limit))
        chance = self.record.chance
        chances = [chance**depth for depth in range(1, len(ids) + 1)]
        return Draft(ids, list(range(len(ids))), chances, "copy") if ids else NOTHING

    def near(self) -> bool:
        """Whether a draft may begin behind the next token."""
        return self.copier.near()

    def learn(self, drafted: int, accepted: int) -> None:
        self.width.learn(drafted, accepted)
        self.record.learn(drafted, accepted)
