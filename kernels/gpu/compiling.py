"""Kernels compiled many at once, before they are needed.

Triton compiles a kernel where it is first launched, and the launch waits. A model launches about a hundred different
ones, which is a minute of one core; most of that work leaves Python's lock alone, so threads share it well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

try:
    import triton
except ImportError:
    triton = None

COMPILING: ContextVar[bool] = ContextVar("compiling", default=False)
"""This thread's launches compile and run nothing."""

if triton is not None:

    class Kernel(triton.JITFunction):
        def run(self, *args, warmup, **options):
            return super().run(*args, warmup=warmup or COMPILING.get(), **options)


@contextmanager
def compiled_only(threads: int | None = None) -> Iterator[None]:
    """Within, launches of this thread compile their kernels and run nothing; leaving waits for all of them. A kernel
    that cannot be compiled is tried again, and fails, where it is launched. `threads`: None: one a processor."""
    from triton.runtime._async_compile import AsyncCompileMode

    compiling = COMPILING.set(True)
    try:
        with ThreadPoolExecutor(threads or os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        COMPILING.reset(compiling)
