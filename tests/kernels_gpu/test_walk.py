"""A window's walk, and what the round behind one of single rows is told: the kernels beside their twins."""

from __future__ import annotations

import torch

from tfmagic.kernels.gpu.walk import follow, follow_twin, walk, walk_twin


def test_walks_are_the_twins():
    generator, (S, R) = torch.Generator().manual_seed(0), (40, 8)
    ids, drawn = (torch.randint(0, 3, (S, R), generator=generator, dtype=torch.int32) for _ in range(2))
    drawn[:5, 2] = -1  # could not be drawn
    parents = torch.stack([torch.randint(-1, max(r, 1), (S,), generator=generator) for r in range(R)], 1).int()
    counts = torch.randint(0, R + 1, (S,), generator=generator, dtype=torch.int32)
    found = [(torch.empty_like(ids), torch.empty_like(counts)) for _ in range(2)]
    for does, out in zip((walk, walk_twin), found):
        does(ids, parents, drawn, counts, *out)
    assert torch.equal(found[0][1], found[1][1]) and {*found[0][1].tolist()} >= {0, 1, 2, 3}
    assert torch.equal(found[0][0], found[1][0])


def test_the_next_round_has_the_tokens_drawn_one_place_on():
    lists = [[5], [6], [7]], [[40], [0], [9]], [50, 0, 9], [[51], [1], [10]]
    told = [torch.tensor(x, dtype=torch.int32) for x in lists]
    drawn, twin = torch.tensor([[8], [-1], [0]], dtype=torch.int32), [x.clone() for x in told]
    follow(*told, drawn)
    follow_twin(*twin, drawn)
    assert [x.flatten().tolist() for x in told] == [[8, 0, 0], [41, 1, 10], [51, 1, 10], [52, 2, 11]]
    assert all(map(torch.equal, told, twin))
