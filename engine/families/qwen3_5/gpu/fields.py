"""Small arrays that cross between host and device together, in one copy."""

from __future__ import annotations

from itertools import accumulate
from math import prod

import torch
from torch import Tensor

ALIGN = 16


class Fields:
    """Named arrays in one block of memory, on the host (pinned beside a GPU) and on the device.

    `host` and `device` give the arrays by name. `send` and `receive` copy all of them, behind what was launched before;
    only `receive` waits. What is sent leaves the host later: its arrays may be written again behind `wait`, or behind
    a `receive` since.
    """

    def __init__(self, device: torch.device, **kinds: tuple[torch.dtype, tuple[int, ...]]):
        sizes = [-(-(dtype.itemsize * prod(shape)) // ALIGN) * ALIGN for dtype, shape in kinds.values()]
        *starts, end = accumulate(sizes, initial=0)
        gpu = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=gpu)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device) if gpu else self._host
        self._sent = torch.cuda.Event() if gpu else None
        places = list(zip(kinds.items(), starts))
        self.host: dict[str, Tensor] = {name: view(self._host, at, *kind) for (name, kind), at in places}
        self.device: dict[str, Tensor] = {name: view(self._device, at, *kind) for (name, kind), at in places}
        self.numpy = {name: x.numpy() for name, x in self.host.items()}
        """The host's arrays, which are quicker to fill."""

    def send(self) -> None:
        if self._sent is not None:
            self._device.copy_(self._host, non_blocking=True)
            self._sent.record()

    def wait(self) -> None:
        """Wait until what was sent has left the host."""
        if self._sent is not None:
            self._sent.synchronize()

    def receive(self) -> None:
        if self._sent is not None:
            self._host.copy_(self._device, non_blocking=True)
            torch.cuda.current_stream(self._device.device).synchronize()


def view(block: Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return block[at : at + dtype.itemsize * prod(shape)].view(dtype).view(shape)
