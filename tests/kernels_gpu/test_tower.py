"""The tower's attention and rotation in the interpreter: agreement with the twins, and a picture's bits beside any
other."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.kernels_gpu.cases import Draws, ints
from tfmagic.kernels.gpu import tower
from tfmagic.kernels.gpu import turn as rotation
from tfmagic.kernels.gpu.turn import turn


@pytest.mark.parametrize("d", [16, 24, 72])
def test_pictures_are_the_same_beside_any_other(d):
    lengths = [100, 16, 132, 128]
    q, k, v = Draws(d)(sum(lengths), 3, 2, d).unbind(1)
    out = tower.tower_attention(tower.split(q, k, v), ints(*lengths))
    said = tower.tower_attention_twin(tower.split(q, k, v), ints(*lengths), torch.empty_like(out))
    torch.testing.assert_close(out.float(), said.float(), atol=0.01, rtol=0.02)
    for rows in torch.arange(len(q)).split(lengths):
        alone = tower.split(q[rows], k[rows], v[rows])
        assert torch.equal(tower.tower_attention(alone, ints(len(rows))), out[rows])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_lies_behind_a_frame_does_not_reach_it():
    q, k, v = Draws()(200, 3, 2, 72).unbind(1)
    alone = tower.tower_attention(tower.split(q[:100], k[:100], v[:100]), ints(100))
    k[100:], v[100:] = float("nan"), float("inf")
    assert torch.equal(tower.tower_attention(tower.split(q, k, v), ints(100, 100))[:100], alone)


@pytest.mark.parametrize("d", [16, 24, 72, 88])
def test_rotation(d):
    draws = Draws(d)
    qkv, (cos, sin) = draws(37, 3, 3, d), draws(2, 37, d // 2, dtype=torch.float32)
    out = turn(qkv, cos, sin)
    with mock.patch.object(rotation, "launchable", lambda x: False):
        said = turn(qkv, cos, sin)
    for name, one, two in zip(out._fields, out, said, strict=True):
        torch.testing.assert_close(one.float(), two.float(), atol=0.001, rtol=0.01, msg=name)
    assert torch.equal(out.v, said.v)


def test_heads_are_split_with_little_padding():
    assert [tower.parts(d) for d in (16, 24, 32, 64, 72, 80, 88, 96, 128)] == [
        (16, 0, 0), (16, 8, 16), (32, 0, 0), (64, 0, 0), (64, 8, 16), (64, 16, 32), (64, 24, 64), (64, 32, 64),
        (128, 0, 0),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not 8"):
        tower.parts(8)
