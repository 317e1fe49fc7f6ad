"""A place in a cell's output whose content changes, and whether there is a notebook to have one."""

from __future__ import annotations

import uuid


def in_kernel() -> bool:
    """Whether a notebook or console front end shows the output, rather than a terminal."""
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class Slot:
    """One display of a notebook. What it showed last is what a saved notebook holds."""

    def __init__(self):
        self._id = f"tfmagic-{uuid.uuid4().hex[:12]}"
        self._shown: dict[str, str] | None = None

    def show(self, bundle: dict[str, str]) -> None:
        """Show this content (by MIME type) in place of the last; nothing when it is the same."""
        from IPython.display import display

        if bundle != self._shown:
            display(bundle, raw=True, display_id=self._id, update=self._shown is not None)
            self._shown = bundle
