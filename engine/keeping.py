"""Keeping: a prompt's states go into the store one at a time, while the device is busy with the rounds behind it.

Nothing is read from the store before all that wait are in it.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator

from .cache.store import Store
from .prefill import Rows


class Keeping:
    """The states that wait. One that cannot be kept costs a later turn some time, nothing else."""

    def __init__(self, store: Store):
        self.store = store
        self._waiting: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, rows: Rows, label: str) -> None:
        """The states at the marks that a whole prompt has passed."""
        hints = rows.prompt.marks
        shared = hints[0] // rows.grain * rows.grain if hints else 0
        states = {mark: view.named for mark, view in rows.reached.items()}
        how = {"label": label, "shared": shared, "resumed": rows.resumed}
        self._waiting.append(self.store.keep_each(rows.prompt.key, states, **how))

    def step(self) -> None:
        """Keep one state."""
        if not self._waiting:
            return
        try:
            next(self._waiting[0])
        except StopIteration:
            self._waiting.popleft()
        except Exception as error:
            self._waiting.popleft()
            traceback.print_exception(error)

    def finish(self) -> None:
        """Keep them all."""
        while self._waiting:
            self.step()

    def forget(self) -> None:
        """Keep none of them."""
        self._waiting.clear()
