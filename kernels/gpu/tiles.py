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
    """Of a `stream` of an affine weight: 4, one a slice of its inputs."""
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
PROCESSORS = 132
"""Of an H200."""
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
        return Tile("stream", rows, columns, depth, 2 if columns == 16 else 4, stages, early=True)
    if most <= 512:
        wide = -(-most // 128) * -(-n // 128) >= 100
        return Tile("tall", 128, 128 if wide else 64, 64, 8 if wide else 4, 6 if wide else 8)
    return Tile("tall", 128, 256, 64, 8, 3, halves=True)


def affine_rule(n: int, bits: int, group: int, most: int) -> Tile:
    """Few rows: as wide as registers allow without a last wave of few programs, for the inputs are fetched once a
    program; then as many steps under way as there is shared memory for. A step's depth is what a unit holds: 16 / bits
    groups."""
    step = 16 // bits * group
    if most > 64:
        return Tile("tall", 64 if step > 256 or most <= 128 else 128, 64, 0, 8, 2)
    rows = min(most, 32)  # above, registers spill
    units, much = (4096, 0.1) if rows == 8 else (2048, 0.25)
    for columns in (64, 32, 16):
        programs = -(-n // columns)
        beside = min(3 if columns * group <= 2048 and rows == 8 else 2, -(-programs // PROCESSORS))
        if columns * group <= units and programs >= 120 and idle(programs, beside) < much:
            break
    waiting = (SHARED // beside - 1024) // (4 * (columns * group * 2 + rows * step * 2))
    return Tile("stream", rows, columns, 0, 4, 1 + max(1, min(3, waiting)), early=True)


def idle(programs: int, beside: int) -> float:
    """What is lost to a last wave, as a share of the whole, with `beside` programs a processor: a third of a wave still
    takes all that memory gives."""
    waves, last = divmod(programs / (PROCESSORS * beside), 1)
    return max(0.0, 1 / 3 - last) / (waves + last) if waves and last else 0.0
