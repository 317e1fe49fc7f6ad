"""Products on a GPU: what they say, and the row law over every tile in use."""

from __future__ import annotations

import pytest
import torch

from tfmagic.kernels.gpu import linear as module
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
AFFINE = [(34816, 5120, 4, 64), (5120, 17408, 4, 64), (4096, 12288, 4, 128), (4096, 4096, 8, 64), (1024, 384, 4, 32)]
DEPTHS = [
    Tile("stream", 16, 32, 32, 4, 4), Tile("stream", 16, 64, 64, 4, 4, early=True),
    Tile("stream", 32, 64, 128, 8, 3),
    Tile("stream", 16, 16, 256, 2, 3), Tile("stream", 128, 128, 64, 8, 3), Tile("tall", 64, 64, 64, 4, 4),
    Tile("tall", 128, 128, 64, 8, 4), Tile("tall", 128, 256, 64, 8, 3, halves=True), Tile("tall", 16, 64, 128, 4, 4),
    Tile("tall", 128, 256, 64, 4, 3, specialised=True), Tile("tall", 128, 128, 64, 4, 4, specialised=True),
]  # fmt: skip
"""Forms, shapes and depths that no table need name."""


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random(*shape):
    return torch.randn(*shape, device="cuda")


def close(out, ref, slack=2**-8):
    return bool(((out.double() - ref).abs() <= slack * ref.abs() + 1e-3 * ref.abs().mean()).all())


def stored(n, k, bits, group):
    q = torch.randint(-(2**31), 2**31 - 1, (n, k * bits // 32), device="cuda", dtype=torch.int32).view(torch.uint32)
    scales = (torch.rand(n, k // group, device="cuda") + 0.5) / 2**bits
    return Affine(q, scales, -scales * 2 ** (bits - 1) + 0.1 * random(n, k // group), bits, group)


def law(x, w):
    """Every number of rows, and a place among others, against rows alone."""
    whole = logits(x, w)
    for rows in ROWS:
        assert torch.equal(logits(x[:rows], w), whole[:rows]), rows
    for start, rows in ((3, 1), (129, 16), (1000, 60), (5, 600), (3000, 130)):
        assert torch.equal(logits(x[start : start + rows], w), whole[start : start + rows]), (start, rows)
    return whole


@pytest.mark.parametrize(("n", "k"), DENSE)
def test_dense_rows_keep_their_bits_in_any_company(n, k):
    x, w = random(4096, k).bfloat16(), Dense(random(n, k) / k**0.5)
    whole = law(x, w)
    rows = [0, 1, 130, 4095]
    assert close(whole[rows], linear_twin(x[rows], w), 1e-4)


@pytest.mark.parametrize(("n", "k"), [(4096, 12288), (5120, 5120), (1000, 448)])
def test_every_form_gives_the_same_bits(n, k):
    from triton.runtime.errors import OutOfResources

    x, w = random(300, k).bfloat16(), Dense(random(n, k) / k**0.5)
    found = []
    for tile in DEPTHS:
        out = torch.empty(300, n, device="cuda")
        try:
            dense(x, w, PLAIN, None, out, tile)
        except OutOfResources:
            continue
        found.append((tile, out))
    assert len(found) > 6
    assert not [tile for tile, out in found if not torch.equal(out, found[0][1])]


@pytest.mark.parametrize(("n", "k", "bits", "group"), AFFINE)
def test_affine_rows_keep_their_bits_in_any_company(n, k, bits, group):
    x, w = random(4096, k).bfloat16(), stored(n, k, bits, group)
    whole = law(x, w)
    rows = [0, 1, 130, 4095]
    assert close(whole[rows], affine_twin(x[rows], w), 1e-4)


def test_every_affine_form_gives_the_same_bits():
    x, w = random(100, 4096).bfloat16(), stored(4096, 4096, 4, 64)
    found = []
    for tile in (
        Tile("stream", 8, 16, 0, 1, 3), Tile("stream", 8, 64, 0, 4, 3), Tile("stream", 16, 32, 0, 2, 5),
        Tile("stream", 32, 64, 0, 4, 3),
        Tile("stream", 64, 64, 0, 4, 2), Tile("tall", 64, 64, 0, 4, 2), Tile("tall", 128, 64, 0, 8, 2),
        Tile("tall", 128, 128, 0, 8, 2), Tile("stream", 16, 32, 0, 2, 5, early=True),
    ):  # fmt: skip
        out = torch.empty(100, 4096, device="cuda")
        affine(x, w, PLAIN, None, out, tile)
        found.append((tile, out))
    assert not [tile for tile, out in found if not torch.equal(out, found[0][1])]


@pytest.mark.parametrize("rows", [1, 16, 70, 600])
@pytest.mark.parametrize("kind", ["dense", "affine"])
def test_what_follows_a_product(kind, rows):
    x = random(rows, 1024).bfloat16()
    if kind == "dense":
        w, twin = Dense(interleave(random(1536, 1024) / 32, random(1536, 1024) / 32), random(3072)), linear_twin
    else:
        w, twin = stored(3072, 1024, 4, 64), affine_twin
    y = twin(x, w)
    assert close(gate_up(x, w), finish_twin(y, GATED, None))
    assert close(linear(x, w, activation="gelu_tanh"), finish_twin(y, GELU_TANH, None))
    residual = random(rows, 3072).bfloat16()
    expected = finish_twin(y, PLAIN, residual)
    assert close(linear(x, w, residual, out=residual), expected)
    picked = torch.tensor([rows - 1, 0], device="cuda", dtype=torch.int32)
    assert torch.equal(logits(x, w, picked), logits(x, w)[[rows - 1, 0]])


def test_a_graph_gives_the_same_bits():
    x, w = random(8, 4096).bfloat16(), Dense(random(4096, 4096) / 64)
    residual, out = random(8, 4096).bfloat16(), torch.empty(8, 4096, dtype=torch.bfloat16, device="cuda")
    linear(x, w, residual, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(x, w, residual, out)
    x.copy_(random(8, 4096))
    graph.replay()
    assert torch.equal(out, linear(x, w, residual))


@pytest.mark.parametrize("early", [False, True])
def test_products_that_begin_early_see_what_came_before(early):
    """A chain of norms and products, in a graph and out of it."""
    tile, w = Tile("stream", 16, 32, 128, 4, 4, early=early), Dense(random(4096, 4096) / 64)
    packed, weight, begun = stored(4096, 4096, 4, 64), 1 + 0.1 * random(4096), random(16, 4096).bfloat16()
    x = begun.clone()

    def chain():
        for _ in range(40):
            dense(norm.rms(x, weight, 1e-6), w, PLAIN, x, x, tile)
            affine(norm.rms(x, weight, 1e-6), packed, PLAIN, x, x, tile._replace(warps=2))

    def after(run):
        x.copy_(begun)
        run()
        return x.clone()

    waited = begun.clone()
    for _ in range(40):
        for matrix, form, launch in ((w, tile, dense), (packed, tile._replace(warps=2), affine)):
            y = norm.rms(waited, weight, 1e-6)
            torch.cuda.synchronize()
            launch(y, matrix, PLAIN, waited, waited, form._replace(early=False))
            torch.cuda.synchronize()
    assert torch.equal(after(chain), waited)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    assert torch.equal(after(graph.replay), waited)


def test_tables_fit_this_device():
    """Every tile that is written down is built and runs."""
    for n, k in tiles.DENSE:
        w = Dense(random(n, k) / k**0.5)
        for most in tiles.MOST:
            assert torch.isfinite(module.linear(random(min(most, 4096), k).bfloat16(), w)).all()
