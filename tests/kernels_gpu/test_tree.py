"""Trees made on the device: against the twin, and as the host makes them; and the windows that hold them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tfmagic.engine.drafting.draft import Lattice
from tfmagic.engine.drafting.tree import block, tree
from tfmagic.engine.sampling import Draw
from tfmagic.kernels.gpu.tree import CHILDREN, ROWS, Candidates, Seats, Trees, grow, grow_twin

from .cases import ints

STREAMS = [  # width, temperature, seed, position, end
    (CHILDREN, 0.0, 0, 40, 900),
    (CHILDREN, 0.8, 3, 7, 900),
    (1, 0.0, 0, 0, 900),
    (1, 1.3, -5, 70_000, 90_000),
    (0, 0.0, 0, 5, 900),
    (CHILDREN, 1e-6, 2**63 - 1, 12, 900),
    (CHILDREN, 0.0, 0, 50, 53),
    (CHILDREN, 0.5, 9, 60, 60),
    (CHILDREN, 0.0, 0, 61, 60),
]


def case(R: int, P: int, K: int, seed: int = 0, streams=STREAMS):
    g, S = torch.Generator().manual_seed(seed), len(streams)
    ids = torch.randint(0, 5000, (S, P, K), generator=g, dtype=torch.int32)
    logits = torch.randn(S, P, K, generator=g).mul(3).sort(-1, descending=True).values
    candidates = Candidates(ids, logits, torch.randn(S, P, K, K, generator=g) * 3)
    widths, heats, seeds, positions, ends = zip(*streams)
    f = {name: torch.full((S, R), 77, dtype=torch.int32) for name in ("ids", "parents", "positions", "places")}
    f |= {name: torch.full((S,), 77, dtype=torch.int32) for name in ("counts", "rows")}
    f["temperature"] = torch.tensor(heats, dtype=torch.float64)[:, None].repeat(1, R)
    f["seed"] = torch.tensor(seeds)[:, None].repeat(1, R)
    out = [torch.full((S, ROWS), 77, dtype=torch.int32) for _ in range(2)] + [torch.full((S, ROWS), 7.0)]
    out += [torch.full((S,), 77, dtype=torch.int32) for _ in range(2)] + [torch.zeros(2, dtype=torch.int64)]
    pending = torch.randint(0, 5000, (S, P + 1), generator=g, dtype=torch.int32)
    seats = Seats(ints(*widths), ints(*[3 * s for s in range(S)]), ints(*ends))
    return candidates, pending, ints(*positions), torch.zeros(1, dtype=torch.int64), seats, f, Trees(*out)


SHAPES = [(16, 7, 16), (8, 15, 16), (2, 1, 6), (4, 3, 1), (16, 20, 33)]


@pytest.mark.parametrize(("R", "P", "K"), SHAPES)
def test_it_is_as_the_twin_has_it(R, P, K):
    for seed in range(4):
        ours, twin = case(R, P, K, seed), case(R, P, K, seed)
        grow(*ours)
        grow_twin(*twin)
        for made, said in zip((*ours[5].values(), *ours[6][:-1]), (*twin[5].values(), *twin[6][:-1])):
            torch.testing.assert_close(made, said, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("R", "P", "K"), SHAPES)
def test_trees_are_those_that_the_host_makes(R, P, K):
    told = case(R, P, K, seed=8)
    grow(*told)
    candidates, pending, _, _, _, f, out = told
    for s, (width, heat, seed, position, end) in enumerate(STREAMS):
        sampling = SimpleNamespace(greedy=heat == 0, temperature=heat)
        lattice = Lattice(*(x[s].numpy().astype(x[s].numpy().dtype) for x in candidates))
        lattice = lattice._replace(ids=lattice.ids.astype(np.int64))
        draft = (block if width == 1 else tree)(lattice, Draw(sampling, seed % 2**64, position + 1))
        made, kept = int(out.made[s]), int(out.verified[s])
        if not width:
            assert made == kept == f["counts"][s] == 0
            continue
        assert made == 1 + len(draft.ids) and kept == max(min(made, R, end - position), 0)
        assert out.guesses[s, :made].tolist() == [pending[s, 0], *draft.ids]
        assert out.behind[s, :made].tolist() == [-1, *draft.parents]
        assert out.chances[s, 1:made].tolist() == pytest.approx(draft.chances, rel=1e-3, abs=1e-6)


def test_a_window_holds_the_likeliest_and_says_where_they_are():
    told = case(8, 7, 16, seed=2)
    grow(*told)
    _, pending, _, _, _, f, out = told
    for s, (_, _, _, position, _) in enumerate(STREAMS):
        kept = int(f["counts"][s])
        assert kept == out.verified[s] and f["rows"][s] == position
        assert f["ids"][s].tolist() == [*out.guesses[s, :kept].tolist(), *[0] * (8 - kept)]
        assert f["parents"][s, :kept].tolist() == out.behind[s, :kept].tolist()
        depths = [0]
        for row in range(1, 8):
            depths.append(depths[f["parents"][s, row]] + 1 if row < kept else 0)
        assert f["positions"][s].tolist() == [position + 3 * s + depth for depth in depths]
        assert f["places"][s].tolist() == [position + 1 + depth for depth in depths]
    assert [int(n) for n in f["counts"]] == [8, 8, 8, 8, 0, 8, 3, 0, 0]
    assert f["ids"][:4, 0].tolist() == pending[:4, 0].tolist()


def test_numbers_that_are_not_finite_make_no_tree():
    told = case(8, 7, 16)
    told[0].logits[0] = float("nan")
    grow(*told)
    assert told[6].made[0] == told[5]["counts"][0] == 1 and told[6].made[1] == ROWS
