"""Small arrays that cross between host and device together, in one copy."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from tfmagic.kernels.gpu.bring import bring

from .graphs import Graphs

ALIGN = 16


class Fields:
    """Named arrays in one block of memory, on the host (pinned beside a GPU) and on the device.

    `host` and `device` give the arrays by name. `send` and `fetch` copy all of them, behind what was launched before
    and before what is launched next; `wait` waits until the last copy has crossed. Until then the host's arrays may
    neither be written again nor read. `receive` fetches and waits.
    """

    def __init__(self, device: torch.device, **kinds: tuple[torch.dtype, tuple[int, ...]]):
        sizes = [-(-(dtype.itemsize * prod(shape)) // ALIGN) * ALIGN for dtype, shape in kinds.values()]
        *starts, end = accumulate(sizes, initial=0)
        gpu = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=gpu)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._crossed = torch.cuda.Event() if gpu else None
        places = list(zip(kinds.items(), starts))
        self.host: dict[str, Tensor] = {name: view(self._host, at, *kind) for (name, kind), at in places}
        self.device: dict[str, Tensor] = {name: view(self._device, at, *kind) for (name, kind), at in places}
        self._bring = partial(bring, self._device.view(torch.int32), self._host.view(torch.int32))
        self.numpy = {name: x.numpy() for name, x in self.host.items()}
        """The host's arrays, which are quicker to fill."""

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)
        self._record()

    def fetch(self) -> None:
        self._bring()
        self._record()

    def capture(self, graphs: Graphs) -> None:
        """Let `fetch` cost the host as little as the launch of a graph."""
        self._bring = graphs.captured(self._bring)

    def _record(self) -> None:
        if self._crossed is not None:
            self._crossed.record()

    def wait(self) -> None:
        if self._crossed is not None:
            self._crossed.synchronize()

    def receive(self) -> None:
        self.fetch()
        self.wait()


def view(block: Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return block[at : at + dtype.itemsize * prod(shape)].view(dtype).view(shape)
