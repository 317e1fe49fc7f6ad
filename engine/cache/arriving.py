"""Named tensors of a kept state that may still be on their way to host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class Arriving(dict[str, Tensor]):
    """A dict whose tensors are there when they are read: reading waits for them. Sizes are known before, by
    `dict.values(tensors)`."""

    def __init__(self, tensors: dict[str, Tensor], waits: list[Callable[[], Any]], view: Any = None):
        """`waits`: return when the bytes are there, from any thread; `view`: the family's own form of the state."""
        super().__init__(tensors)
        self._waits, self.view = waits, view

    def arrive(self) -> None:
        """Wait."""
        for wait in self._waits:
            wait()
        self._waits = []

    def __getitem__(self, name: str) -> Tensor:
        self.arrive()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.arrive()
        return super().get(name, default)

    def items(self):
        self.arrive()
        return super().items()

    def values(self):
        self.arrive()
        return super().values()
