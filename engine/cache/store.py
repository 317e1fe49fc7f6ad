"""Kept states in memory, within a budget of bytes.

A state is made by a prompt pass alone and only at multiples of the family's grain, so it holds exactly what a cold
pass over the same rows would hold.

Who goes first when room is needed: of the states that a longer kept state extends and that are no shared system block,
the least recently used; then the least recently used of all. The state that a pass resumed from and those that it has
just kept go only when nothing else is left.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from .key import Names, named, prefixes

if TYPE_CHECKING:
    from .disk import Disk

SPARSE, MOST = 1024, 32
"""Rows between the marks that a long prompt keeps for prompts that part from it early; twice as many, and so on, where
there would be more marks than that: each takes room on the device until the prompt is done."""
REMEMBERED = 4096
"""Evicted states that are remembered by name."""
COMPARED = 256
"""States that are compared row by row, at most, to find the nearest one."""


@dataclass
class Counts:
    hits: int = 0
    misses: int = 0
    kept: int = 0
    evicted: int = 0
    extended: int = 0
    """Of the evicted, those that a longer state extended; the others were the least recently used."""
    refused: int = 0
    """States that there was no room for."""
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
    """Alone; see `Charge`."""
    prompts: set[bytes] = field(default_factory=set)
    """Digests of the whole prompts whose last mark this is."""
    label: str = ""
    """Who kept it, in words."""
    shared: bool = False
    """The system block with which many conversations begin."""
    settled: int = 0
    """Rows of it that were computed while the engine was idle."""
    made: float = field(default_factory=time.time)
    """Unix time, seconds."""
    source: Literal["ram", "disk"] = "ram"
    """Where it came from when it was found last."""


class Charge:
    """Bytes of some states together: a tensor that several of them hold is in memory once. Tensors are told by their
    identity, so a state in here keeps those that it came with."""

    def __init__(self, states: Iterable[Kept] = ()):
        self.bytes = 0
        self._holders: Counter[int] = Counter()
        for kept in states:
            self.add(kept)

    def more(self, kept: Kept) -> int:
        """What it would add."""
        return kept.bytes - sum(x.nbytes for x in dict.values(kept.tensors) if id(x) in self._holders)

    def add(self, kept: Kept) -> None:
        self.bytes += self.more(kept)
        self._holders.update(map(id, dict.values(kept.tensors)))

    def remove(self, kept: Kept) -> None:
        self._holders.subtract(map(id, dict.values(kept.tensors)))
        self._holders = +self._holders
        self.bytes -= self.more(kept)


class Gone(NamedTuple):
    """A state that was evicted."""

    at: int
    label: str
    when: float
    """`time.monotonic()`."""
    why: str
    by: str
    """Who needed its room, in words."""


class Store:
    def __init__(self, budget: int, grain: int, note: str = ""):
        """`budget`: bytes of all states together; `note`: why it is not what was asked for."""
        self.note = note
        self.budget, self.grain, self.counts, self._charge = budget, grain, Counts(), Charge()
        self.disk: Disk | None = None
        """Where states are kept for a restart or when memory has no room for them; None: nowhere."""
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._through: dict[bytes, dict[bytes, None]] = {}  # a prefix's name -> the states that begin with it
        self._gone: OrderedDict[bytes, Gone] = OrderedDict()
        self._last: tuple[Sequence[int], Names] = (), Names([], b"")

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Of all states together."""
        return self._charge.bytes

    def find(self, key: Sequence[int]) -> Kept | None:
        """The longest state that a prompt of this key may start from: at least one row is left to compute."""
        kept = self.longest(key)
        if kept is None:
            self.counts.misses += 1
        else:
            self.counts.hits += 1
        return kept

    def longest(self, key: Sequence[int]) -> Kept | None:
        """`find`, uncounted."""
        digests = self._starts(key)
        held = (digest for digest in reversed(digests) if digest in self._kept)
        digest = next((d for d in held if self._kept[d].key == tuple(key[: self._kept[d].at])), None)
        kept = self._kept[digest] if digest else None
        if kept is not None:
            self._kept.move_to_end(digest)
            kept.source = "ram"
        if self.disk is not None and (longer := self.disk.find(digests, key, above=kept.at if kept else 0)):
            kept = longer
            if self.budget:
                self._add(digests[: kept.at // self.grain], kept, by=kept.label)
        return kept

    def reach(self, key: Sequence[int]) -> int:
        """Rows of the longest state in memory that a prompt of this key may start from. Moves and counts nothing."""
        digests = self._starts(key)
        return next((self._kept[digest].at for digest in reversed(digests) if digest in self._kept), 0)

    def exact(self, kept: Kept, key: Sequence[int]) -> bool:
        """Whether this whole prompt was seen before and `kept` is its last mark."""
        return self._names(key).whole in kept.prompts

    def keep(self, key: Sequence[int], states: dict[int, Callable[[], dict[str, Tensor]]], **how: Any) -> None:
        """`keep_each`, all at once."""
        for _ in self.keep_each(key, states, **how):
            pass

    def keep_each(
        self,
        key: Sequence[int],
        states: dict[int, Callable[[], dict[str, Tensor]]],
        *,
        label: str = "",
        shared: int = 0,
        settled: int | None = None,
        resumed: Kept | None = None,
    ) -> Iterator[None]:
        """Keep states of one prompt: row -> what gives its tensors (called only for states not held yet). Yields behind
        each of these; nothing else may be kept meanwhile.

        `label`: who keeps them; `shared`: the row of the shared system block's state; `settled`: the row from which
        on they were computed while the engine was idle; `resumed`: the state that the pass started from.
        """
        if not self.budget and self.disk is None:
            return
        digests, last = self._starts(key), last_mark(len(key), self.grain)
        own = {digests[at // self.grain - 1] for at in states}
        if resumed is not None:
            own.add(prefixes(resumed.key, self.grain)[-1])
        for at in sorted(states, key=lambda at: (at != last, at != shared, -at)):  # the most wanted first
            digest = digests[at // self.grain - 1]
            if digest not in self._kept and (self.budget or at in (last, shared)):
                tensors = states[at]()
                kept = Kept(at, tuple(key[:at]), tensors, size(tensors, at), label=label, shared=at == shared)
                kept.settled = 0 if settled is None else at - settled
                if self.budget:
                    self._add(digests[: at // self.grain], kept, own, by=label, must=at == last)
                if self.disk is not None and at in (last, shared):
                    self.disk.offer(digest, kept)
                yield
        for digest in digests:  # what was used together ages together, the longest last
            if digest in own and digest in self._kept:
                self._kept.move_to_end(digest)
        if last and digests[-1] in self._kept and settled is None:
            self._kept[digests[-1]].prompts.add(self._names(key).whole)

    def drop(self, kept: Kept) -> None:
        """A state that failed to restore."""
        self.counts.failed += 1
        digest = prefixes(kept.key, self.grain)[-1]
        if self._kept.get(digest) is kept:
            self._remove(digest)
        if self.disk is not None:
            self.disk.forget(digest, kept)

    def clear(self) -> None:
        for held in (self._kept, self._through, self._gone):
            held.clear()
        self._charge = Charge()

    # What a miss asks --------------------------------------------------------------------------------

    def nearest(self, key: Sequence[int], above: int) -> tuple[Kept, int] | None:
        """The state that agrees with the key the furthest, and up to which row; None when none does past `above`
        rows (0: the nearest of all, unless nothing is kept)."""
        digests = self._names(key).prefixes
        for i in range(len(digests), above // self.grain - 1, -1):
            names = self._through.get(digests[i - 1], ()) if i else self._kept
            if names:
                break
        else:
            return None
        start = i * self.grain
        window = tuple(key[start : start + self.grain])
        latest = reversed(list(names)[-COMPARED:])
        alike = ((agree(window, self._kept[name].key[start : start + self.grain]), name) for name in latest)
        rows, name = max(alike, key=lambda pair: pair[0])
        found = self._kept[name], start + rows
        return found if found[1] > above or not above else None

    def gone(self, key: Sequence[int], above: int) -> Gone | None:
        """The longest evicted state, of more than `above` rows, that the key could have started from."""
        digests = self._starts(key)
        return next((self._gone[d] for d in reversed(digests[above // self.grain :]) if d in self._gone), None)

    def _names(self, key: Sequence[int]) -> Names:
        """The key's prefixes and the whole; those of the last key are remembered, which is asked for several times."""
        if self._last[0] is not key:
            self._last = key, named(key, self.grain)
        return self._last[1]

    def _starts(self, key: Sequence[int]) -> list[bytes]:
        """Of them, those that a prompt of this key may start from."""
        return self._names(key).prefixes[: max(len(key) - 1, 0) // self.grain]

    # Room --------------------------------------------------------------------------------------------

    def _add(
        self, names: list[bytes], kept: Kept, spared: Collection[bytes] = (), by: str = "", must: bool = True
    ) -> None:
        """`names`: of its prefixes, its own last; `must`: rather evict what is `spared` than refuse."""
        if not self._make_room(kept, spared, by) and not (must and self._make_room(kept, (), by)):
            self.counts.refused += 1
            return
        digest = names[-1]
        self._kept[digest] = kept
        self._charge.add(kept)
        self.counts.kept += 1
        self._gone.pop(digest, None)
        for prefix in names:
            self._through.setdefault(prefix, {})[digest] = None

    def _make_room(self, kept: Kept, spared: Collection[bytes], by: str) -> bool:
        """Evict until there is room for it. False, and nothing is evicted, when sparing these leaves too little."""
        held = Charge(self._kept[digest] for digest in spared if digest in self._kept)
        if held.bytes + held.more(kept) > self.budget:
            return False
        while self.bytes + self._charge.more(kept) > self.budget:
            self._evict(spared, by)
        return True

    def _evict(self, spared: Collection[bytes], by: str) -> None:
        free = [digest for digest in self._kept if digest not in spared]
        extended = (d for d in free if len(self._through[d]) > 1 and not self._kept[d].shared)
        victim = next(extended, None)
        why = "a longer state extends it" if victim else "least recently used"
        self.counts.evicted += 1
        self.counts.extended += victim is not None
        victim = victim or free[0]
        kept = self._remove(victim)
        if self.disk is not None:
            self.disk.evicted(victim, kept)
        self._gone[victim] = Gone(kept.at, kept.label, time.monotonic(), why, by)
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def _remove(self, digest: bytes) -> Kept:
        kept = self._kept.pop(digest)
        self._charge.remove(kept)
        for prefix in prefixes(kept.key, self.grain):
            del self._through[prefix][digest]
            if not self._through[prefix]:
                del self._through[prefix]
        return kept


def agree(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of their first elements are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def size(tensors: dict[str, Tensor], rows: int) -> int:
    """Bytes of a state alone: the tensors and the key (a tuple slot and an int object a row)."""
    return sum(t.nbytes for t in dict.values(tensors)) + 40 * rows  # unread: they may still arrive


def last_mark(rows: int, grain: int) -> int:
    """The last multiple of `grain` strictly before a prompt's last row; 0: the prompt is too short to keep."""
    return (rows - 1) // grain * grain


def marks(rows: int, hints: Sequence[int], start: int, grain: int) -> list[int]:
    """Where a pass over rows start ... rows - 1 keeps its state, ascending: the last mark, those at or below the hints,
    and a sparse grid."""
    last, step = last_mark(rows, grain), SPARSE
    while last > MOST * step:
        step *= 2
    wanted = {last, *(hint // grain * grain for hint in hints), *range(step, last, step)}
    return sorted(mark for mark in wanted if start < mark <= last)
