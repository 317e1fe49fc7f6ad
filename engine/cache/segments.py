"""One kept state as a file: a checked header, then checked segments; nothing in it is ever executed or unpickled.

    "TFSTATE1", u64 length of the header, blake2b-128 of the header, the header: JSON, spaces up to a multiple of 4 KiB
    the key's rows as int64, then every tensor in the header's order, each with zeros behind up to a multiple of 4 KiB

Numbers are little-endian. A segment's CRC-32 covers its zeros too, so no bit of the file is unchecked. Sizes follow
from the header and have to give the file's own size before anything is allocated.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Annotated

import msgspec
import numpy as np
import torch
from torch import Tensor

MAGIC = b"TFSTATE1"
FRONT = struct.Struct("<8sQ16s")
ALIGN = 4096
MAX_HEADER = 1 << 20
LARGE, THREADS = 32 << 20, 4
"""Bytes of a state from which on so many threads read it."""
LABEL = 100
"""Characters of a label."""
PIECE = 8 << 20
"""Bytes of one read or write, so that a thread that waits for the interpreter never waits long."""
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
DTYPES |= {str(d).removeprefix("torch."): d for d in (torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn)}

Size = Annotated[int, msgspec.Meta(ge=0)]


class Damaged(Exception):
    """The file is not a whole state of this namespace; the text says why."""


class Segment(msgspec.Struct):
    name: str
    dtype: str
    shape: list[Size]
    crc: Size

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Header(msgspec.Struct):
    namespace: str
    at: Annotated[int, msgspec.Meta(gt=0)]
    """The state's row, and the length of its key."""
    made: float
    """Unix time, seconds."""
    label: str
    """Whose it is, in words, for people."""
    key_crc: Size
    segments: list[Segment]


_header = msgspec.json.Decoder(Header)


# Writing -----------------------------------------------------------------------------------------


def pack(
    namespace: str, key: Sequence[int], tensors: dict[str, Tensor], made: float, label: str
) -> Iterator[memoryview]:
    """The file's bytes, a piece at a time; the first piece is the header, so every checksum is known by then.

    Raises ValueError for a dtype that has no name here.
    """
    rows = memoryview(np.array(key, dtype="<i8")).cast("B")
    views, segments = [], []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(f"the tensor {name} is {dtype}, which no state file holds")
        views.append(memory(tensor.contiguous()))
        segments.append(Segment(name, dtype, list(tensor.shape), checksum(views[-1])))
    body = msgspec.json.encode(Header(namespace, len(key), made, label[:LABEL], checksum(rows), segments))
    body += b" " * padding(FRONT.size + len(body))
    yield memoryview(FRONT.pack(MAGIC, len(body), digest(body)) + body)
    for view in (rows, *views):
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]
        if rest := padding(len(view)):
            yield memoryview(bytes(rest))


def room(key: Sequence[int], tensors: dict[str, Tensor]) -> int:
    """Bytes that the file takes; the header's are an upper bound."""
    header = FRONT.size + 256 + 6 * LABEL + sum(128 + len(name) for name in tensors)
    sizes = (header, 8 * len(key), *(tensor.nbytes for tensor in dict.values(tensors)))
    return sum(size + padding(size) for size in sizes)


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, shared with it."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def checksum(view: memoryview) -> int:
    """CRC-32 of the bytes and of the zeros behind them."""
    crc = 0
    for start in range(0, len(view), PIECE):
        crc = zlib.crc32(view[start : start + PIECE], crc)
    return zlib.crc32(bytes(padding(len(view))), crc)


def padding(size: int) -> int:
    return -size % ALIGN


def digest(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=16).digest()


# Reading -----------------------------------------------------------------------------------------


class Reader:
    """A state file that is open for reading. Making one reads and checks the header and the sizes.

    Every method raises Damaged when the file is not what it should be, OSError when it cannot be read.
    """

    def __init__(self, fd: int, namespace: str):
        self.fd = fd
        size = os.fstat(fd).st_size
        magic, length, expected = FRONT.unpack(self._take(0, FRONT.size))
        if magic != MAGIC:
            raise Damaged("it is not a state file of this version")
        if length > min(MAX_HEADER, size - FRONT.size):
            raise Damaged("its header is longer than it can be")
        body = self._take(FRONT.size, length)
        if digest(body) != expected:
            raise Damaged("its header's checksum is wrong")
        try:
            self.header = _header.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise Damaged("its header does not read") from None
        if self.header.namespace != namespace:
            raise Damaged("it is of another model or build")
        if any(segment.dtype not in DTYPES for segment in self.header.segments):
            raise Damaged("it holds a tensor of an unknown dtype")
        if len({segment.name for segment in self.header.segments}) < len(self.header.segments):
            raise Damaged("it holds two tensors of one name")
        sizes = [FRONT.size + length, 8 * self.header.at, *(segment.bytes for segment in self.header.segments)]
        *self.starts, end = accumulate(size + padding(size) for size in sizes)
        if size != end:
            raise Damaged(f"it has {size:,} bytes, not {end:,}")

    def key(self) -> tuple[int, ...]:
        """The rows' key; to be read before the tensors."""
        rows = np.empty(self.header.at, dtype="<i8")
        self._fill(memoryview(rows).cast("B"), self.starts[0], self.header.key_crc, "key")
        return tuple(rows.tolist())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, in host memory; large ones are read and checked by several threads."""
        segments = self.header.segments
        tensors = [torch.empty(segment.shape, dtype=DTYPES[segment.dtype]) for segment in segments]
        jobs = [
            (memory(tensor), start, segment.crc, segment.name)
            for tensor, start, segment in zip(tensors, self.starts[1:], segments)
        ]
        if sum(tensor.nbytes for tensor in tensors) < LARGE:
            for job in jobs:
                self._fill(*job)
        else:
            with ThreadPoolExecutor(THREADS, "states-read") as pool:
                for done in [pool.submit(self._fill, *job) for job in jobs]:
                    done.result()
        return {segment.name: tensor for segment, tensor in zip(segments, tensors)}

    def _fill(self, view: memoryview, at: int, crc: int, name: str) -> None:
        found = 0
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            self._into(piece, at + start)
            found = zlib.crc32(piece, found)
        if zlib.crc32(self._take(at + len(view), padding(len(view))), found) != crc:
            raise Damaged(f"the checksum of its {name} is wrong")

    def _take(self, at: int, size: int) -> bytes:
        data = bytearray(size)
        self._into(memoryview(data), at)
        return bytes(data)

    def _into(self, view: memoryview, at: int) -> None:
        while len(view):
            got = os.preadv(self.fd, [view], at)
            if not got:
                raise Damaged("it is cut short")
            view, at = view[got:], at + got
