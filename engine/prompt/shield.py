"""Quoted markers: special-token text that a person spelt is ordinary text, never a special token.

While the template renders, each quoted marker is one private-use character that occurs nowhere else in the
conversation; afterwards it is spelt out again and tokenised as plain text. A conversation that quotes nothing takes
exactly the way it would take without a shield.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tfmagic.errors import Refusal

PRIVATE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
"""Unicode planes 15 and 16."""


def spare_characters(taken: str) -> Iterator[str]:
    """Private-use characters that `taken` does not hold. Raises Refusal when it holds them all."""
    yield from (chr(code) for code in PRIVATE if chr(code) not in taken)
    raise Refusal("The conversation uses every private-use character of Unicode.", "Remove some of them.")


def marker_pattern(markers: Iterable[str]) -> re.Pattern | None:
    """Matches the longest marker at the leftmost place, as the tokenizer does. None when there are no markers."""
    longest_first = sorted(filter(None, markers), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


class Shield:
    """One conversation's sentinels. `spare` gives characters that no text of it holds."""

    def __init__(self, spare: Iterator[str]):
        self._spare = spare
        self._sentinel: dict[str, str] = {}
        self._marker: dict[str, str] = {}

    def cover(self, text: str, markers: re.Pattern | None) -> str:
        """`text` with each quoted marker as its sentinel."""
        return markers.sub(lambda match: self._sentinel_of(match[0]), text) if markers else text

    def uncover(self, text: str) -> str:
        return "".join(self._marker.get(character, character) for character in text) if self._marker else text

    def covers(self, text: str) -> bool:
        """Whether `text` holds a sentinel."""
        return any(sentinel in text for sentinel in self._marker)

    def _sentinel_of(self, marker: str) -> str:
        if marker not in self._sentinel:
            sentinel = next(self._spare)
            self._sentinel[marker], self._marker[sentinel] = sentinel, marker
        return self._sentinel[marker]
