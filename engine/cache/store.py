"""Kept states in memory, within a budget of bytes, least recently used out first.

A state is made by a prompt pass alone and only at multiples of the family's grain, so it holds exactly what a cold
pass over the same rows would hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .key import prefixes, whole

SPARSE = 1024
"""Rows between the marks that a long prompt keeps for prompts that part from it early."""


@dataclass
class Counts:
    hits: int = 0
    misses: int = 0
    kept: int = 0
    evicted: int = 0
    refused: int = 0
    """States larger than the whole budget."""
    failed: int = 0
    """States that could not be restored, and were dropped."""


@dataclass
class Kept:
    """The state after the first `at` rows of a prompt."""

    at: int
    key: tuple[int, ...]
    """The rows' key; equal keys mean equal rows."""
    tensors: dict[str, Tensor]
    bytes: int
    prompts: set[bytes] = field(default_factory=set)
    """Digests of the whole prompts whose last mark this is."""


class Store:
    def __init__(self, budget: int, grain: int):
        """`budget`: bytes of all states together."""
        self.budget, self.grain, self.bytes, self.counts = budget, grain, 0, Counts()
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Sequence[int]) -> Kept | None:
        """The longest state that a prompt of this key may start from: at least one row is left to compute."""
        for digest in reversed(prefixes(key[:-1], self.grain)):
            kept = self._kept.get(digest)
            if kept is not None and kept.key == tuple(key[: kept.at]):
                self._kept.move_to_end(digest)
                self.counts.hits += 1
                return kept
        self.counts.misses += 1
        return None

    def exact(self, kept: Kept, key: Sequence[int]) -> bool:
        """Whether this whole prompt was seen before and `kept` is its last mark."""
        return whole(key) in kept.prompts

    def keep(self, key: Sequence[int], states: dict[int, Callable[[], dict[str, Tensor]]]) -> None:
        """Keep states of one prompt: row -> what gives its tensors (called only for states not held yet)."""
        if not self.budget:
            return
        digests, last = prefixes(key[:-1], self.grain), last_mark(len(key), self.grain)
        for at in sorted(states):
            digest = digests[at // self.grain - 1]
            if digest in self._kept:
                self._kept.move_to_end(digest)
            else:
                tensors = states[at]()
                self._add(digest, Kept(at, tuple(key[:at]), tensors, size(tensors, at)))
        if last and digests[-1] in self._kept:
            self._kept[digests[-1]].prompts.add(whole(key))

    def drop(self, kept: Kept) -> None:
        """A state that failed to restore."""
        self.counts.failed += 1
        digest = prefixes(kept.key, self.grain)[-1]
        if self._kept.get(digest) is kept:
            del self._kept[digest]
            self.bytes -= kept.bytes

    def clear(self) -> None:
        self._kept.clear()
        self.bytes = 0

    def _add(self, digest: bytes, kept: Kept) -> None:
        if kept.bytes > self.budget:
            self.counts.refused += 1
            return
        while self.bytes + kept.bytes > self.budget:
            _, gone = self._kept.popitem(last=False)
            self.bytes -= gone.bytes
            self.counts.evicted += 1
        self._kept[digest] = kept
        self.bytes += kept.bytes
        self.counts.kept += 1


def size(tensors: dict[str, Tensor], rows: int) -> int:
    """Bytes charged: the tensors and the key (a tuple slot and an int object a row)."""
    return sum(t.nbytes for t in tensors.values()) + 40 * rows


def last_mark(rows: int, grain: int) -> int:
    """The last multiple of `grain` strictly before a prompt's last row; 0: the prompt is too short to keep."""
    return (rows - 1) // grain * grain


def marks(rows: int, hints: Sequence[int], start: int, grain: int) -> list[int]:
    """Where a pass over rows start ... rows - 1 keeps its state, ascending: the last mark, those at or below the hints,
    and a sparse grid."""
    last = last_mark(rows, grain)
    wanted = {last, *(hint // grain * grain for hint in hints), *range(SPARSE, last, SPARSE)}
    return sorted(mark for mark in wanted if start < mark <= last)
