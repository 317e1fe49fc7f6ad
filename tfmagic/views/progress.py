"""What goes on before there is anything to show: one line that a cell shows meanwhile."""

from __future__ import annotations

import sys

from .slot import Slot, in_kernel


class Progress:
    """Call it with each new word. As a context it takes its line away at the end; `keep` lets the last one stand."""

    def __init__(self):
        self._slot = Slot() if in_kernel() else None
        self._width = 0

    def __call__(self, text: str) -> None:
        if self._slot is not None:
            self._slot.show({"text/plain": text})
        else:
            sys.stdout.write(f"\r{text:<{self._width}}")
            sys.stdout.flush()
        self._width = len(text)

    def keep(self) -> None:
        if self._slot is None and self._width:
            sys.stdout.write("\n")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error) -> None:
        from IPython.display import clear_output

        if self._width and self._slot is not None:
            clear_output()
        elif self._width:
            sys.stdout.write(f"\r{'':<{self._width}}\r")
