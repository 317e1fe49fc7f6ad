"""A round's outcome as the next draft's input: against the twin, and as a walk has it."""

from __future__ import annotations

import pytest
import torch

from tfmagic.kernels.gpu import relay
from tfmagic.kernels.gpu.walk import walk

from .cases import ints, tree


def case(S: int, R: int, B: int, W: int, seed: int = 0):
    """Walks of a round with room for two streams more than the S that draft, the last of which has none; every guess
    is right with a good chance."""
    g = torch.Generator().manual_seed(seed)
    parents = [tree(min(R, B), seed + s) for s in range(S)] + [[-1]] * 2
    parents = torch.tensor([one + [-1] * (R - len(one)) for one in parents], dtype=torch.int32)
    ids, drawn = (torch.randint(0, 3, (S + 2, R), generator=g, dtype=torch.int32) for _ in range(2))
    drawn[0, 0] = -1  # not finite
    counts = ints(*[min(R, B)] * (S - 1), 0, 1, 1)
    path, walked = torch.empty_like(ids), torch.empty_like(counts)
    walk(ids, parents, drawn, counts, path, walked)
    taps = torch.randn((S + 2) * R, W, generator=g).bfloat16()
    waiting = torch.full((S + 3, B, W), 7.0).bfloat16()
    ends = torch.randint(1, 900, (S,), generator=g, dtype=torch.int32)
    to = relay.Blocks(
        ints(*[5] * S * B).view(S, B),
        *(ints(*[9] * n).view(*shape) for n, shape in ((2 * S * B, (2, S, B)), (S * B, (S, B)))),
        torch.arange(S, 0, -1, dtype=torch.int32),
        ends,
        ends.clone(),
        torch.zeros(1, dtype=torch.int64),
    )
    return drawn, path, walked, taps, waiting, to


@pytest.mark.parametrize(("S", "R", "B", "W"), [(1, 1, 8, 96), (3, 8, 8, 1500), (4, 16, 5, 64)])
def test_it_is_as_the_twin_has_it(S, R, B, W):
    ours, twin = case(S, R, B, W), case(S, R, B, W)
    relay.relay(*ours)
    relay.relay_twin(*twin)
    for made, said in zip((*ours[4:5], *ours[5][:-1]), (*twin[4:5], *twin[5][:-1])):
        assert torch.equal(made, said)


def test_walked_rows_wait_and_the_last_token_is_the_pending_one():
    drawn, path, walked, taps, waiting, to = case(3, 8, 8, 64, seed=3)
    before = to.ends.clone()
    relay.relay(drawn, path, walked, taps, waiting, to)
    assert walked[0] == 0 and walked[1] > 1, "one whose walk ended at once, and one that got on"
    for s, n in enumerate(walked[:3].tolist()):
        slot, rows = int(to.slots[s]), path[s, :n].tolist()
        assert to.ids[s, 0] == (drawn[s, rows[-1]] if n else 5) and (to.ids[s, 1:] == 5).all()
        assert torch.equal(waiting[slot, :n], taps[[s * 8 + row for row in rows]])
        assert (waiting[slot, n:] == 7).all()
        assert to.ends[s] == to.positions[s] == before[s] + n
        assert to.places[:, s].tolist() == [[int(at) + i for i in range(8)] for at in (before[s] + n, before[s])]
        assert to.owners[s].tolist() == [slot] * n + [-1] * (8 - n)
    assert (waiting[[0, 4, 5]] == 7).all(), "no other slot was written"
