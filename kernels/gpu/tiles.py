"""Which form and tile a product takes: a function of the weight's shape and the number of rows, pinned in source.

Rows, columns, warps, stages, form and even the depth of a step change no bit (measured on an H200; `tests/gpu` checks
every entry). `python -m tests.bench.tiles` times the candidates on a device and rewrites the tables below; a shape that
is not in them takes the rule of its kind.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How a product is cut up and launched."""

    form: str
    """stream: a program a tile, for few rows; tall: a program a processor, for many."""
    rows: int
    columns: int
    depth: int
    """Of the inputs, a step."""
    warps: int = 4
    stages: int = 4
    """Steps whose loads are under way together."""
    group: int = 8
    """tall: row tiles that share a sweep over the columns."""
    halves: bool = False
    """tall: the result leaves in two halves of the columns."""
    specialised: bool = False
    """tall: warps of their own for the loads."""
    early: bool = False
    """stream: begins beside the kernel before it, and fetches its first weights into the L2 cache until that ends."""


SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on Hopper."""
AHEAD = 16
"""Lines of 128 bytes of each of its weight rows that an `early` program fetches."""
MOST = (8, 16, 32, 64, 128, 256, 512, 1 << 30)
"""Numbers of rows with a tile of their own: up to each of these."""

# Written by tests/bench/tiles.py: (outputs, inputs) -> a tile for each of MOST.
DENSE: dict[tuple[int, int], tuple[Tile, ...]] = {}
# Written by tests/bench/tiles.py: (outputs, inputs, bits, group) -> a tile for each of MOST.
AFFINE: dict[tuple[int, int, int, int], tuple[Tile, ...]] = {}
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
    return found[place] if found else affine_rule(n, bits, group, MOST[place])


def dense_rule(n: int, k: int, most: int) -> Tile:
    """Few rows: the widest columns that still give a program to nearly every processor, and 48 to 100 KB of weights
    under way on each."""
    if most <= 64:
        most = max(most, 16)
        columns = next((c for c in (128, 64, 32) if n >= 120 * c), 16)
        depth = min(256 if columns <= 32 and most <= 32 else 128, max(64, 1 << (k.bit_length() - 1)))
        return Tile("stream", most, columns, depth, 2 if columns == 16 else 4, 4)
    if most <= 128:
        return Tile("tall", 128, 64 if n < 120 * 128 else 128, 64, 4 if n < 120 * 128 else 8, 4)
    if most <= 512:
        return Tile("tall", 128, 128, 64, 8, 4)
    return Tile("tall", 128, 256, 64, 8, 3, halves=True)


def affine_rule(n: int, bits: int, group: int, most: int) -> Tile:
    """As for bf16. A step's depth is what a unit holds: 16 / bits groups."""
    step = 16 // bits * group
    if most <= 64:
        columns = next((c for c in (64, 32) if n >= 120 * c), 16)
        most = min(most, 32)  # above, registers spill
        bytes_of_step = most * step * 2 + columns * group * 2
        return Tile("stream", most, columns, 0, columns // 16, max(2, min(5, 100_000 // bytes_of_step)))
    rows = 64 if step > 256 or most <= 128 else 128
    return Tile("tall", rows, 64, 0, 8, 2)
