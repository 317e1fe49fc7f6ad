"""A row a stream in one kernel, in the interpreter: what the convolution and the delta rule give apart."""

from __future__ import annotations

import torch

from tests.kernels_gpu.cases import Draws, ints, mixer, mixer_rows, planned
from tfmagic.kernels.gpu import conv, delta_rounds, step
from tfmagic.kernels.gpu.conv import Heads

HEADS = Heads(1, 2, 16, 32)


def test_a_row_is_what_the_convolution_and_the_rule_give_apart():
    weights, (m, a, b) = mixer(HEADS), mixer_rows(HEADS, 3)
    past, states = Draws(4)(4, 3, HEADS.channels), Draws(1)(4, HEADS.values, HEADS.dk, HEADS.dv, dtype=torch.float32)
    slots, counts, windows = ints(2, 0, 3), ints(1, 0, 1), planned([[-1], [], [-1]], 1)
    apart, told = states.clone(), states.clone()
    x = conv.convolve_tree(*(y[:, None] for y in (m, a, b)), past, slots, weights, HEADS, windows)
    o, _ = delta_rounds.delta_tree(x, apart, slots, windows, moves=True)
    found = step.delta_step(m, a, b, past, states, slots, counts, weights, HEADS)
    torch.testing.assert_close(found.float(), o[:, 0].float(), atol=1e-3, rtol=0.01)
    torch.testing.assert_close(states, apart, atol=1e-5, rtol=1e-5)
    assert not found[1].any() and torch.equal(states[:2], told[:2]) and not torch.equal(states[2], told[2])
    twin = step._twin(m, a, b, past, told, slots, counts, weights, HEADS, torch.empty_like(found))
    torch.testing.assert_close(found.float(), twin.float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(states, told, atol=0.02, rtol=0.02)
