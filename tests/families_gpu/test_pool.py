"""Pages and slots: shared, copied, freed when nobody refers to them, and the states that wait on the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.families.qwen3_5 import config
from tfmagic.engine.families.qwen3_5.gpu.pool import PAGE, Plan, Pool
from tfmagic.engine.families.qwen3_5.gpu.state import State, restore

from ..families.conftest import GOLDEN

CPU = torch.device("cpu")


@pytest.fixture(params=["bf16", "fp8"])
def pool(request):
    checkpoint = Checkpoint(GOLDEN)
    text = config.read(checkpoint.config, checkpoint.tied).text
    made = Pool(text, Plan(slots=4, pages=8, longest=5, views=1 << 20, kv=request.param), CPU)
    g = torch.Generator().manual_seed(1)
    for part in made.parts().values():
        part.copy_(torch.randn(part.shape, generator=g).to(part.dtype))
    return made


def begun(pool: Pool, rows: int) -> State:
    state = State(pool)
    state.reserve(rows)
    state.rows = rows
    pool.S[:, state.slot.index] = torch.randn(pool.S[:, 0].shape)
    pool.conv[:, state.slot.index] = torch.randn(pool.conv[:, 0].shape)
    return state


def same(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].float(), b[name].float()), name


def test_a_fork_shares_full_pages_and_copies_the_last(pool):
    state = begun(pool, PAGE + 70)
    other = state.fork()
    assert other.pages[0] is state.pages[0] and other.pages[1] is not state.pages[1]
    assert pool.table[other.slot.index, :2].tolist() == [page.index for page in other.pages]
    same(other.named(), state.named())
    assert pool.free_pages == 4


def test_what_nobody_holds_is_free_again(pool):
    state = begun(pool, PAGE + 1)
    other = state.fork()
    del state
    assert pool.free_pages == 5 and pool.free_slots == 2
    del other
    assert pool.free_pages == 7 and pool.free_slots == 3


def test_what_is_taken_is_said(pool):
    held = [State(pool) for _ in range(3)]
    with pytest.raises(MemoryError, match="3 sequences"):
        State(pool)
    with pytest.raises(MemoryError, match="5 is the longest"):
        held[0].reserve(6 * PAGE)
    held[0].pages = []
    held[1].reserve(5 * PAGE)
    with pytest.raises(MemoryError, match="7 pages"):
        held[2].reserve(3 * PAGE)


def test_a_sequence_that_found_no_room_takes_none_and_may_try_again(pool):
    one, other = State(pool), State(pool)
    one.reserve(5 * PAGE)
    pool.table[other.slot.index] = one.pages[0].index  # as a sequence before may have left it
    for _ in range(2):
        with pytest.raises(MemoryError, match="7 pages"):
            other.reserve(3 * PAGE)
    assert not other.pages and pool.free_pages == 2
    one.pages = []
    other.reserve(3 * PAGE)
    assert pool.table[other.slot.index, :3].tolist() == [page.index for page in other.pages]


def test_a_named_state_comes_back_from_host_memory(pool):
    state = begun(pool, 2 * PAGE + 64)
    tensors = dict(state.named().items())
    assert tensors["page 2.k"].shape[1] == 64 and tensors["page 0.v"].dtype == pool.keys.v.dtype
    state = state.named()
    again = restore(tensors, 2 * PAGE + 64, pool)
    same(again.named(), tensors)


def test_a_view_stays_on_the_device_until_the_room_is_needed(pool):
    state = begun(pool, PAGE + 64)
    named, taken = state.named(), state.pages[0].index
    del state
    assert pool.free_pages == 5
    again = restore(named, PAGE + 64, pool)
    assert again.pages[0].index == taken and pool.free_pages == 4
    del again
    other = State(pool)
    other.reserve(5 * PAGE)
    another = State(pool)
    another.reserve(2 * PAGE)
    assert not named.view.here
    del other
    same(restore(named, PAGE + 64, pool).named(), named)


def test_views_keep_within_their_bytes(pool):
    state = begun(pool, 64)
    pool.plan = replace(pool.plan, views=2 * pool.view_bytes)
    named = [state.named() for _ in range(3)]
    assert [one.view.here for one in named] == [False, True, True]
    restore(named[1], 64, pool)
    named.append(state.named())
    assert [one.view.here for one in named] == [False, True, False, True]


@pytest.mark.parametrize("harm", ["missing", "shape", "dtype", "stranger"])
def test_a_kept_state_that_does_not_fit_is_not_restored(pool, harm):
    tensors = dict(begun(pool, 64).named().items())
    if harm == "missing":
        del tensors["page 0.k"]
    elif harm == "stranger":
        tensors["9.S"] = tensors["0.S"]
    else:
        tensors["0.S"] = tensors["0.S"][..., :-1] if harm == "shape" else tensors["0.S"].double()
    with pytest.raises(ValueError, match="kept"):
        restore(tensors, 64, pool)
