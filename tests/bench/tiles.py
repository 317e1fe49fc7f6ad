"""Times every tile that a product may take on the device it runs on, and rewrites the tables of `kernels/gpu/tiles.py`.

    python -m tests.bench.tiles [--only dense|affine] [--models 9b,4b,27b] [--rows 8,16,...] [--seconds N]
                                [--output FILE] [--dry]

First the ceilings: a copy in device memory, and an 8192^3 bf16 product by the vendor's library. Then, for every weight
shape, all candidates are built at once by as many threads as there are processors; for every number of rows the fastest
of those that give a row the bits that most of them give is kept. One with other bits, or that cannot be built or
launched, is named and left out. Weights change from launch to launch, so none is found in the L2 cache. Launches are
timed in a CUDA graph: all of them briefly, the best of them again for longer. The tables are written after every shape.
"""

from __future__ import annotations

import argparse
import functools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tfmagic.kernels.gpu import affine as affine_module
from tfmagic.kernels.gpu import linear, tiles
from tfmagic.kernels.gpu.affine import Affine
from tfmagic.kernels.gpu.compiling import compiled_only
from tfmagic.kernels.gpu.epilogue import GATED, PLAIN
from tfmagic.kernels.gpu.linear import Dense
from tfmagic.kernels.gpu.tiles import MOST, PROCESSORS, Tile

from .checkpoints import SIZES, Size
from .gpu import copied

FORMAT = (4, 64)
COLD = 256 << 20
"""Bytes of weights that launches go round."""
MANY = 4096
"""Rows that stand for the largest of MOST."""
AGAIN = 4
"""Candidates that are timed for longer."""


TALL = (
    (64, 64, 4, 8), (64, 128, 4, 6), (64, 128, 8, 6), (64, 256, 8, 4), (128, 64, 4, 6), (128, 64, 8, 6),
    (128, 128, 8, 4), (128, 128, 8, 6), (128, 256, 8, 3), (128, 256, 8, 4), (256, 128, 8, 3), (256, 128, 8, 4),
)  # fmt: skip
"""Rows, columns, warps and stages."""


class Shape(NamedTuple):
    """A weight's outputs and inputs, and what its product is used for."""

    n: int
    k: int
    gated: bool = False
    few: bool = False
    """Never of more than a round's rows."""
    many: bool = False
    """Of pictures: always of many rows."""

    @property
    def what(self) -> int:
        return GATED if self.gated else PLAIN


def shapes(s: Size) -> list[Shape]:
    """The weights of the text model, fused as they are held, and of the tower."""
    wide, inner, merged = s.width, s.vision_intermediate, 4 * s.width
    tower = (3 * wide, wide), (wide, wide), (inner, wide), (wide, inner), (merged, merged), (s.hidden, merged)
    values, queries = s.value_heads * s.dim, s.heads * s.head_dim
    return [
        Shape(s.channels + values + 2 * s.value_heads, s.hidden),
        Shape(2 * queries + 2 * s.kv_heads * s.head_dim, s.hidden),
        *dict.fromkeys(Shape(s.hidden, inputs) for inputs in (values, queries)),
        Shape(2 * s.intermediate, s.hidden, gated=True),
        Shape(s.hidden, s.intermediate),
        Shape(s.vocab, s.hidden, few=True),
        *(Shape(n, k, many=True) for n, k in tower),
    ]


def timed(calls: list[Callable[[], Any]], seconds: float = 0.02) -> float:
    """Seconds of one call, from a graph of all of them; the median of several replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side()):  # `torch.cuda.graph` would give back all cached memory first
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
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


@functools.cache
def side() -> torch.cuda.Stream:
    """The stream on which graphs are captured."""
    return torch.cuda.Stream()


def ceilings() -> tuple[float, float]:
    """Bytes read and written a second by a copy, and operations a second of an 8192^3 bf16 product."""
    copy = copied("cuda")
    x, w = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    y = torch.empty_like(x)
    product = 2 * 8192**3 / timed([lambda: torch.matmul(x, w, out=y)] * 4)
    return copy, product


def dense_candidates(most: int, n: int) -> Iterator[Tile]:
    if most <= 64:
        rows = max(most, 16)
        for columns, warps in ((16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (128, 4)):
            for depth in (64, 128, 256, 512):
                for stages in (3, 4, 5, 6):
                    under_way = (rows + columns) * depth * 2 * (stages - 1)
                    if 24 << 10 <= under_way <= 200 << 10 and columns * depth <= 16384 and 100 <= n // columns <= 4000:
                        yield Tile("stream", rows, columns, depth, warps, stages, early=True)
        for columns in (64, 128):
            yield Tile("tall", rows, columns, 128, 4, 4)
    else:
        for rows, columns, warps, stages in TALL:
            yield Tile("tall", rows, columns, 64, warps, stages, halves=rows * columns >= 32768)


def affine_candidates(most: int, n: int) -> Iterator[Tile]:
    if most <= 64:
        yield from direct_candidates(most, n)
        for columns, warps in ((64, 2), (128, 4)) if most <= 32 else ((64, 4), (128, 4), (128, 8)):
            for stages in (3, 6):
                yield Tile("stream", most, columns, 128, warps, stages, early=True)
        return
    if most <= 512:
        yield from direct_candidates(64, n)
        for rows, columns, warps in ((64, 128, 4), (128, 64, 4), (128, 128, 8)):
            for stages in (3, 4):
                yield Tile("stream", rows, columns, 128, warps, stages)
    if most >= 256:
        for rows, columns, warps, stages in (
            (64, 256, 4, 4), (128, 64, 8, 5), (128, 128, 8, 3), (128, 128, 8, 4), (128, 256, 8, 3), (128, 256, 8, 4),
        ):  # fmt: skip
            yield Tile("tall", rows, columns, 64, warps, stages)


def direct_candidates(most: int, n: int) -> Iterator[Tile]:
    """With outputs for every processor to end together, in one wave or several."""
    blocks, slices = -(-n // 16), tiles.slices(n)
    for form in ("direct", "wide") if most <= 32 else ("wide",):
        step = 4 if form == "wide" else 1
        for parts in (1, 2, 4, 8):
            even = -(-blocks * parts // PROCESSORS)
            for outputs in sorted({-(-min(even, 20) // step) * step, 4, 8, 16}):
                tile = Tile(form, max(most, 8), 16 * outputs, 256, early=True, parts=parts)
                warps, programs = outputs * slices // parts, -(-blocks // outputs) * parts
                if 8 <= warps <= 24 and not PROCESSORS < programs < 3 * PROCESSORS:
                    with suppress(ValueError):
                        tiles.room(tile, slices)
                        yield tile


def fingerprint(x: torch.Tensor) -> tuple[int, int]:
    """Of the bits of float32 x [rows, columns] and their places; sums that wrap around."""
    bits = x.view(torch.int32).to(torch.int64)
    place = torch.arange(1, bits.shape[1] + 1, device=x.device)
    by_row = (bits * place).sum(1) * torch.arange(1, len(bits) + 1, device=x.device)
    return int(bits.sum()), int(by_row.sum())


def tried(launch: Callable, shape: Shape, weights: list, x: torch.Tensor, candidates: list[Tile]) -> list[Tile]:
    """The candidates that can be launched and give every row the bits that most of them give it."""
    found: dict[tuple[int, int], list[Tile]] = {}
    columns = shape.n // 2 if shape.gated else shape.n
    for tile in candidates:
        out = torch.full((len(x), columns), float("nan"), device="cuda")
        try:
            launch(x, weights[0], shape.what, None, out, tile)
            torch.cuda.synchronize()
        except Exception as error:  # too much shared memory, or what this Triton cannot build
            print(f"    not built: {tuple(tile)}: {type(error).__name__} {str(error)[:120]!r}", flush=True)
            if "CUDA error" in str(error) or "illegal" in str(error):
                raise
            continue
        found.setdefault(fingerprint(out), []).append(tile)
    groups = sorted(found.values(), key=len, reverse=True)
    for tile in (tile for group in groups[1:] for tile in group):
        print(f"    other bits than {len(groups[0])} tiles give: {tuple(tile)}", flush=True)
    return groups[0] if groups else []


def fastest(
    launch: Callable, shape: Shape, weights: list, x: torch.Tensor, candidates: list[Tile]
) -> tuple[Tile, float] | None:
    """Of `launch(x, weight, what, residual, out, tile)`: the best tile and its seconds; None where none can be run."""
    columns = shape.n // 2 if shape.gated else shape.n
    out = torch.empty(len(x), columns, dtype=torch.bfloat16, device="cuda")

    def took(tile: Tile, seconds: float) -> float:
        try:
            return timed([lambda w=w: launch(x, w, shape.what, None, out, tile) for w in weights], seconds)
        except Exception as error:
            print(f"    not run: {tuple(tile)}: {type(error).__name__} {str(error)[:120]!r}", flush=True)
            if "CUDA error" in str(error) or "illegal" in str(error):
                raise
            return float("inf")

    sound = tried(launch, shape, weights, x, candidates)
    brief = sorted((took(tile, 0.002), tile) for tile in sound)[:AGAIN]
    if not brief:
        return None
    seconds, tile = min((took(tile, 0.02), tile) for _, tile in brief)
    if tile.form != "tall" and len(candidates) > 1:
        other = tile._replace(early=not tile.early)
        seconds, tile = min((seconds, tile), (took(other, 0.02), other))
    return (tile, seconds) if seconds < float("inf") else None


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


def written(table: dict) -> str:
    rows = {key: "".join(f"\n        {source(tile)}," for tile in row) for key, row in table.items()}
    lines = [f"    {key}: ({row}\n    )," for key, row in rows.items()]
    return "{\n" + "\n".join(lines) + "\n}" if lines else "{}"


def source(tile: Tile) -> str:
    """A tile as it is written: what is as usual is left out."""
    form, *sizes = tile[: 4 if tile.form in ("direct", "wide") else 6]
    more = [f"{name}={getattr(tile, name)}" for name in tile._fields[6:] if getattr(tile, name) != usual(name)]
    return f'Tile("{form}", {", ".join(map(str, [*sizes, *more]))})'


def usual(name: str) -> int | bool:
    return Tile._field_defaults[name]


def rewrite(path: Path, dense: dict, affine: dict) -> None:
    """Put the tables into the source."""
    source = Path(tiles.__file__).read_text()
    for name, table in (("DENSE", dense), ("AFFINE", affine)):
        body = written(table)
        pattern = rf"(?ms)^({name}: .*?) = \{{.*?(?=^#)"
        source = re.sub(pattern, lambda m, body=body: f"{m[1]} = {body}\n", source, count=1)
    path.write_text(source)


def plan(kind: str, shape: Shape, rows: list[int], dry: bool) -> dict[int, list[Tile]]:
    """For each place in MOST that is asked for, the tile in use and the others that it could be."""
    plans = {}
    for place, most in enumerate(MOST):
        if most in rows and not (shape.few and most > 256) and not (shape.many and most != MOST[-1]):
            use = use_of(kind, shape, most)
            options = dense_candidates(most, shape.n) if kind == "dense" else affine_candidates(most, shape.n)
            plans[place] = [use] if dry else [*dict.fromkeys([use, *options])]
    return plans


def use_of(kind: str, shape: Shape, most: int) -> Tile:
    return tiles.dense(shape.n, shape.k, most) if kind == "dense" else tiles.affine(shape.n, shape.k, *FORMAT, most)


def build(launch: Callable, shape: Shape, weight: Any, plans: dict[int, list[Tile]]) -> None:
    """Every kernel that will be launched."""
    columns = shape.n // 2 if shape.gated else shape.n
    with compiled_only():
        for place, candidates in plans.items():
            x = torch.empty(rows_of(place), shape.k, dtype=torch.bfloat16, device="cuda")
            for dtype in (torch.float32, torch.bfloat16):
                out = torch.empty(len(x), columns, dtype=dtype, device="cuda")
                for tile in candidates:
                    launch(x, weight, shape.what, None, out, tile)


def rows_of(place: int) -> int:
    return min(MOST[place], MANY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["dense", "affine"])
    parser.add_argument("--models", default="9b,4b,27b", help=f"of {', '.join(SIZES)}")
    parser.add_argument(
        "--rows", default=",".join(map(str, MOST[:-1])) + f",{MANY}", help="numbers of rows to tune for"
    )
    parser.add_argument("--seconds", type=float, default=540, help="begin nothing after, and keep what was found")
    parser.add_argument("--output", type=Path, default=Path(tiles.__file__))
    parser.add_argument("--dry", action="store_true", help="time the tiles that are in use, and write nothing")
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    copy, product = ceilings()
    print(f"copy {copy / 1e12:.2f} TB/s, 8192^3 bf16 {product / 1e12:.0f} TFLOP/s", flush=True)
    dense, affine = dict(tiles.DENSE), dict(tiles.AFFINE)
    wanted = [MOST[-1] if int(rows) == MANY else int(rows) for rows in args.rows.split(",")]
    every = dict.fromkeys(shape for model in args.models.split(",") for shape in shapes(SIZES[model]))
    for kind in ("dense", "affine") if args.only is None else (args.only,):
        for shape in every:
            if kind == "affine" and shape.many:
                continue  # pictures' weights are never packed
            if time.perf_counter() < until:
                found = tune(kind, shape, plan(kind, shape, wanted, args.dry), copy, until)
                key = (shape.n, shape.k) if kind == "dense" else (shape.n, shape.k, *FORMAT)
                (dense if kind == "dense" else affine)[key] = found
                if not args.dry:
                    rewrite(args.output, dense, affine)
            else:
                print(f"{kind} {shape.n}x{shape.k}: no time was left", flush=True)


def tune(kind: str, shape: Shape, plans: dict[int, list[Tile]], copy: float, until: float) -> tuple[Tile, ...]:
    """A tile for each of MOST: the fastest, or the one in use where none was timed."""
    began = time.perf_counter()
    weights = dense_weights(shape.n, shape.k) if kind == "dense" else affine_weights(shape.n, shape.k)
    launch = linear.dense if kind == "dense" else affine_module.affine
    build(launch, shape, weights[0], plans)
    built, found = time.perf_counter() - began, [use_of(kind, shape, most) for most in MOST]
    for place, candidates in plans.items():
        x = torch.randn(rows_of(place), shape.k, device="cuda").bfloat16()
        if time.perf_counter() > until or (best := fastest(launch, shape, weights, x, candidates)) is None:
            print(f"{kind} {shape.n}x{shape.k} {len(x):5d} rows: as it was, {tuple(found[place])}", flush=True)
            continue
        found[place], took = best
        bytes_read = shape.n * shape.k * (2 if kind == "dense" else FORMAT[0] / 8 + 4 / FORMAT[1])
        moved = bytes_read + 2 * len(x) * (shape.k + shape.n // (2 if shape.gated else 1))
        print(
            f"{kind} {shape.n}x{shape.k} {len(x):5d} rows {took * 1e6:8.1f} us  {moved / took / copy:5.0%} of the copy"
            f"  {2 * len(x) * shape.n * shape.k / took / 1e12:5.0f} TFLOP/s  {tuple(found[place])}",
            flush=True,
        )
    print(
        f"  ({kind} {shape.n}x{shape.k}: {time.perf_counter() - began:.1f} s, of it building {built:.1f})", flush=True
    )
    del weights
    torch.cuda.empty_cache()
    return tuple(found)


if __name__ == "__main__":
    main()
