"""The tower's attention in the interpreter: agreement with the twin, and a picture's bits beside any other."""

from __future__ import annotations

import pytest
import torch

from tests.kernels_gpu.cases import Draws, ints
from tfmagic.kernels.gpu import tower


@pytest.mark.parametrize("d", [16, 24, 72])
def test_pictures_are_the_same_beside_any_other(d):
    lengths = [100, 16, 132]
    q, k, v = Draws(d)(sum(lengths), 3, 2, d).unbind(1)
    out = tower.tower_attention(q, k, v, ints(*lengths))
    said = tower.tower_attention_twin(q, k, v, ints(*lengths), torch.empty_like(out))
    torch.testing.assert_close(out.float(), said.float(), atol=0.01, rtol=0.02)
    for rows in torch.arange(len(q)).split(lengths):
        assert torch.equal(tower.tower_attention(q[rows], k[rows], v[rows], ints(len(rows))), out[rows])


def test_heads_are_split_with_little_padding():
    assert [tower.parts(d) for d in (16, 24, 32, 64, 72, 80, 96, 128)] == [
        (16, 0), (16, 16), (32, 0), (64, 0), (64, 16), (64, 16), (64, 32), (128, 0)
    ]  # fmt: skip
