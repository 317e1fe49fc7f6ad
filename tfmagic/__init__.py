"""tfmagic: the LLM engine you can see into, from a notebook cell.

`%load_ext tfmagic`, then `%%tfold`. From plain Python: `tfmagic.connect()`. Nothing heavy is imported before its use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import connect
    from .run import Run

__all__ = ["Run", "__version__", "connect", "load_ipython_extension", "unload_ipython_extension"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "connect":
        from .client import connect

        return connect
    if name == "Run":
        from .run import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext tfmagic`: register `%tfold`, `%%tfold` and their Tab completion."""
    from .magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext tfmagic`: take back everything that loading registered."""
    from .magics import unload

    unload(shell)
