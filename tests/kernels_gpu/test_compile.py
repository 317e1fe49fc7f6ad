"""Every product, norm and draw built for an H200 at the tiles and shapes of real models: it fits into shared memory,
nothing spills, and products of many rows take Hopper's own instructions and its copy engine."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels_gpu.offline import SHARED, Built, Launch, compiled, launches, loops
from tfmagic.kernels.gpu import affine as affine_module
from tfmagic.kernels.gpu import linear, norm, pages, rope, sample, tiles
from tfmagic.kernels.gpu.affine import Affine, affine
from tfmagic.kernels.gpu.epilogue import GATED, GELU_TANH, PLAIN
from tfmagic.kernels.gpu.linear import Dense, dense
from tfmagic.kernels.gpu.tiles import Tile

bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
i16, i32, i64 = torch.int16, torch.int32, torch.int64
SHAPES = [  # outputs, inputs of the 4B, 9B, 27B and the embedded model
    (12352, 2560), (18432, 2560), (2560, 9216), (24576, 4096), (12352, 4096), (4096, 12288), (16480, 5120),
    (34816, 5120), (5120, 17408), (5120, 6144), (248320, 4096), (1024, 384), (384, 1024),
]  # fmt: skip
FRAME, SPILL = 64, 400
"""Bytes of local memory that a thread of a product may take, and of an affine one of many rows: on their way out."""


def meta(*shape, dtype=bf16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def dense_launch(
    n: int, k: int, rows: int, tile: Tile, what: int = PLAIN, add: bool = False, dtype: torch.dtype = bf16
) -> Launch:
    out = meta(rows, n // 2 if what == GATED else n, dtype=dtype)
    (launch,) = launches(lambda: dense(meta(rows, k), Dense(meta(n, k)), what, out if add else None, out, tile), linear)
    return launch


def affine_launches(n: int, k: int, bits: int, group: int, rows: int, tile: Tile, what: int = PLAIN) -> list[Launch]:
    w = Affine.__new__(Affine)
    w.n, w.k, w.bits, w.group, w.bias = n, k, bits, group, None
    w.slices, w.tickets = tiles.slices(n), meta(n, dtype=i32)
    blocks, steps = n // 16, -(-k // 128)
    w.units, w.words = meta(blocks, steps, 16, 8 * bits, dtype=i16), meta(blocks, steps, 16, 128 // group, dtype=i32)
    out = meta(rows, n // 2 if what == GATED else n)
    return launches(lambda: affine(meta(rows, k), w, what, None, out, tile), affine_module)


def triton_tile(n: int, k: int, bits: int, group: int, rows: int) -> Tile:
    """Triton's tile of an affine weight, also where CUDA C++ (`test_cuda`) comes first."""
    tile = tiles.affine(n, k, bits, group, rows)
    return tiles.affine_rule(n, bits, group, tile.rows) if tile.form in ("direct", "wide") else tile


def fits(launch: Launch, spilled: int = FRAME) -> Built:
    built = compiled(launch)
    assert built.shared <= SHARED and built.stack <= spilled, (launch.kernel.__name__, built[:3])
    return built


def test_few_and_many_rows():
    few = fits(dense_launch(24576, 4096, 16, tiles.dense(24576, 4096, 16)))
    assert "HMMA" in few.sass and "LDGSTS" in few.sass
    many = fits(dense_launch(24576, 4096, 4096, tiles.dense(24576, 4096, 4096), add=True))
    assert "HGMMA" in many.sass and "UTMALDG" in many.sass and "UTMASTG" in many.sass


@pytest.mark.long
@pytest.mark.parametrize("what", [PLAIN, GATED, GELU_TANH])
def test_products(what):
    """Every tile that the shapes of real models take."""
    taken = {tiles.dense(n, k, most): (n, k, min(most, 4096)) for n, k in SHAPES for most in tiles.MOST}
    for tile, shape in taken.items():
        fits(dense_launch(*shape, tile, what, add=what == PLAIN))


@pytest.mark.long
@pytest.mark.parametrize("form", [(128, 256, 64, 8, 4), (256, 128, 64, 8, 5), (128, 128, 64, 8, 6), (64, 64, 64, 4, 9)])
def test_stages_leave_room_for_what_goes_in_and_out(form):
    tile = Tile("tall", *form)
    for launch in (
        dense_launch(248320, 4096, 4096, tile, dtype=fp32),
        dense_launch(4096, 4096, 4096, tile, add=True),
        dense_launch(4096, 4096, 4096, tile._replace(halves=True), add=True),
    ):
        fits(launch, SPILL)


@pytest.mark.long
def test_products_that_begin_early():
    launch = dense_launch(8192, 4096, 16, Tile("stream", 16, 64, 128, 4, 4, early=True, ahead=16))
    built = fits(launch)
    assert launch.options["launch_pdl"] and "ACQBULK" in built.sass and "CCTL" in built.sass
    tile = Tile("stream", 8, 64, 128, 2, 4, early=True, ahead=4)
    assert "ACQBULK" in fits(affine_launches(4096, 4096, 4, 64, 1, tile)[0]).sass


@pytest.mark.long
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 64)])
def test_affine_products(bits, group):
    shapes = [(34816, 5120), (5120, 17408), (1024, 384)]
    taken = {triton_tile(n, k, bits, group, most): (n, k, min(most, 4096)) for n, k in shapes for most in tiles.MOST}
    for tile, (n, k, rows) in taken.items():
        for launch in affine_launches(n, k, bits, group, rows, tile):
            built = fits(launch, SPILL if rows > 16 else FRAME)
            assert "HGMMA" in built.sass or tile.form == "stream" or launch.kernel.__name__ == "_widen"


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(("n", "k"), [(34816, 5120), (16480, 5120), (5120, 17408)])
def test_few_rows_of_an_affine_weight_keep_up_with_memory(n, k, rows):
    """A warp's step of 32 columns and 128 inputs: at most 340 instructions, none of which moves numbers about. Memory
    gives a processor's four quarters one such step each in some 510 cycles."""
    tile = triton_tile(n, k, 4, 64, rows)
    (launch,) = affine_launches(n, k, 4, 64, rows, tile)
    loop = max(loops(fits(launch).sass), key=len)
    assert len(loop) * 32 * tile.warps <= 340 * tile.columns
    assert not [op for op in loop if op.startswith(("SHFL", "STS", "LDL", "STL"))]
    assert sum("HFMA2.BF16" in op for op in loop) == 2 * tile.columns // tile.warps


@pytest.mark.long
def test_what_stands_between_products():
    x, ints = meta(16, 5120), meta(16, dtype=i32)
    norms = [meta(256, dtype=fp32)] * 2
    angles = [meta(16, 32, dtype=fp32)] * 2
    calls = [
        (lambda: norm.rms(x, meta(5120, dtype=fp32), 1e-6), norm),
        (lambda: norm.add_rms(x, x, meta(5120, dtype=fp32), 1e-6), norm),
        (lambda: norm.layer(meta(16, 1152), *[meta(1152, dtype=fp32)] * 2, 1e-6), norm),
        (lambda: norm.gated_rms(meta(16, 48, 128), meta(16, 16480)[:, 10240:16384], meta(128), 1e-6), norm),
        (lambda: rope.gated(meta(16, 24, 256), meta(16, 14336)), rope),
    ]
    for fp8 in (False, True):
        held = pages.pages(100, 4, 256, fp8, "meta")
        window = pages.Rows(*(None if part is None else part[:16, :, 0] for part in held))
        where = meta(8, 64, dtype=i32), ints, ints
        for into, place in ((held, where), (window, ())):
            calls.append(
                (lambda into=into, place=place: rope.norm_rope_write(
                    meta(16, 14336), *norms, 1e-6, *angles, 24, into, *place), rope)
            )  # fmt: skip
    for call, module in calls:
        for launch in launches(call, module):
            fits(launch)


@pytest.mark.long
@pytest.mark.parametrize("vocabulary", [248320, 4096])
def test_draws(vocabulary):
    kinds = fp64, i32, fp64, fp64, i64, i32
    rules = sample.Rules(*(meta(16, dtype=kind) for kind in kinds), vocabulary)
    found = launches(lambda: sample.sample(meta(16, vocabulary, dtype=fp32), rules), sample)
    assert len(found) == 20
    for launch in {(one.kernel.__name__, one.args[-3] is True): one for one in found}.values():
        fits(launch)
