"""What is kept where, for a person to look at."""

from __future__ import annotations

from dataclasses import asdict

from tfmagic.protocol import KeptState, Shelf

from .store import Store

SHOWN = 100
"""States of each place that are told one by one."""


def shelves(store: Store) -> tuple[list[Shelf], list[KeptState]]:
    """The places, and their states, the most recently used first. Any thread; may take a moment on a slow disk."""
    ram = list(store._kept.values())[::-1]
    places = [Shelf("ram", len(ram), store.bytes, store.budget)]
    states = [KeptState("ram", kept.at, kept.bytes, kept.label, kept.made) for kept in ram[:SHOWN]]
    if store.disk is not None:
        files, disk = store.disk.held(), store.disk
        budget = sum(limit or 0 for limit in (disk.limits.learned, disk.limits.spilled))
        size = sum(file.bytes for file in files)
        places.append(Shelf("disk", len(files), size, budget, str(disk.base), asdict(disk.counts)))
        states += [
            KeptState("disk", file.rows, file.bytes, disk.label(file), file.written / 1e9) for file in files[:SHOWN]
        ]
    return places, states
