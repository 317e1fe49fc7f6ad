"""Tiles tried within real rounds: `python -m tests.bench.within 4b|9b|27b [--bits 4|8|16] [--seconds N] [--dry]`.

`tests.bench.tiles` times a product by itself. In a round, other kernels stand before and behind it, and what it does
beside them counts: whether it begins early, and how much of its weights it fetches until its turn comes. So for the
shapes of a model, a round of one row and one of sixteen are timed with one tile after another put into the tables; what
makes the round shorter stays, and the tables in `kernels/gpu/tiles.py` are rewritten.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tfmagic.engine.families.qwen3_5.gpu.rounds import BUCKETS, Bucket, Round
from tfmagic.engine.families.qwen3_5.gpu.warmup import one_of_each
from tfmagic.kernels.gpu import tiles
from tfmagic.kernels.gpu.compiling import compiled_only
from tfmagic.kernels.gpu.tiles import MOST, Tile

from .checkpoints import SIZES
from .gpu import Bench, copied, opened
from .tiles import FORMAT, direct_candidates, rewrite, shapes

TIMES, BETTER = 25, 0.003
"""Rounds of which the shortest counts, and milliseconds that a tile must save to be taken."""
AFFINE_ROUNDS = (1, 1), (1, 16), (16, 32), (16, 64)
ROUNDS = {16: ((1, 1), (16, 16)), 4: AFFINE_ROUNDS, 8: AFFINE_ROUNDS}
"""Bits -> (streams, rows) of a round for each of the first places of MOST."""


def dense_options(use: Tile, n: int) -> Iterator[Tile]:
    if use.form == "stream":
        yield use._replace(early=False, ahead=0)
        for ahead in (0, 16, 64):
            yield use._replace(early=True, ahead=ahead)
    for columns, depth, warps, stages, ahead in ((64, 128, 4, 4, 0), (32, 128, 2, 6, 0), (16, 512, 2, 4, 64)):
        if 100 <= n // columns <= 4000:
            yield Tile("stream", 16, columns, depth, warps, stages, early=True, ahead=ahead)


def affine_options(use: Tile, n: int) -> Iterator[Tile]:
    yield use._replace(early=not use.early)
    yield from direct_candidates(use.rows, n)


class Rounds:
    def __init__(self, model):
        self.model, self.few = model, one_of_each(model.text)

    @torch.no_grad()
    def ms(self, streams: int, rows: int) -> float:
        """The shortest of a few rounds with the tables as they are; infinity where a kernel cannot be launched."""
        self.model.rounds._made.clear()
        window = next(n for n in BUCKETS if n >= -(-rows // streams))
        try:
            with compiled_only():
                Round(Bucket(streams, window, self.model.size, True), self.few, self.model.graphs, None)
            return min(self.model.time_round(streams, rows) for _ in range(TIMES))
        except Exception as error:
            print(f"    not run: {type(error).__name__} {str(error)[:90]}", flush=True)
            torch.cuda.synchronize()
            return float("inf")


def tune(rounds: Rounds, table: dict, keys: list[tuple], bits: int, until: float) -> None:
    """Put the best tiles that were found into the table."""
    options = dense_options if bits == 16 else affine_options
    for place, shape in enumerate(ROUNDS[bits]):
        best = rounds.ms(*shape)
        print(f"{shape[0]} stream(s), {shape[1]} rows: {best:.3f} ms to begin with", flush=True)
        for key in keys:
            use = table[key][place]
            for tile in dict.fromkeys(options(use, key[0])):
                if time.perf_counter() > until:
                    break
                put(table, key, place, tile)
                took = rounds.ms(*shape)
                if took < best - BETTER:
                    best, use = took, tile
                    print(f"  {key}: {best:.3f} ms with {tuple(tile)}", flush=True)
            put(table, key, place, use)
        print(f"{shape[0]} stream(s), {shape[1]} rows: {best:.3f} ms", flush=True)


def put(table: dict, key: tuple, place: int, tile: Tile) -> None:
    table[key] = (*table[key][:place], tile, *table[key][place + 1 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[size for size in SIZES if size != "tiny"])
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=16)
    parser.add_argument("--seconds", type=float, default=300.0, help="try nothing after")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    o = parser.parse_args()
    until = time.perf_counter() + o.seconds
    o.folder, o.packed, o.kv, o.cache_gib, o.device = None, None if o.bits == 16 else o.bits, "bf16", 4.0, "cuda:0"
    b = Bench(None, copied(o.device), o.model)
    with tempfile.TemporaryDirectory() as temporary:
        opened(b, o, Path(temporary))
    table, form = (tiles.DENSE, ()) if o.bits == 16 else (tiles.AFFINE, (o.bits, FORMAT[1]))
    own = [(shape.n, shape.k, *form) for shape in shapes(SIZES[o.model]) if not shape.many and not shape.few]
    for key in own:
        of = tiles.dense if o.bits == 16 else tiles.affine
        table.setdefault(key, tuple(of(*key, most) for most in MOST))
    tune(Rounds(b.opened._model), table, own, o.bits, until)
    if not o.dry:
        rewrite(Path(tiles.__file__), tiles.DENSE, tiles.AFFINE)


if __name__ == "__main__":
    main()
