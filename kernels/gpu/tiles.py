"""Which form and tile a product takes: a function of the weight's shape and the number of rows, pinned in source.

Rows, columns, warps, stages, form and even the depth of a step change no bit (measured on an H200; `tests/gpu` checks
every entry). `python -m tests.bench.tiles` times the candidates on a device, and `python -m tests.bench.within` some of
them within real rounds; both rewrite the tables below. A shape that is not in them takes the rule of its kind.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from .common import cdiv


class Tile(NamedTuple):
    """How a product is cut up and launched."""

    form: str
    """stream: a program a tile, for few rows; tall: a program a processor, for many. Of affine weights, in CUDA C++:
    direct, for the fewest rows; wide, where four warps multiply together."""
    rows: int
    columns: int
    depth: int
    """Of the inputs, a step. direct, wide: 256, which x is brought by."""
    warps: int = 4
    """direct, wide: not asked; a program has one for each 16 columns and slice of its inputs."""
    stages: int = 4
    """Steps whose loads are under way together. Not asked by direct and wide."""
    group: int = 8
    """tall: row tiles that share a sweep over the columns."""
    halves: bool = False
    """tall: the result leaves in two halves of the columns."""
    early: bool = False
    """Not tall: begins beside the kernel before it."""
    ahead: int = 0
    """stream: lines of 128 bytes of each of its weight rows that an `early` program fetches into the L2 cache until
    that kernel ends; a power of two, or 0."""
    parts: int = 1
    """direct, wide: programs, a cluster, that share out the slices of its inputs."""


SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on Hopper."""
PROCESSORS = 132
"""Of an H200."""
MOST = (8, 16, 32, 64, 128, 256, 512, 1 << 30)
"""Numbers of rows with a tile of their own: up to each of these."""

# Written by tests/bench/tiles.py: (outputs, inputs) -> a tile for each of MOST.
DENSE: dict[tuple[int, int], tuple[Tile, ...]] = {
    (12352, 4096): (
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 32, 128, 128, 4, 4),
        Tile("tall", 64, 128, 128, 4, 4),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 128, 64, 8, 4),
        Tile("tall", 128, 256, 64, 8, 3, halves=True),
    ),
    (10240, 4096): (
        Tile("stream", 16, 16, 128, 2, 6, early=True, ahead=16),
        Tile("stream", 16, 16, 128, 2, 6, early=True, ahead=16),
        Tile("tall", 32, 128, 128, 4, 4),
        Tile("tall", 64, 128, 128, 4, 4),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 128, 64, 8, 4),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
    ),
    (4096, 4096): (
        Tile("stream", 16, 16, 512, 2, 4, early=True, ahead=64),
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 32, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 64, 32, 128, 4, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
    ),
    (24576, 4096): (
        Tile("stream", 16, 64, 128, 4, 4, early=True),
        Tile("stream", 16, 64, 128, 4, 4, early=True),
        Tile("stream", 32, 64, 128, 4, 4),
        Tile("tall", 64, 64, 128, 4, 4),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 256, 128, 64, 8, 4, halves=True),
    ),
    (4096, 12288): (
        Tile("stream", 16, 16, 512, 2, 4, early=True),
        Tile("stream", 16, 32, 512, 2, 4, early=True),
        Tile("stream", 32, 32, 512, 4, 4, early=True, ahead=16),
        Tile("stream", 64, 32, 128, 4, 6),
        Tile("tall", 64, 64, 64, 4, 8),
        Tile("tall", 64, 128, 64, 4, 6),
        Tile("tall", 128, 128, 64, 8, 4),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
    ),
    (248320, 4096): (
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 32, 128, 128, 4, 4),
        Tile("stream", 64, 128, 128, 4, 4),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 3, halves=True),
    ),
    (3456, 1152): (
        Tile("stream", 16, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 32, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 64, 32, 128, 4, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 128, 64, 8, 6),
    ),
    (1152, 1152): (
        Tile("stream", 16, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 16, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 32, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 64, 16, 128, 2, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 128, 64, 8, 4),
    ),
    (4304, 1152): (
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 32, 32, 256, 4, 4, early=True, ahead=16),
        Tile("stream", 64, 32, 128, 4, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 128, 64, 8, 4),
    ),
    (1152, 4304): (
        Tile("stream", 16, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 16, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 32, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 64, 16, 128, 2, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 128, 64, 8, 4),
    ),
    (4608, 4608): (
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 32, 32, 256, 4, 4, early=True, ahead=16),
        Tile("stream", 64, 32, 128, 4, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 128, 64, 8, 4),
    ),
    (4096, 4608): (
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 32, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 64, 32, 128, 4, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
    ),
    (16480, 5120): (
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 32, 128, 128, 4, 4),
        Tile("tall", 64, 128, 128, 4, 4),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
    ),
    (14336, 5120): (
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 32, 128, 128, 4, 4),
        Tile("tall", 64, 128, 128, 4, 4),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
    ),
    (5120, 6144): (
        Tile("stream", 16, 16, 512, 2, 3, early=True, ahead=64),
        Tile("stream", 16, 16, 256, 1, 5),
        Tile("stream", 32, 16, 256, 2, 4, early=True, ahead=16),
        Tile("tall", 64, 64, 128, 4, 4),
        Tile("tall", 64, 128, 64, 4, 6),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 256, 64, 8, 3, halves=True),
    ),
    (34816, 5120): (
        Tile("stream", 16, 32, 256, 2, 4, early=True),
        Tile("stream", 16, 32, 128, 2, 6, early=True),
        Tile("stream", 32, 32, 256, 2, 3),
        Tile("tall", 64, 128, 128, 4, 4),
        Tile("tall", 128, 64, 64, 4, 6),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 128, 64, 8, 4),
        Tile("tall", 128, 256, 64, 8, 3, halves=True),
    ),
    (5120, 17408): (
        Tile("stream", 16, 16, 512, 1, 3, early=True),
        Tile("stream", 16, 32, 512, 2, 3, early=True),
        Tile("stream", 32, 16, 256, 2, 4),
        Tile("tall", 64, 64, 128, 4, 4),
        Tile("tall", 64, 128, 64, 4, 6),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 256, 128, 64, 8, 4, halves=True),
    ),
    (248320, 5120): (
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 32, 128, 128, 4, 4),
        Tile("tall", 64, 128, 128, 4, 4),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 256, 128, 64, 8, 4, halves=True),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 3, halves=True),
    ),
    (5120, 4608): (
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 32, 32, 256, 4, 4, early=True, ahead=16),
        Tile("stream", 64, 32, 128, 4, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
    ),
    (12352, 2560): (
        Tile("stream", 16, 32, 128, 2, 6, early=True),
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 32, 128, 128, 4, 4),
        Tile("tall", 64, 128, 128, 4, 4),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 3, halves=True),
    ),
    (10240, 2560): (
        Tile("stream", 16, 32, 128, 2, 6, early=True),
        Tile("stream", 16, 16, 128, 2, 6, early=True),
        Tile("tall", 32, 128, 128, 4, 4),
        Tile("tall", 64, 128, 128, 4, 4),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
    ),
    (2560, 4096): (
        Tile("stream", 16, 16, 512, 2, 4, early=True, ahead=64),
        Tile("stream", 16, 16, 512, 2, 4, early=True, ahead=64),
        Tile("stream", 32, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 64, 32, 128, 4, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 128, 64, 8, 4),
    ),
    (18432, 2560): (
        Tile("stream", 16, 32, 128, 2, 6, early=True),
        Tile("stream", 16, 32, 128, 2, 6, early=True),
        Tile("stream", 32, 32, 128, 2, 3),
        Tile("stream", 64, 64, 64, 4, 4),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
    ),
    (2560, 9216): (
        Tile("stream", 16, 16, 512, 2, 4, early=True),
        Tile("stream", 16, 16, 512, 2, 4, early=True),
        Tile("stream", 32, 16, 512, 2, 3, early=True, ahead=16),
        Tile("stream", 64, 16, 128, 4, 5, early=True, ahead=16),
        Tile("tall", 64, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 6),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 128, 64, 8, 4),
    ),
    (248320, 2560): (
        Tile("stream", 16, 64, 256, 4, 5),
        Tile("tall", 16, 128, 128, 4, 4),
        Tile("tall", 32, 128, 128, 4, 4),
        Tile("tall", 64, 128, 128, 4, 4),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 3, halves=True),
    ),
    (3072, 1024): (
        Tile("stream", 16, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 32, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 64, 32, 128, 4, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 256, 64, 8, 4, halves=True),
    ),
    (1024, 1024): (
        Tile("stream", 16, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 16, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 32, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 64, 16, 128, 2, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 256, 64, 8, 3, halves=True),
    ),
    (4096, 1024): (
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 16, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 32, 32, 256, 4, 5, early=True, ahead=16),
        Tile("stream", 64, 32, 128, 4, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 128, 64, 8, 6),
        Tile("tall", 128, 256, 64, 8, 3, halves=True),
    ),
    (1024, 4096): (
        Tile("stream", 16, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 16, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 32, 16, 256, 2, 5, early=True, ahead=16),
        Tile("stream", 64, 16, 128, 2, 4, early=True, ahead=16),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 64, 64, 4, 8),
        Tile("tall", 128, 256, 64, 8, 3, halves=True),
    ),
}
# Written by tests/bench/tiles.py: (outputs, inputs, bits, group) -> a tile for each of MOST.
AFFINE: dict[tuple[int, int, int, int], tuple[Tile, ...]] = {
    (16480, 5120, 4, 64): (
        Tile("direct", 8, 128, 256, early=True),
        Tile("direct", 16, 128, 256, early=True),
        Tile("wide", 32, 128, 256, early=True),
        Tile("wide", 64, 256, 256, early=True, parts=2),
        Tile("stream", 128, 128, 128, 8, 3),
        Tile("stream", 128, 128, 128, 8, 3),
        Tile("tall", 128, 256, 64, 8, 4),
        Tile("tall", 128, 256, 64, 8, 4),
    ),
    (14336, 5120, 4, 64): (
        Tile("direct", 8, 112, 256, early=True),
        Tile("direct", 16, 112, 256, early=True),
        Tile("wide", 32, 128, 256, early=True),
        Tile("wide", 64, 256, 256, early=True, parts=2),
        Tile("stream", 128, 128, 128, 8, 3),
        Tile("stream", 128, 128, 128, 8, 3),
        Tile("tall", 128, 256, 64, 8, 4),
        Tile("tall", 128, 256, 64, 8, 3),
    ),
    (5120, 6144, 4, 64): (
        Tile("direct", 8, 48, 256, early=True),
        Tile("direct", 16, 80, 256, early=True, parts=2),
        Tile("wide", 32, 192, 256, early=True, parts=4),
        Tile("stream", 64, 64, 128, 4, 3, early=True),
        Tile("stream", 128, 128, 128, 8, 3, early=True),
        Tile("stream", 64, 128, 128, 4, 3, early=True),
        Tile("tall", 128, 256, 64, 8, 4),
        Tile("tall", 128, 256, 64, 8, 3),
    ),
    (34816, 5120, 4, 64): (
        Tile("direct", 8, 272, 256, early=True),
        Tile("direct", 16, 272, 256, early=True),
        Tile("wide", 32, 320, 256, early=True),
        Tile("wide", 64, 320, 256, early=True),
        Tile("stream", 128, 64, 128, 4, 3, early=True),
        Tile("stream", 128, 64, 128, 4, 3),
        Tile("stream", 64, 128, 128, 4, 3),
        Tile("tall", 128, 256, 64, 8, 3),
    ),
    (5120, 17408, 4, 64): (
        Tile("direct", 8, 80, 256, early=True, parts=2),
        Tile("direct", 16, 80, 256, early=True, parts=2),
        Tile("wide", 32, 192, 256, early=True, parts=4),
        Tile("stream", 64, 64, 128, 4, 3, early=True),
        Tile("stream", 128, 128, 128, 8, 4, early=True),
        Tile("stream", 128, 128, 128, 8, 4, early=True),
        Tile("stream", 128, 128, 128, 8, 4, early=True),
        Tile("tall", 128, 128, 64, 8, 4),
    ),
    (248320, 5120, 4, 64): (
        Tile("direct", 8, 272, 256, early=True),
        Tile("direct", 16, 320, 256, early=True),
        Tile("wide", 32, 320, 256, early=True),
        Tile("stream", 64, 128, 128, 4, 3, early=True, ahead=4),
        Tile("stream", 128, 128, 128, 8, 5),
        Tile("stream", 128, 128, 128, 8, 5),
        Tile("tall", 128, 256, 64, 8, 3),
        Tile("tall", 128, 256, 64, 8, 3),
    ),
}
# End of what is written.


def bucket(rows: int) -> int:
    """The place in MOST of a number of rows."""
    return next(i for i, most in enumerate(MOST) if rows <= most)


def dense(n: int, k: int, rows: int) -> Tile:
    """The tile of a bf16 weight [n, k]."""
    place = bucket(rows)
    return DENSE[n, k][place] if (n, k) in DENSE else dense_rule(n, k, MOST[place])


def affine(n: int, k: int, bits: int, group: int, rows: int) -> Tile:
    """The tile of an affine weight [n, k]."""
    place = bucket(rows)
    found = AFFINE.get((n, k, bits, group))
    if found:
        return found[place]
    return direct_rule(n, MOST[place]) or affine_rule(n, bits, group, MOST[place])


def dense_rule(n: int, k: int, most: int) -> Tile:
    """Few rows: the widest columns that still give a program to nearly every processor without a last wave of few, and
    as many steps under way as there is shared memory for, up to four."""
    if most <= 64:
        rows, least = max(most, 16), 120 if most <= 8 else 75  # more rows are worth more columns beside them
        for columns in (128, 64, 32, 16):
            depth = min(256 if columns <= 32 and rows <= 32 else 128, max(64, 1 << (k.bit_length() - 1)))
            programs, size = -(-n // columns), (rows + columns) * depth * 2
            beside = max(1, min(SHARED // (3 * size), -(-programs // PROCESSORS)))
            if programs >= (120 if columns > 32 else least) and idle(programs, beside) < (0.1 if rows < 64 else 0.25):
                break
        stages = max(2, min(4, (SHARED // beside - 1024) // size)) + (rows < 64)  # one waits for its product to end
        return Tile("stream", rows, columns, depth, 2 if columns == 16 else 4, stages, early=True, ahead=16)
    if most <= 512:
        wide = -(-most // 128) * -(-n // 128) >= 100
        return Tile("tall", 128, 128 if wide else 64, 64, 8 if wide else 4, 6 if wide else 8)
    return Tile("tall", 128, 256, 64, 8, 3, halves=True)


def slices(n: int) -> int:
    """The sums that the inputs of an affine weight of n outputs are cut into; no tile changes it. Programs for all
    processors come from the outputs alone where there are many. Of 1, 2, 4, 8 and 16, the best in a 27B's rounds."""
    return 8 if n < 8192 else 2 if n < 24576 else 1


def room(tile: Tile, slices: int) -> tuple[int, int]:
    """(pairs of steps of x that a direct or wide tile holds for each slice, its bytes of shared memory). Raises
    ValueError for too many bytes, or parts that do not fit."""
    wide, outputs, inner = tile.form == "wide", tile.columns // 16, slices // tile.parts
    if slices % tile.parts or outputs * inner > 32 or (wide and outputs % 4):
        raise ValueError(f"{tile}: {slices} slices do not fit")
    held, barriers = inner * tile.rows * (2 * tile.depth + (0 if wide else 16)), 1024 * wide
    stages = min(6, (SHARED - barriers) // held, 64 // inner) if wide else 3
    x, sums = stages * held, (slices - 1) * outputs * tile.rows * 64
    shared = barriers + max(x, sums) if wide else x + sums
    if shared > SHARED or stages < 3:
        raise ValueError(f"{tile} of {slices} slices has no room")
    return stages, shared


def direct_rule(n: int, most: int) -> Tile | None:
    """Up to 64 rows: outputs shared out evenly among the processors, a program each where it can be, and of 12 to 24
    warps; None where nothing has room."""
    if most > 64:
        return None
    found, blocks, count, step = [], cdiv(n, 16), slices(n), 4 if most > 16 else 1
    for parts in (1, 2, 4, 8):
        inner, even = max(count // parts, 1), cdiv(blocks * parts, PROCESSORS)
        outputs = step * max(1, min(cdiv(even, step), 20 // inner // step))
        form = "wide" if step == 4 else "direct"
        tile = Tile(form, max(most, 8), 16 * outputs, 256, early=True, parts=parts)
        with suppress(ValueError):
            room(tile, count)
            waves = cdiv(cdiv(blocks, outputs) * parts, PROCESSORS)
            found.append((waves * outputs * inner, abs(outputs * inner - 18), tile))
    return min(found)[2] if found else None


def affine_rule(n: int, bits: int, group: int, most: int) -> Tile:
    """Triton's. Few rows: 128 columns, since the inputs are fetched once for them, and as many steps under way as there
    is shared memory for, up to seven, with all programs resident at once. A step is 128 inputs."""
    if most > 256:
        return Tile("tall", 128, 256, 64, 8, 3)
    rows = min(most, 128)
    programs, weights, inputs = -(-n // 128) * slices(n), 128 * (16 * bits + 512 // group), rows * 256
    beside = max(1, min(4 if rows <= 32 else 192 // rows, -(-programs // PROCESSORS)))
    # Inputs have one place more: tensor cores read them where they are.
    stages = max(3, min(8, 1 + (SHARED // beside - 1024 - inputs) // (weights + inputs)))
    return Tile("stream", rows, 128, 128, 8 if rows == 128 else 4, stages, early=most <= 64, ahead=4)


def idle(programs: int, beside: int) -> float:
    """What is lost to a last wave, as a share of the whole, with `beside` programs a processor: a third of a wave still
    takes all that memory gives."""
    waves, last = divmod(programs / (PROCESSORS * beside), 1)
    return max(0.0, 1 / 3 - last) / (waves + last) if waves and last else 0.0
