"""Qwen3.5 in bf16 for a GPU: static memory, one graph launch a round. On a CPU the same code runs on the kernels'
twins.

The bits differ from the exact form's beside it; the row law holds all the same: a row depends on its own prefix alone.
"""

from .model import Model

__all__ = ["Model"]
