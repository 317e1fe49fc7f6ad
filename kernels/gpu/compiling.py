"""Kernels compiled many at once, before they are needed.

Triton compiles a kernel where it is first launched, and the launch waits; so it does for the kernel's launcher, which a
C compiler builds. A model launches about a hundred different ones, which is a minute of one core; most of that work
leaves Python's lock alone, so threads share it well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

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
    """Within, launches of this thread compile their kernels and run nothing; leaving waits for all of them, ready to be
    launched. A kernel that cannot be compiled or loaded is tried again, and fails, where it is launched. `threads`:
    None: one a processor."""
    from triton.runtime._async_compile import AsyncCompileMode

    compiling = COMPILING.set(True)
    try:
        pool = Compilers(threads or os.cpu_count(), initializer=same_device())
        with pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        COMPILING.reset(compiling)


class Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and make each ready to be launched."""

    def submit(self, compile: Callable[..., Any], *args: Any) -> Future:
        return super().submit(lambda: ready(compile(*args)))


def ready(kernel: Any) -> Any:
    """A kernel that was compiled: if it is Triton's, its launcher is built and it is on the device, as its first launch
    would have it."""
    with suppress(Exception):
        _ = kernel.run
    return kernel


def same_device() -> Callable[[], None] | None:
    """What another thread calls to work on this thread's device; None where there is no GPU."""
    return partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None
