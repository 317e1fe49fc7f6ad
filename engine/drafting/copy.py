"""Copied continuation: what followed the last eight tokens when they stood in the context before."""

from __future__ import annotations

MATCH = 8
"""Tokens that must agree before anything is copied."""
FIRST, WIDEST = 8, 16
"""Rows of the first window, and of the widest: the pending token and its drafts."""


class Copier:
    """An index of one stream's context, fed as it grows."""

    def __init__(self, ids: list[int]):
        """`ids`: the context, shared with the stream and read again at every call."""
        self.ids, self._indexed, self._ends = ids, MATCH, {}

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

    def _index(self) -> None:
        """Each eight tokens that something follows: where it follows, the latest place winning."""
        for end in range(self._indexed, len(self.ids)):
            self._ends[tuple(self.ids[end - MATCH : end])] = end
        self._indexed = max(self._indexed, len(self.ids))


class Width:
    """Rows of a stream's windows: doubled after a copy that was accepted whole, halved after one that was not."""

    def __init__(self):
        self.rows = FIRST

    def learn(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.rows = min(2 * self.rows, WIDEST) if accepted == drafted else max(self.rows // 2, 2)
