"""Bytes of files into tensors of a device, several pieces at once.

Onto a GPU each thread reads a piece into pinned memory of its own and copies it from there, on a stream of its own, so
that the disk, the page cache and the bus are busy together; host memory is bounded by threads times `PIECE`. On a CPU
the pieces are read straight to where they belong.
"""

from __future__ import annotations

import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock, local
from typing import NamedTuple

import torch

from tfmagic.errors import Refusal

PIECE = 8 << 20
"""Bytes that a thread reads at once."""
THREADS = 16
"""At most; no more than there are processors."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U32": torch.uint32, "BOOL": torch.bool,
}  # fmt: skip
"""The format's names for what is read."""


class Coming(NamedTuple):
    """A tensor that is being read."""

    tensor: torch.Tensor
    pieces: list[Future]

    def result(self) -> torch.Tensor:
        """Waits. Raises Refusal when the file could not be read."""
        for piece in self.pieces:
            piece.result()
        return self.tensor


class Pump:
    """The threads that read for one device. Its files stay open, and its threads wait, for as long as it lives."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.bytes = 0
        """Read so far."""
        self._lock, self._own, self._files = Lock(), local(), {}
        self._threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "weights")
        weakref.finalize(self, close, self._files)

    def start(self, file: Path, offset: int, dtype: str, shape: tuple[int, ...]) -> Coming:
        """Begin to read a tensor of this kind, whose bytes begin at `offset` of the file. One thread may call this.

        Raises Refusal when the file cannot be opened or the device has no room.
        """
        number = self._open(file)
        try:
            tensor = torch.empty(shape, dtype=DTYPES[dtype], device=self.device)
        except (torch.OutOfMemoryError, RuntimeError):
            size = f"{dtype} {list(shape)}"
            raise Refusal(f"{self.device} has no room for {size} of {file.name}.", "Use a smaller model.") from None
        flat = tensor.reshape(-1).view(torch.uint8)
        ready = None
        if self.device.type == "cuda":  # the memory may still be in use by what was computed before
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
        spans = [(at, min(at + PIECE, len(flat))) for at in range(0, len(flat), PIECE)]
        pieces = [self._threads.submit(self._piece, file, number, offset + a, flat[a:b], ready) for a, b in spans]
        return Coming(tensor, pieces)

    def _piece(self, file: Path, number: int, offset: int, to: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        if ready is None:
            read(file, number, offset, to)
        else:
            if not hasattr(self._own, "stream"):
                self._own.stream = torch.cuda.Stream(self.device)
                self._own.buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
            buffer = self._own.buffer[: len(to)]
            read(file, number, offset, buffer)
            with torch.cuda.stream(self._own.stream), torch.inference_mode():
                self._own.stream.wait_event(ready)
                to.copy_(buffer, non_blocking=True)
            self._own.stream.synchronize()
        with self._lock:
            self.bytes += len(to)

    def _open(self, file: Path) -> int:
        if file not in self._files:
            try:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise Refusal(f"{file} cannot be read: {error.strerror}.", "Check the file's permissions.") from None
        return self._files[file]


def read(file: Path, number: int, offset: int, to: torch.Tensor) -> None:
    """Fill `to` [n] uint8 in host memory from the open file. Raises Refusal."""
    room, done = memoryview(to.numpy()), 0
    while done < len(room):
        try:
            count = os.preadv(number, [room[done:]], offset + done)
        except OSError as error:
            raise Refusal(f"{file} cannot be read: {error.strerror}.", "Check the disk.") from None
        if not count:
            raise Refusal(f"{file} has become shorter while it was read.", "Download the model again.")
        done += count


def close(files: dict[Path, int]) -> None:
    for number in files.values():
        os.close(number)
