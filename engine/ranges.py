"""NVTX ranges, which NVIDIA's profilers show over the kernels (`nsys profile --trace cuda,nvtx`): named as the parts of
the time to first token, and as those of a round. Without a CUDA device they are nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@functools.cache
def shown() -> bool:
    """Whether there is a device whose profilers could show them, and a PyTorch that can tell those."""
    return torch.cuda.is_available() and hasattr(torch._C, "_nvtx")


@contextmanager
def span(name: str) -> Iterator[None]:
    """A range on this thread; also `@span(name)` of a function."""
    if not shown():
        yield
        return
    with torch.cuda.nvtx.range(name):
        yield

