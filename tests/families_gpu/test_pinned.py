"""Host memory for kept states: no piece lies in another or across chunks, and what nobody holds is free again."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from tfmagic.engine.families.qwen3_5.gpu import pinned
from tfmagic.engine.families.qwen3_5.gpu.pinned import PinnedPool

CHUNK = 1 << 14


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(pinned, "CHUNK", CHUNK)
    pool = PinnedPool(3 * CHUNK)
    pool.grow(lambda address, size: True)
    return pool


def place(x, pool):
    return x.data_ptr() - pool.address


@pytest.mark.parametrize("seed", range(8))
def test_pieces_are_their_holders_own(pool, seed):
    rng, held = random.Random(seed), {}
    for step in range(400):
        if held and rng.random() < 0.45:
            del held[rng.choice([*held])]
        dtype, shape = rng.choice([torch.uint8, torch.bfloat16, torch.float32]), (rng.randint(1, 9), rng.randint(1, 99))
        x = pool.take(shape, dtype)
        if x is not None:
            assert x.shape == shape and x.dtype == dtype
            held[step] = x.fill_(step % 251)
        spans = sorted((place(x, pool), place(x, pool) + x.nbytes) for x in held.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(start // CHUNK == (end - 1) // CHUNK for start, end in spans)
        assert all((x == step % 251).all() for step, x in held.items())
    held.clear()
    del x
    whole = [pool.take((CHUNK,), torch.uint8) for _ in range(3)]
    assert all(x is not None for x in whole) and pool.take((1,), torch.uint8) is None


def test_a_view_holds_its_piece(pool):
    held = [pool.take((CHUNK,), torch.uint8) for _ in range(3)]
    held[0] = held[0].view(4, -1)[2]
    assert pool.take((1,), torch.uint8) is None
    held[0] = None
    held[0] = pool.take((CHUNK // 2,), torch.uint8)
    assert held[0] is not None


def test_no_piece_is_longer_than_a_chunk(pool):
    assert pool.take((CHUNK + 1,), torch.uint8) is None


def test_what_is_not_pinned_is_not_given(monkeypatch):
    monkeypatch.setattr(pinned, "CHUNK", CHUNK)
    pool, asked = PinnedPool(2 * CHUNK + 1), []
    assert pool.take((1,), torch.uint8) is None  # nothing is there yet
    pool.grow(lambda address, size: asked.append((address, size)) or len(asked) < 2)
    assert [size for _, size in asked] == [CHUNK, CHUNK] and asked[1][0] == asked[0][0] + CHUNK
    held = [pool.take((CHUNK // 2,), torch.uint8) for _ in range(3)]
    assert [x is None for x in held] == [False, False, True]
