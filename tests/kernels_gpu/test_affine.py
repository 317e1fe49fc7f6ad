"""Products with MLX affine weights: the packed form and its inverse, the kernel against the twin, and the row law."""

from __future__ import annotations

import pytest
import torch

from tests.kernels_gpu.test_linear import close, random
from tfmagic.errors import Refusal
from tfmagic.kernels.gpu import affine as module
from tfmagic.kernels.gpu.affine import Affine, affine, affine_twin, codes_of, unpack
from tfmagic.kernels.gpu.epilogue import GATED, PLAIN, finish_twin
from tfmagic.kernels.gpu.linear import gate_up, interleave, linear
from tfmagic.kernels.gpu.tiles import Tile

STREAM, TALL = Tile("stream", 16, 32, 128), Tile("tall", 32, 64, 32, group=2)
FORMATS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


def stored(n, k, bits, group, seed=0):
    """q, scales and biases as a checkpoint has them."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(-(2**31), 2**31, (n, k * bits // 32), generator=g).to(torch.int32).view(torch.uint32)
    scales = (2 * torch.rand(n, k // group, generator=g) + 1) / 2**bits
    biases = -scales * 2 ** (bits - 1) + 0.1 * torch.randn(n, k // group, generator=g)
    return q, scales.bfloat16(), biases.bfloat16()


def run(x, w, tile, what=PLAIN, residual=None, dtype=torch.bfloat16):
    out = torch.full((len(x), w.n // 2 if what == GATED else w.n), float("nan"), dtype=dtype)
    affine(x, w, what, residual, out, tile)
    return out


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_packing_is_undone(bits, group):
    q, scales, biases = stored(37, 3 * group, bits, group)
    w = Affine(q, scales, biases, bits, group)
    codes, again, more = unpack(w.units, w.words, w.n, w.k, bits)
    assert torch.equal(codes, codes_of(q, bits)) and torch.equal(again, scales) and torch.equal(more, biases)
    by_hand = [(int(q[5, 1].item()) >> bits * i) % 2**bits for i in range(32 // bits)]
    assert codes[5, 32 // bits : 64 // bits].tolist() == by_hand


@pytest.mark.parametrize("tile", [STREAM, TALL], ids=["stream", "tall"])
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_forms_say_what_the_twin_says(bits, group, tile):
    w = Affine(*stored(70, 3 * group, bits, group), bits, group, random(70))
    x, residual = random(19, w.k).bfloat16(), random(19, 70, seed=3).bfloat16()
    assert close(run(x, w, tile, PLAIN, residual), finish_twin(affine_twin(x, w), PLAIN, residual))


@pytest.mark.parametrize("tile", [STREAM, TALL], ids=["stream", "tall"])
@pytest.mark.parametrize("bits", [4, 8])
def test_gate_and_up(bits, tile):
    parts = zip(stored(48, 128, bits, 64), stored(48, 128, bits, 64, seed=1))
    w = Affine(*(interleave(gate, up) for gate, up in parts), bits, 64)
    x = random(18, 128).bfloat16()
    assert close(run(x, w, tile, GATED), finish_twin(affine_twin(x, w), GATED, None))


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32)])
def test_a_row_keeps_its_bits_in_any_company_and_form(bits, group, slices):
    w = Affine(*stored(48, 256, bits, group), bits, group)
    w.slices = slices
    x = random(40, 256).bfloat16()
    f32 = torch.float32
    alone = torch.cat([run(x[i : i + 1], w, STREAM, dtype=f32) for i in range(0, 40, 13)])
    narrow, high = STREAM._replace(rows=8), STREAM._replace(rows=32, columns=16)
    for rows, tile in ((17, STREAM), (40, narrow), (40, high), (40, TALL)):
        assert torch.equal(run(x[:rows], w, tile, dtype=f32)[::13], alone[: -(-rows // 13)]), tile


@pytest.mark.parametrize("slices", [1, 2, 8])
@pytest.mark.parametrize("groups", [3, 16, 18, 31])
def test_slices_of_any_number_of_steps(groups, slices):
    w = Affine(*stored(32, 32 * groups, 4, 32), 4, 32)
    w.slices = slices
    x = random(5, w.k).bfloat16()
    found = [run(x, w, tile, dtype=torch.float32) for tile in (STREAM, TALL)]
    assert close(found[0], affine_twin(x, w)) and torch.equal(*found)
    assert not w.tickets.any()  # as the next launch wants them


def test_slices_are_added_in_order():
    w = Affine(*stored(32, 1024, 4, 32), 4, 32)
    w.slices = 4
    x = random(5, 1024).bfloat16()
    parts = [x.clone().index_fill_(1, torch.tensor([i for i in range(1024) if i // 256 != s]), 0) for s in range(4)]
    one, two, three, four = (run(part, w, STREAM, dtype=torch.float32) for part in parts)
    assert torch.equal(run(x, w, STREAM, dtype=torch.float32), one + two + three + four)


@pytest.mark.parametrize("what", [PLAIN, GATED])
def test_many_rows_take_a_weight_in_parts(what, monkeypatch):
    w = Affine(*stored(592, 64, 4, 32), 4, 32, random(592))
    monkeypatch.setattr(module, "SCRATCH", 2 * 592 * 64 // 3)
    x, residual = random(5, 64).bfloat16(), None if what == GATED else random(5, 592, seed=3).bfloat16()
    assert close(run(x, w, TALL, what, residual), finish_twin(affine_twin(x, w), what, residual))


def test_values_are_those_of_dequantised_weights():
    """Of weights rounded to bf16, by products with each unit vector."""
    q, scales, biases = stored(32, 64, 8, 32)
    exact = codes_of(q, 8).float() * scales.float().repeat_interleave(32, 1) + biases.float().repeat_interleave(32, 1)
    for tile in (STREAM, TALL):
        found = run(torch.eye(64).bfloat16(), Affine(q, scales, biases, 8, 32), tile, dtype=torch.float32)
        assert torch.equal(found.t(), exact.bfloat16().float())


def test_triton_does_what_cuda_cannot_here():
    w, x = Affine(*stored(64, 256, 4, 64), 4, 64), random(3, 256).bfloat16()
    for tile in (Tile("direct", 8, 32, 256, parts=2), Tile("wide", 32, 64, 256)):
        assert torch.equal(run(x, w, tile, dtype=torch.float32), run(x, w, STREAM, dtype=torch.float32))


def test_public_functions_take_it():
    w = Affine(*stored(64, 128, 4, 64), 4, 64)
    x = random(3, 128).bfloat16()
    assert close(linear(x, w), affine_twin(x, w)) and gate_up(x, w).shape == (3, 32)


def test_what_is_not_run_is_refused():
    q, scales, biases = stored(16, 128, 4, 64)
    with pytest.raises(Refusal, match="3 bits"):
        Affine(q, scales, biases, 3, 64)
    with pytest.raises(Refusal, match="scales"):
        Affine(q, scales[:, :1], biases[:, :1], 4, 64)
    with pytest.raises(Refusal, match="scales"):
        Affine(q, scales, biases, 8, 64)
