"""The pass against a reference's outputs, and against the formulas computed one number at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tfmagic.engine import families
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.block import Ask, Drafter
from tfmagic.engine.drafting.dflash import weights
from tfmagic.engine.drafting.dflash.weights import GROUP, quantize_rows

from .conftest import FIRST, GOLDEN, SMALL, taps
from .naive import Naive

REFERENCE, TOLERANCE = 5e-6, 1e-4
"""Of hidden rows, whose numbers are about 1, in float32: against a float32 reference at places up to 24, and against
float64 at places up to 1,000, whose angles float32 knows to 6e-5."""


@torch.inference_mode()
def hidden(drafter: Drafter, context, anchor: int) -> torch.Tensor:
    drafter.project([context])
    return drafter.forward([Ask(context, anchor, context.end, drafter.block - 1)], drafter.block)[0]


def test_the_golden_drafter(tiny, golden):
    drafter = Drafter(Checkpoint(GOLDEN / "dflash_tiny"), tiny)
    assert (drafter.layers, drafter.block, drafter.name) == ([0, 1, 2], 4, "DFlash of 2 layers, block 4")
    context, anchor = drafter.context(), int(golden["anchor"])
    drafter.extend(context, golden["ctx"][0], 0)
    error = (hidden(drafter, context, anchor) - golden["hidden"][0]).abs().max()
    assert float(error) < REFERENCE
    [lattice] = drafter.lattices([Ask(context, anchor, 20, 3)])
    assert lattice.ids[:, 0].tolist() == golden["drafts"][0].tolist()
    assert lattice.ids.shape == (3, 16) and lattice.edges.shape == (3, 16, 16) and not lattice.edges.any()


def test_the_target_s_bf16_form_lends_the_same(tiny, golden):
    found = []
    for target in (tiny, families.load(Checkpoint(GOLDEN / "qwen3_5_tiny"), "cpu", form="bf16")):
        drafter = Drafter(Checkpoint(GOLDEN / "dflash_tiny"), target)
        context = drafter.context()
        drafter.extend(context, golden["ctx"][0].to(target.embedding().dtype), 0)
        h = hidden(drafter, context, 153)
        found.append((h, drafter.head(h)))
    for ours, theirs in zip(*found):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float32
        assert float((ours - theirs).norm() / ours.norm()) < 0.03


def test_the_golden_taps_are_the_target_s_own(tiny, golden):
    ids = golden["ids"][0].tolist()
    tiny.tap([0, 1, 2])
    try:
        part = (tiny.new_state(), ids, {}, torch.arange(len(ids)).expand(3, -1), [])
        [(_, _, rows)] = tiny.prompt_passes([part])
    finally:
        tiny.tap([])
    assert float((rows - golden["ctx"][0]).abs().max()) < 5e-4


CASES = {
    "both kinds of layers": {},
    "causal": {"is_causal": True},
    "causal where it slides": {"is_causal": None},
    "a window under the context's length": {"sliding_window": 3, "layer_types": ["sliding_attention"] * 2},
    "no window": {"layer_types": None, "use_sliding_window": None, "sliding_window": None},
    "three taps": {"conv_kernel_size": 3},
    "one tap": {"conv_kernel_size": 1, "conv_group_size": 32},
    "scaled": {"input_embedding_scale": 2.5, "output_multiplier": 0.3, "final_logit_softcapping": 1.5},
    "of the first kind": FIRST,
    "of the first kind, scaled": FIRST | {"final_logit_softcapping": 2.0, "input_embedding_scale": 0.5},
    "fewer ids": {"vocab_size": 60},
    "one key head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("start", [0, 1000])
def test_formulas(opened, changes, start):
    drafter = opened(**changes)
    test = drafter.test
    c = {"layer_types": ["full_attention"] * 2, **test.config}
    naive = Naive(c, test.tensors, *test.target.matrices)
    rows, anchor = taps(9), 70
    context = drafter.context()
    drafter.extend(context, rows, start)
    expected = naive.hidden({start + i: row for i, row in enumerate(rows)}, anchor, start + len(rows))
    assert float((hidden(drafter, context, anchor) - torch.stack(expected)).abs().max()) < TOLERANCE

    [lattice] = drafter.lattices([Ask(context, anchor, context.end, 5)])
    assert lattice.ids.dtype == np.int64 and lattice.logits.dtype == lattice.edges.dtype == np.float32
    for place, h in enumerate(expected[1:]):
        logits = naive.logits(h)
        for right in (logits[torch.from_numpy(lattice.ids[place])], logits.topk(16).values):
            assert np.abs(lattice.logits[place] - right.numpy()).max() < 5e-4
        assert len({*lattice.ids[place]}) == 16
        for i in range(16 if place else 1):
            before = int(lattice.ids[place - 1, i]) if place else anchor
            edges = [naive.edge(before, int(id), h) for id in lattice.ids[place]]
            assert np.abs(lattice.edges[place, i] - edges).max() < 5e-4


def test_only_so_many_places_and_only_ids_that_may_be_drawn(write):
    folder = write(SMALL)
    from .conftest import Target

    drafter = Drafter(Checkpoint(folder), Target(), size=40)
    context = drafter.context()
    drafter.extend(context, taps(4), 0)
    for places, given in ((1, 1), (3, 3), (5, 5), (9, 5)):
        [lattice] = drafter.lattices([Ask(context, 7, 4, places)])
        assert len(lattice.ids) == len(lattice.logits) == len(lattice.edges) == given and lattice.ids.max() < 40


@pytest.mark.parametrize("causal", [True, False])
def test_a_batch_gives_each_what_it_gets_alone(opened, causal):
    drafter = opened(is_causal=causal)
    asks = []
    for i, rows in enumerate((1, 3, 30, 11, 200)):
        context = drafter.context()
        drafter.extend(context, taps(rows, i), 7 * i)
        asks.append(Ask(context, 3 + i, context.end, 1 + i))
    together = drafter.lattices(asks)
    for ask, lattice in zip(asks, together):
        [alone] = drafter.lattices([ask])
        assert (alone.ids == lattice.ids).mean() > 0.9, "but for candidates that are as good as equal"
        assert np.abs(alone.logits - lattice.logits).max() < 1e-4
        assert np.abs(alone.edges - lattice.edges).max() < 1e-4
    assert drafter.lattices([]) == []


def test_overflow_stays_finite(opened):
    drafter = opened(output_multiplier=1e6, input_embedding_scale=1e6)
    drafter.weights.selector.before.mul_(1e30)
    context = drafter.context()
    drafter.extend(context, torch.full((3, 64), 1e30), 0)
    [lattice] = drafter.lattices([Ask(context, 1, 3, 5)])
    assert np.isfinite(lattice.logits).all() and np.isfinite(lattice.edges).all()
    assert (lattice.ids >= 0).all() and (lattice.ids < 80).all()


# Four bits --------------------------------------------------------------------------------------------


def by_mlx_rule(group: list[float]) -> list[float]:
    """One group as MLX rounds it, one number after another, but for the last rounding of scale and bias."""
    low, high = min(group), max(group)
    scale = max((high - low) / 15, 1e-7)
    end, scale = (low, scale) if abs(low) > abs(high) else (high, -scale)
    steps = round(end / scale)
    scale, bias = (end / steps, end) if steps else (scale, 0.0)
    return [min(max(round((v - bias) / scale), 0), 15) * scale + bias for v in group]


def test_rows_in_four_bits():
    g = torch.Generator().manual_seed(1)
    matrix = torch.cat([torch.randn(6, 2 * GROUP, generator=g), torch.rand(3, 2 * GROUP, generator=g) + 1])
    matrix[1, :GROUP] = 0.0
    matrix[2, :GROUP] = 3.5
    packed = quantize_rows(matrix)
    values = packed.dequantised()
    assert packed.q.dtype == torch.uint32 and tuple(packed.q.shape) == (9, 2 * GROUP // 8) and packed.shape == (9, 128)
    expected = torch.tensor([by_mlx_rule(group) for group in matrix.view(-1, GROUP).tolist()]).view_as(matrix)
    span = matrix.view(9, 2, GROUP)
    step = ((span.amax(-1) - span.amin(-1)) / 15)[..., None].expand_as(span).reshape_as(matrix)
    size = matrix.abs().view(9, 2, GROUP).amax(-1)[..., None].expand_as(span).reshape_as(matrix)
    near = (values - expected).abs() <= 0.01 * step + size / 128
    assert float(near.float().mean()) > 0.97, "in bfloat16 they may push a value that lies between two steps"
    assert bool(((values - matrix).abs() <= 0.55 * step + size / 64).all())
    assert not values[1, :GROUP].any() and bool((values[2, :GROUP] == 3.5).all())


def test_packed_matrices_give_what_rounded_ones_give():
    g = torch.Generator().manual_seed(2)
    for matrix in (torch.randn(40, 192, generator=g).bfloat16(), torch.randn(40, 96, generator=g).bfloat16()):
        x = torch.randn(2, 3, matrix.shape[1], generator=g).bfloat16()
        ours, expected = weights.product(matrix, 4)(x), weights.product(matrix.float(), 4)(x.float())
        assert ours.dtype == torch.bfloat16 and ours.shape == expected.shape == (2, 3, 40)
        assert float((ours.float() - expected).abs().max()) < 0.01 * float(expected.abs().max())


def test_a_drafter_in_four_bits(tiny, golden):
    plain, rounded = (Drafter(Checkpoint(GOLDEN / "dflash_tiny"), tiny, bits=bits) for bits in (16, 4))
    assert rounded.name.endswith("4 bits")
    found = []
    for drafter in (plain, rounded):
        context = drafter.context()
        drafter.extend(context, golden["ctx"][0], 0)
        found.append(hidden(drafter, context, 153))
    error = float((found[0] - found[1]).norm() / found[0].norm())
    assert 1e-3 < error < 0.4
