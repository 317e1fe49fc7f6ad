from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.patience import LONG
from tfmagic.engine.cache.disk import Disk, Limits
from tfmagic.engine.cache.key import prefixes
from tfmagic.engine.cache.store import Kept, size

GRAIN = 64
FACTS = {"model": "tiny", "device": "cpu", "code": "one"}
MIB = 1 << 20
FREELY = Limits(learned=1 << 30, free=0)


def state(rows: int, first: int = 1, width: int = 8) -> Kept:
    """A state over the ids first, first + 1, ...: its tensors follow from them."""
    g = torch.Generator().manual_seed(first * 1000 + rows)
    tensors = {
        "0.S": torch.randn(2, 5, 3, generator=g),
        "1.k": torch.randn(2, rows, width, generator=g).to(torch.bfloat16),
        "1.none": torch.empty(0, 4),
        "2.n": torch.arange(3),
    }
    return Kept(rows, tuple(range(first, first + rows)), tensors, size(tensors, rows))


def digest(kept: Kept) -> bytes:
    return prefixes(kept.key, GRAIN)[-1]


def same(a: Kept | None, b: Kept) -> bool:
    """Bit for bit."""
    return (
        a is not None
        and (a.at, a.key) == (b.at, b.key)
        and list(a.tensors) == list(b.tensors)
        and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a.tensors.values(), b.tensors.values()))
    )


class Shelf:
    """Disks over one directory, and what they told the log."""

    def __init__(self, base: Path):
        self.base, self.lines, self.open = base, [], []

    def disk(self, limits: Limits = FREELY, **facts: str) -> Disk:
        self.open.append(Disk(self.base, FACTS | facts, GRAIN, limits, self.lines.append))
        return self.open[-1]

    def kept(self, *states: Kept, limits: Limits = FREELY, **facts: str) -> Disk:
        """A disk that has written these, one after the other."""
        disk = self.disk(limits, **facts)
        for kept in states:
            disk.offer(digest(kept), kept)
            assert disk.flush(LONG)
        return disk

    def files(self) -> list[Path]:
        return sorted(self.base.glob("*/*.learned")) + sorted(self.base.glob("*/*.spilled"))


@pytest.fixture
def shelf(tmp_path):
    shelf = Shelf(tmp_path / "states")
    yield shelf
    for disk in shelf.open:
        disk.close(LONG)


def find(disk: Disk, kept: Kept, more: int = 1, above: int = 0) -> Kept | None:
    """What a prompt that goes on for `more` rows after this state's finds."""
    key = [*kept.key, *range(-1, -1 - more, -1)]
    return disk.find(prefixes(key[:-1], GRAIN), key, above)
