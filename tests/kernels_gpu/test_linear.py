"""Products with bf16 weights: every form against the twin, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch

from tfmagic.kernels.gpu import linear as module
from tfmagic.kernels.gpu import tiles
from tfmagic.kernels.gpu.epilogue import GATED, GELU, GELU_TANH, PLAIN, TURN, finish_twin
from tfmagic.kernels.gpu.linear import Dense, dense, gate_up, interleave, linear, linear_twin, logits
from tfmagic.kernels.gpu.tiles import Tile

STREAM = Tile("stream", 16, 32, 64)
TALL = Tile("tall", 32, 64, 64)
FORMS = {
    "stream": STREAM,
    "wide": Tile("stream", 64, 128, 32),
    "tall": TALL,
    "halves": TALL._replace(halves=True, columns=128, group=2),
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape, seed=0):
    """Small whole numbers: every order of sums gives the same bits."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def run(x, w, tile, what=PLAIN, residual=None, dtype=torch.bfloat16):
    out = torch.full((len(x), w.n // 2 if what == GATED else w.n), float("nan"), dtype=dtype)
    dense(x, w, what, residual, out, tile)
    return out


def close(out, ref):
    """Within a rounding to bf16 of the twin."""
    return bool(((out.double() - ref).abs() <= 2**-8 * ref.abs() + 1e-4).all())


@pytest.mark.parametrize("what", [PLAIN, GATED, GELU, GELU_TANH])
@pytest.mark.parametrize("form", FORMS)
def test_forms_say_what_the_twin_says(form, what):
    x, w = random(37, 72).bfloat16(), Dense(random(144, 72, seed=1) / 6, random(144, seed=2))
    residual = random(37, 72 if what == GATED else 144, seed=3).bfloat16()
    for add in (None, residual):
        assert close(run(x, w, FORMS[form], what, add), finish_twin(linear_twin(x, w), what, add))


@pytest.mark.parametrize("form", ["stream", "tall"])
def test_odd_shapes(form):
    """Rows that the copy engine cannot fetch are streamed."""
    x, w = random(5, 70).bfloat16(), Dense(random(71, 70, seed=1) / 6)
    assert close(run(x, w, FORMS[form]), linear_twin(x, w))
    part = random(5, 100).bfloat16()[:, 15:85]
    assert close(run(part, w, FORMS[form]), linear_twin(part, w))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_keeps_its_bits_in_any_company(form):
    x, w = random(40, 192).bfloat16(), Dense(random(48, 192, seed=1))
    alone = torch.cat([run(x[i : i + 1], w, FORMS[form], dtype=torch.float32) for i in range(0, 40, 3)])
    for rows in (1, 2, 16, 17, 40):
        assert torch.equal(run(x[:rows], w, FORMS[form], dtype=torch.float32)[::3], alone[: -(-rows // 3)])
    back = x.flip(0).contiguous()
    assert torch.equal(run(back, w, FORMS[form], dtype=torch.float32).flip(0)[::3], alone)


def test_all_forms_agree_bit_for_bit():
    x, w = whole(40, 192).bfloat16(), Dense(whole(48, 192, seed=1))
    first, *others = [run(x, w, form, dtype=torch.float32) for form in FORMS.values()]
    assert all(torch.equal(first, other) for other in others)


def test_public_functions():
    x = random(6, 64).bfloat16()
    gate, up = random(40, 64, seed=1) / 8, random(40, 64, seed=2) / 8
    both = Dense(interleave(gate, up))
    parts = both.w.unflatten(0, (-1, 2, TURN)).transpose(0, 1).flatten(1, 2)
    assert torch.equal(parts[0], gate.bfloat16()) and torch.equal(parts[1], up.bfloat16())
    g, u = (x.double() @ m.bfloat16().double().t() for m in (gate, up))
    assert close(gate_up(x, both), torch.nn.functional.silu(g) * u)
    w = Dense(gate)
    rows = torch.tensor([4, 0], dtype=torch.int32)
    assert (logits(x, w, rows) - g[[4, 0]]).abs().max() < 1e-5 and logits(x, w).dtype == torch.float32
    residual = random(6, 40, seed=4).bfloat16()
    expected = linear(x, w, residual)
    assert linear(x, w, residual, out=residual) is residual and torch.equal(residual, expected)
    assert close(expected, g + random(6, 40, seed=4).bfloat16().double())
    assert linear(x[:0], w).shape == (0, 40)
    with pytest.raises(ValueError, match="64"):
        linear(x[:, :32], w)
    with pytest.raises(ValueError, match="bfloat16"):
        linear(x.float(), w)


def test_every_number_of_rows_has_a_tile():
    for n, k in ((24576, 4096), (4096, 12288), (70, 64), *tiles.DENSE):
        for rows in (1, 16, 17, 64, 65, 300, 5000):
            tile = tiles.dense(n, k, rows)
            assert tile.form in ("stream", "tall")
            waiting = tile.stages - (tile.form == "stream" and tile.rows < 64)  # a step in registers waits nowhere else
            fits = (tile.rows + tile.columns) * tile.depth * 2 * waiting
            assert fits <= 227 * 1024, (n, k, rows, tile)
    assert module.tiles is tiles
