"""Times every tile that a product may take on the device it runs on, and rewrites the tables of `kernels/gpu/tiles.py`.

    python -m tests.bench.tiles [--only dense|affine] [--models 4B,9B,27B] [--seconds N] [--output FILE] [--dry]

First the ceilings: a copy in device memory, and an 8192^3 bf16 product by the vendor's library. Then, for every weight
shape and number of rows, the fastest tile of those that give the same bits as the first; one that does not is named and
left out. Weights change from launch to launch, so none is found in the L2 cache. Launches are timed in a CUDA graph.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tfmagic.kernels.gpu import affine as affine_module
from tfmagic.kernels.gpu import linear, tiles
from tfmagic.kernels.gpu.affine import Affine
from tfmagic.kernels.gpu.epilogue import GATED, PLAIN
from tfmagic.kernels.gpu.linear import Dense
from tfmagic.kernels.gpu.tiles import MOST, Tile

MODELS = {  # (outputs, inputs), and whether the output is gated
    "4B": [(12352, 2560, False), (9216, 2560, False), (2560, 4096, False), (18432, 2560, True), (2560, 9216, False)],
    "9B": [(12352, 4096, False), (10240, 4096, False), (4096, 4096, False), (24576, 4096, True), (4096, 12288, False)],
    "27B": [(16480, 5120, False), (14336, 5120, False), (5120, 6144, False), (34816, 5120, True), (5120, 17408, False)],
    "head": [(248320, 4096, False), (248320, 5120, False)],
}
FORMAT = (4, 64)
COLD = 256 << 20
"""Bytes of weights that launches go round."""


def timed(calls: list[Callable[[], Any]], seconds: float = 0.02) -> float:
    """Seconds of one call, from a graph of all of them; the median of several replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    took, spent = [], 0.0
    while len(took) < 5 or (spent < seconds and len(took) < 50):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) / 1e3)
        spent += took[-1]
    return sorted(took[1:])[len(took[1:]) // 2] / len(calls)


def ceilings() -> tuple[float, float]:
    """Bytes read and written a second by a copy, and operations a second of an 8192^3 bf16 product."""
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * a.numel() / timed([lambda: b.copy_(a)] * 4)
    x, w = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    y = torch.empty_like(x)
    product = 2 * 8192**3 / timed([lambda: torch.matmul(x, w, out=y)] * 4)
    return copy, product


def dense_candidates(most: int) -> Iterator[Tile]:
    if most <= 64:
        most = max(most, 16)
        for columns in (16, 32, 64, 128):
            for depth in (64, 128, 256):
                for stages in (3, 4, 6):
                    if 24 << 10 <= (most + columns) * depth * 2 * stages <= 200 << 10 and columns * depth <= 16384:
                        yield Tile("stream", most, columns, depth, 2 if columns == 16 else 4, stages)
        for columns in (64, 128):
            yield Tile("tall", most, columns, 128, 4, 4)
    else:
        for rows, columns in ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 128)):
            for stages in (3, 4, 5):
                warps = 8 if rows * columns >= 16384 else 4
                for halves in (False, True) if rows * columns >= 32768 else (False,):
                    yield Tile("tall", rows, columns, 64, warps, stages, halves=halves)
        for columns in (128, 256):
            for stages in (3, 4):
                yield Tile("tall", 128, columns, 64, 4, stages, specialised=True)


def affine_candidates(most: int) -> Iterator[Tile]:
    if most <= 64:
        for rows in {most, 8} if most <= 16 else {most}:
            for columns, warps in ((16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (128, 4), (128, 8)):
                for stages in (2, 3, 5, 7):
                    yield Tile("stream", rows, columns, 0, warps, stages)
    else:
        for rows, columns, warps in ((64, 64, 4), (128, 64, 8), (64, 128, 8), (128, 128, 8), (256, 64, 8)):
            for stages in (2, 3):
                yield Tile("tall", rows, columns, 0, warps, stages)


def fastest(
    launch: Callable, weights: list, what: int, n: int, k: int, rows: int, candidates: Iterator[Tile]
) -> tuple[Tile | None, float]:
    """`launch(x, weight, what, residual, out, tile)` over the candidates: the best tile and its seconds."""
    x = torch.randn(rows, k, device="cuda").bfloat16()
    columns = n // 2 if what == GATED else n
    out, first = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda"), None
    best, least = None, float("inf")
    for tile in candidates:
        try:
            exact = torch.empty(rows, columns, device="cuda")
            launch(x, weights[0], what, None, exact, tile)
            torch.cuda.synchronize()
            first = exact if first is None else first
            if not torch.equal(exact, first):
                print(f"    other bits: {tile}", flush=True)
                continue
            took = timed([lambda w=w, tile=tile: launch(x, w, what, None, out, tile) for w in weights])
        except Exception as error:  # too much shared memory, or what this Triton cannot build
            if "CUDA error" in str(error):
                raise
            print(f"    not built: {tile}: {type(error).__name__} {str(error)[:80]!r}", flush=True)
            continue
        if took < least:
            best, least = tile, took
    return best, least


def dense_weights(n: int, k: int) -> list[Dense]:
    count = max(2, -(-COLD // (2 * n * k)))
    return [Dense(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5) for _ in range(count)]


def affine_weights(n: int, k: int) -> list[Affine]:
    bits, group = FORMAT
    count = max(2, -(-COLD // (n * k * bits // 8)))
    made = []
    for _ in range(count):
        q = torch.randint(-(2**31), 2**31 - 1, (n, k * bits // 32), device="cuda", dtype=torch.int32)
        scales = torch.rand(n, k // group, device="cuda").bfloat16() / k**0.5
        made.append(Affine(q.view(torch.uint32), scales, -8 * scales, bits, group))
    return made


def written(name: str, table: dict) -> str:
    lines = [f"    {key}: (" + "".join(f"\n        {tile}," for tile in row) + "\n    )," for key, row in table.items()]
    return "{\n" + "\n".join(lines) + "\n}" if lines else "{}"


def rewrite(path: Path, dense: dict, affine: dict) -> None:
    """Put the tables into the source."""
    source = Path(tiles.__file__).read_text()
    for name, table in (("DENSE", dense), ("AFFINE", affine)):
        body = written(name, table).replace("form=", "").replace("rows=", "").replace("columns=", "")
        pattern = rf"(?ms)^({name}: .*?) = \{{.*?(?=^#)"
        source = re.sub(pattern, lambda m, body=body: f"{m[1]} = {body}\n", source, count=1)
    path.write_text(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["dense", "affine"])
    parser.add_argument("--models", default="4B,9B,27B,head", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rows", default=",".join(map(str, MOST[:-1])) + ",4096", help="numbers of rows to tune for")
    parser.add_argument("--seconds", type=float, default=540, help="stop after, and write what was found")
    parser.add_argument("--output", type=Path, default=Path(tiles.__file__))
    parser.add_argument("--dry", action="store_true", help="time the tiles that are in use, and write nothing")
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    copy, product = ceilings()
    print(f"copy {copy / 1e12:.2f} TB/s, 8192^3 bf16 {product / 1e12:.0f} TFLOP/s", flush=True)
    dense, affine = dict(tiles.DENSE), dict(tiles.AFFINE)
    wanted = [int(rows) for rows in args.rows.split(",")]
    shapes = [shape for model in args.models.split(",") for shape in MODELS[model]]
    for kind in ("dense", "affine") if args.only is None else (args.only,):
        for n, k, gated in shapes:
            weights = dense_weights(n, k) if kind == "dense" else affine_weights(n, k)
            launch = linear.dense if kind == "dense" else affine_module.affine
            found = []
            for place, most in enumerate(MOST):
                rows = min(most, 4096)
                use = tiles.dense(n, k, most) if kind == "dense" else tiles.affine(n, k, *FORMAT, most)
                if rows not in wanted or time.perf_counter() > until:
                    found.append(use)
                    continue
                options = dense_candidates(most) if kind == "dense" else affine_candidates(most)
                options = iter([use]) if args.dry else dict.fromkeys([use, *options])
                tile, took = fastest(launch, weights, GATED if gated else PLAIN, n, k, rows, options)
                if tile is not None and tile.form == "stream" and not args.dry:
                    both = iter([tile, tile._replace(early=not tile.early)])
                    tile, took = fastest(launch, weights, GATED if gated else PLAIN, n, k, rows, both)
                found.append(tile or use)
                size = n * k * (2 if kind == "dense" else 36 / 64) + 2 * rows * (k + n // (2 if gated else 1))
                print(
                    f"{kind} {n}x{k} {rows:5d} rows {took * 1e6:8.1f} us  {size / took / copy:5.0%} of the copy"
                    f"  {2 * rows * n * k / took / 1e12:5.0f} TFLOP/s  {place}: {tuple(found[-1])}",
                    flush=True,
                )
            (dense if kind == "dense" else affine)[(n, k) if kind == "dense" else (n, k, *FORMAT)] = tuple(found)
            del weights
            torch.cuda.empty_cache()
            if not args.dry:
                rewrite(args.output, dense, affine)


if __name__ == "__main__":
    main()
