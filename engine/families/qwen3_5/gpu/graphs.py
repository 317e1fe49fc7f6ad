"""Launches, captured: on a GPU a fixed sequence of launches becomes one; on a CPU it simply runs."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Graphs:
    """Graphs that run one at a time and so share one pool of memory."""

    def __init__(self, device: torch.device):
        self.device, self.count = device, 0
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def captured(self, launch: Callable[[], None]) -> Callable[[], None]:
        """`launch` as a graph. It runs once before, so that everything is compiled: its inputs must stand for nothing
        then."""
        self.count += 1
        if self._pool is None:
            return launch
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            launch()
        return graph.replay
