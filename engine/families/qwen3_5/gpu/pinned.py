"""Pinned host memory for kept states, made ahead of the turns that keep them.

Pinning takes a second for one or two GiB, mostly to clear the pages, and nothing can be launched beside CUDA's own
allocation. Here a thread touches the pages first, large ones where the system has them, and has CUDA register what is
there already. On an H200: 2.5 GB/s against 1.5, and beside it a loop of launches takes a tenth longer, not five times
as long.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import prod

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 28
"""Bytes that are registered at a time: launches wait for some 9 ms."""
ALIGN = 4096
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class PinnedPool:
    """Pieces of host memory; one is free again when no tensor refers to it any more.

    A piece lies within one chunk, for no copy may cross from one registration into another. It may be taken again while
    a copy from or to it is still under way: the next one into it must be launched behind that.
    """

    def __init__(self, size: int):
        """`size`: bytes, of which at first none are there."""
        self._memory = np.frombuffer(mmap.mmap(-1, -(-size // CHUNK) * CHUNK, flags=FLAGS), np.uint8)
        self.address, self.size = self._memory.ctypes.data, len(self._memory)
        self.grown = threading.Event()
        """Set when no more will be made ready."""
        self._freed: deque[tuple[int, int]] = deque()  # (start, bytes), from any thread
        self._spans: list[tuple[int, int]] = []  # (start, end) of what is free, in order

    def grow(self, register: Callable[[int, int], bool]) -> None:
        """Make all of it ready, chunk by chunk; on a thread of its own. `register`: pins so many bytes at an address;
        False: the system allows no more."""
        with suppress(OSError):
            self._memory.base.obj.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, self.size, CHUNK):
            self._memory[start : start + CHUNK : mmap.PAGESIZE] = 0
            if not register(self.address + start, CHUNK):
                break
            self._freed.append((start, CHUNK))
        self.grown.set()

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """A tensor of anything; None where there is no room yet, or any more."""
        wanted = dtype.itemsize * prod(shape)
        size = max(1, -(-wanted // ALIGN)) * ALIGN
        self._gather()
        span = min(((end - start, start, end) for start, end in self._spans if end - start >= size), default=None)
        if span is None:
            return None
        _, start, end = span
        place = self._spans.index((start, end))
        self._spans[place : place + 1] = [(start + size, end)] if end - start > size else []
        piece = self._memory[start : start + size]
        weakref.finalize(piece, self._freed.append, (start, size)).atexit = False
        return torch.from_numpy(piece)[:wanted].view(dtype).view(shape)

    def _gather(self) -> None:
        """What was freed, joined with what is free on both sides of it."""
        while self._freed:
            start, size = self._freed.popleft()
            insort(self._spans, (start, start + size))
            place = self._spans.index((start, start + size))
            for left in (place, place - 1):
                if 0 <= left < len(self._spans) - 1:
                    (a, b), (c, d) = self._spans[left : left + 2]
                    if b == c and b % CHUNK:
                        self._spans[left : left + 2] = [(a, d)]


def pinned(size: int, device: torch.device) -> PinnedPool:
    """A pool of so many bytes beside a GPU, which grows from now on. Raises OSError where the system has no addresses
    for it."""
    pool, runtime, done = PinnedPool(size), torch.cuda.cudart(), []
    weakref.finalize(pool, unpin, done, device).atexit = False

    def register(address: int, size: int) -> bool:
        with torch.cuda.device(device):
            if runtime.cudaHostRegister(address, size, 0) != runtime.cudaError.success:
                return False
        done.append(address)
        return True

    threading.Thread(target=pool.grow, args=(register,), name="pinning", daemon=True).start()
    return pool


def unpin(addresses: list[int], device: torch.device) -> None:
    """Let the system have chunks as ordinary memory again, once nothing is copied any more."""
    torch.cuda.synchronize(device)
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
