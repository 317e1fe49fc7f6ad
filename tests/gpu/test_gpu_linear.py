"""Products on a GPU: what they say, and the row law over every tile in use."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from tests.gpu.told import near, parted, same
from tfmagic.kernels.gpu import norm, tiles
from tfmagic.kernels.gpu.affine import Affine, affine, affine_twin
from tfmagic.kernels.gpu.epilogue import GATED, GELU_TANH, PLAIN, finish_twin
from tfmagic.kernels.gpu.linear import Dense, dense, gate_up, interleave, linear, linear_twin, logits
from tfmagic.kernels.gpu.tiles import Tile

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 7, 16, 17, 33, 64, 65, 100, 128, 129, 256, 300, 512, 777, 4096)
DENSE = [
    (24576, 4096), (4096, 12288), (8192, 4096), (34816, 5120), (5120, 17408), (16480, 5120), (2560, 9216), (1024, 384),
    (4304, 1152), (71, 70),
]  # fmt: skip
DENSE += [key for key in tiles.DENSE if key not in DENSE]
AFFINE = [(34816, 5120, 4, 64), (5120, 17408, 4, 64), (4096, 12288, 4, 128), (4096, 4096, 8, 64), (1024, 384, 4, 32)]
AFFINE += [key for key in tiles.AFFINE if key not in AFFINE]
DEPTHS = [
    Tile("stream", 16, 32, 32, 4, 4), Tile("stream", 16, 64, 64, 4, 4, early=True, ahead=16),
    Tile("stream", 32, 64, 128, 8, 3),
    Tile("stream", 16, 16, 256, 2, 3), Tile("stream", 128, 128, 64, 8, 3), Tile("tall", 64, 64, 64, 4, 4),
    Tile("tall", 128, 128, 64, 8, 4), Tile("tall", 128, 256, 64, 8, 3, halves=True), Tile("tall", 16, 64, 128, 4, 4),
]  # fmt: skip
STEPS = [
    Tile("stream", 8, 16, 128, 4, 3), Tile("stream", 8, 64, 128, 4, 3), Tile("stream", 16, 32, 128, 2, 4),
    Tile("stream", 16, 128, 128, 4, 5), Tile("stream", 16, 128, 128, 2, 5), Tile("stream", 32, 64, 128, 4, 3),
    Tile("stream", 64, 128, 128, 4, 3), Tile("stream", 128, 128, 128, 8, 4), Tile("tall", 64, 64, 64, 4, 3),
    Tile("tall", 128, 64, 64, 8, 3), Tile("tall", 128, 128, 64, 8, 4), Tile("tall", 128, 256, 64, 8, 3),
    Tile("stream", 16, 64, 128, 4, 4, early=True, ahead=4), Tile("stream", 8, 128, 128, 4, 4, early=True),
    *(Tile("direct", rows, 16 * outputs, 256, early=outputs == 3, parts=parts)
      for rows in (8, 16, 64) for outputs, parts in ((1, 1), (3, 1), (3, 2), (2, 8))),
    *(Tile("wide", rows, 64 * fours, 256, early=fours == 1, parts=parts)
      for rows in (8, 16, 32, 64) for fours, parts in ((1, 1), (2, 2), (1, 2), (1, 8))),
]  # fmt: skip
"""Forms, shapes and depths that no table need name."""


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random(*shape):
    return torch.randn(*shape, device="cuda")


def close(out, ref, *facts, slack=2**-8):
    near(out, ref, slack, 1e-3 * float(ref.abs().mean()), *facts)


def tile_of(w, rows):
    return tiles.dense(w.n, w.k, rows) if isinstance(w, Dense) else tiles.affine(w.n, w.k, w.bits, w.group, rows)


def stored(n, k, bits, group):
    q = torch.randint(-(2**31), 2**31 - 1, (n, k * bits // 32), device="cuda", dtype=torch.int32).view(torch.uint32)
    scales = (torch.rand(n, k // group, device="cuda") + 0.5) / 2**bits
    return Affine(q, scales, -scales * 2 ** (bits - 1) + 0.1 * random(n, k // group), bits, group)


def most_rows(n):
    """Of a weight of n outputs; a vocabulary's are for a round's rows alone."""
    return 4096 if n < 100_000 else 300


def law(x, w):
    """Every number of rows, and a place among others, against rows alone."""
    whole, wrong = logits(x, w), []
    for start, rows in (*((0, rows) for rows in ROWS), (3, 1), (129, 16), (1000, 60), (5, 600), (3000, 130)):
        found, expected = logits(x[start : start + rows], w), whole[start : start + rows]
        if not torch.equal(found, expected):
            wrong.append(parted(found, expected, f"rows {start}+{rows}", tile_of(w, rows)))
    assert not wrong, "\n".join([f"beside {tile_of(w, len(x))}", *wrong])
    return whole


def alike(launch, forms, shape, expected):
    """Every tile that this device has room for is near the twin, and all have the same bits."""
    found, wrong = [], []
    for tile in forms:
        out = torch.full(shape, float("nan"), device="cuda")
        try:
            launch(out, tile)
            close(out, expected, tile, slack=1e-4)
            found.append((tile, out))
            same(out, found[0][1], tile, "beside", found[0][0])
        except (OutOfResources, ValueError):  # of shared memory, or of slices for its parts
            continue
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{tile}: {str(error)[:1000]}")
    assert not wrong, "\n".join(wrong)
    assert len(found) > len(forms) // 2, [tile for tile, _ in found]


@pytest.mark.parametrize(("n", "k"), DENSE)
def test_dense_rows_keep_their_bits_in_any_company(n, k):
    x, w = random(most_rows(n), k).bfloat16(), Dense(random(n, k) / k**0.5)
    whole = law(x, w)
    rows = [0, 1, 130, len(x) - 1]
    close(whole[rows], linear_twin(x[rows], w), tile_of(w, 4096), slack=1e-4)


@pytest.mark.parametrize(("n", "k"), [(4096, 12288), (5120, 5120), (1000, 448)])
def test_every_form_gives_the_same_bits(n, k):
    x, w = random(300, k).bfloat16(), Dense(random(n, k) / k**0.5)
    alike(lambda out, tile: dense(x, w, PLAIN, None, out, tile), DEPTHS, (300, n), linear_twin(x, w))


@pytest.mark.parametrize(("n", "k", "bits", "group"), AFFINE)
def test_affine_rows_keep_their_bits_in_any_company(n, k, bits, group):
    x, w = random(most_rows(n), k).bfloat16(), stored(n, k, bits, group)
    whole = law(x, w)
    rows = [0, 1, 130, len(x) - 1]
    close(whole[rows], affine_twin(x[rows], w), tile_of(w, 4096), slack=1e-4)


@pytest.mark.parametrize("slices", [1, 2, 8])
def test_every_affine_form_gives_the_same_bits(slices):
    x, w = random(100, 4096).bfloat16(), stored(4096, 4096, 4, 64)
    w.slices = slices
    alike(lambda out, tile: affine(x, w, PLAIN, None, out, tile), STEPS, (100, 4096), affine_twin(x, w))


@pytest.mark.parametrize(("bits", "group"), [(bits, group) for bits in (4, 8) for group in (32, 64, 128)])
def test_few_rows_of_every_format(bits, group):
    """Outputs and inputs that fill no block and no step, a bias, and strided rows."""
    k = 5 * 128 + group
    w, x = stored(1000, k, bits, group), random(64, k + 64).bfloat16()[:, 32 : 32 + k]
    w.bias, w.slices = random(1000).bfloat16(), 2
    out = torch.full((2, 64, 1000), float("nan"), device="cuda")
    affine(x, w, PLAIN, None, out[0], Tile("stream", 64, 128, 128, 4, 3))
    close(out[0], affine_twin(x, w), slack=1e-4)
    for rows in (1, 5, 8, 16, 33, 64):
        for form, columns, parts in (("direct", 48, 1), ("direct", 32, 2), ("wide", 64, 1), ("wide", 64, 2)):
            tile = Tile(form, next(n for n in (8, 16, 32, 64) if n >= rows), columns, 256, parts=parts)
            affine(x[:rows], w, PLAIN, None, out[1, :rows], tile)
            same(out[1, :rows], out[0, :rows], rows, tile)


@pytest.mark.parametrize("rows", [1, 16, 30, 70, 600])
@pytest.mark.parametrize("kind", ["dense", "affine"])
def test_what_follows_a_product(kind, rows):
    x = random(rows, 1024).bfloat16()
    if kind == "dense":
        w, twin = Dense(interleave(random(1536, 1024) / 32, random(1536, 1024) / 32), random(3072)), linear_twin
    else:
        w, twin = stored(3072, 1024, 4, 64), affine_twin
    y, tile = twin(x, w), tile_of(w, rows)
    close(gate_up(x, w), finish_twin(y, GATED, None), "gate and up", tile)
    close(linear(x, w, activation="gelu_tanh"), finish_twin(y, GELU_TANH, None), "gelu", tile)
    residual = random(rows, 3072).bfloat16()
    expected = finish_twin(y, PLAIN, residual)
    close(linear(x, w, residual, out=residual), expected, "residual", tile)
    picked = torch.tensor([rows - 1, 0], device="cuda", dtype=torch.int32)
    same(logits(x, w, picked), logits(x, w)[[rows - 1, 0]], "picked rows", tile)


def test_a_graph_gives_the_same_bits():
    x, w = random(8, 4096).bfloat16(), Dense(random(4096, 4096) / 64)
    residual, out = random(8, 4096).bfloat16(), torch.empty(8, 4096, dtype=torch.bfloat16, device="cuda")
    linear(x, w, residual, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(x, w, residual, out)
    x.copy_(random(8, 4096))
    graph.replay()
    same(out, linear(x, w, residual), tile_of(w, 8))


@pytest.mark.parametrize("early", [False, True])
def test_products_that_begin_early_see_what_came_before(early):
    """A chain of norms and products, in a graph and out of it."""
    tile, w = Tile("stream", 16, 32, 128, 4, 4, early=early, ahead=16 * early), Dense(random(4096, 4096) / 64)
    direct = Tile("direct", 16, 64, 256, early=early, parts=2)
    packed, weight, begun = stored(4096, 4096, 4, 64), 1 + 0.1 * random(4096), random(16, 4096).bfloat16()
    x = begun.clone()

    def chain():
        for _ in range(40):
            dense(norm.rms(x, weight, 1e-6), w, PLAIN, x, x, tile)
            affine(norm.rms(x, weight, 1e-6), packed, PLAIN, x, x, tile)
            affine(norm.rms(x, weight, 1e-6), packed, PLAIN, x, x, direct)

    def after(run):
        x.copy_(begun)
        run()
        return x.clone()

    waited = begun.clone()
    for _ in range(40):
        for matrix, form, launch in ((w, tile, dense), (packed, tile, affine), (packed, direct, affine)):
            y = norm.rms(waited, weight, 1e-6)
            torch.cuda.synchronize()
            launch(y, matrix, PLAIN, waited, waited, form._replace(early=False))
            torch.cuda.synchronize()
    same(after(chain), waited, "one launch after another", tile)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    same(after(graph.replay), waited, "in a graph", tile)


@pytest.mark.timeout(150)  # it builds every product, while others build theirs
def test_tables_fit_this_device():
    """Every tile that is written down is built and runs, gated where its output may be."""
    for key in (*tiles.DENSE, *tiles.AFFINE):
        w = Dense(random(*key) / key[1] ** 0.5) if len(key) == 2 else stored(*key)
        for most in tiles.MOST:
            x = random(min(most, most_rows(w.n)), w.k).bfloat16()
            for form in (linear, gate_up):
                assert torch.isfinite(form(x, w)).all(), (w.n, w.k, form.__name__, tile_of(w, len(x)))
