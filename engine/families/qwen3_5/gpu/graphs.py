"""Launches, captured: on a GPU a fixed sequence of launches becomes one; on a CPU it simply runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tfmagic.kernels.gpu.compiling import COMPILING


class Graphs:
    """Graphs that run one at a time and so share their memory: what one leaves there, the next may write over."""

    def __init__(self, device: torch.device):
        self.device, self.count = device, 0
        # One stream for all: the allocator never gives what was freed on one stream to a capture on another.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: torch.cuda.CUDAGraph | None = None  # shared memory is that of a graph which is alive

    def captured(self, launch: Callable[[], None]) -> Callable[[], None]:
        """`launch` as a graph. It runs once before, so that everything is compiled: its inputs must stand for nothing
        then, or for what may be computed twice."""
        self.count += 1
        if COMPILING.get():
            launch()
            return launch
        if self._stream is None:
            return launch
        launch()
        torch.cuda.current_stream(self.device).synchronize()  # its inputs are free to be filled, and what fails is told
        graph, shared = torch.cuda.CUDAGraph(), None if self._last is None else self._last.pool()
        # `torch.cuda.graph` would do, but it first gives all cached memory of the device and the host back.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(shared, "thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        self._last = graph
        return graph.replay
