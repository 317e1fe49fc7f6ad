"""From candidates to drafts: the best chain and the best tree through a lattice, and their chances."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tfmagic.engine.drafting.draft import NOTHING, Lattice, Window, chain
from tfmagic.engine.drafting.tree import CHILDREN, EDGE, NODES, NOISE, SHARPNESS, block, tree
from tfmagic.engine.sampling import Draw, draw, gumbel, walk

from .conftest import GREEDY, SEEDED


def lattice(places=4, k=5, seed=0, heat=2.0):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(200)[:k] for _ in range(places)])
    logits = -np.sort(-heat * rng.standard_normal((places, k)).astype(np.float32))
    return Lattice(ids, logits, heat * rng.standard_normal((places, k, k)).astype(np.float32))


def paths(given: Lattice, by: Draw):
    """Every path as (places' candidates, chance), by the definition."""
    found = [((), 1.0)]
    for place, (ids, logits) in enumerate(zip(given.ids, given.logits)):
        longer = []
        for path, chance in [one for one in found if len(one[0]) == place]:
            x = logits + EDGE * given.edges[place, path[-1] if path else 0]
            if not by.sampling.greedy:
                x = x / by.sampling.temperature + NOISE * gumbel(by.seed, by.position + place, ids)
            p = np.exp(x.astype(np.float64) / SHARPNESS)
            p /= p.sum()
            longer += [((*path, j), chance * p[j]) for j in np.argsort(-p)[:CHILDREN]]
        found += longer
    return found[1:]


def named(given: Lattice, draft):
    """A draft's nodes as the ids along their paths -> chance."""
    along = [()]
    for id, parent in zip(draft.ids, draft.parents):
        along.append((*along[parent], id))
    return dict(zip(along[1:], draft.chances))


WAYS = pytest.mark.parametrize("sampling", [GREEDY, SEEDED, replace(SEEDED, temperature=0.3)])


@WAYS
@pytest.mark.parametrize("seed", range(5))
def test_a_tree_is_the_likeliest_paths(sampling, seed):
    given, by = lattice(seed=seed), Draw(sampling, 7, 40)
    draft = tree(given, by)
    best = sorted(paths(given, by), key=lambda one: -one[1])[:NODES]
    expected = {tuple(int(given.ids[d, j]) for d, j in enumerate(path)): chance for path, chance in best}
    found = named(given, draft)
    assert found.keys() == expected.keys() and len(draft.ids) == NODES and draft.source == "tree"
    for path, chance in found.items():
        assert chance == pytest.approx(expected[path], rel=1e-5)
    assert draft.chances == sorted(draft.chances, reverse=True)
    assert all(parent <= row for row, parent in enumerate(draft.parents))
    assert max(map(draft.parents.count, draft.parents)) <= CHILDREN


@WAYS
def test_a_block_is_the_chain_of_best_choices(sampling):
    given, by = lattice(seed=3), Draw(sampling, 7, 40)
    draft, known = block(given, by), dict(paths(given, by))
    path = ()
    for depth in range(4):
        path = max((p for p in known if len(p) == depth + 1 and p[:-1] == path), key=known.get)
        assert draft.ids[depth] == given.ids[depth, path[-1]]
        assert draft.chances[depth] == pytest.approx(known[path], rel=1e-5)
    assert draft.parents == [0, 1, 2, 3] and draft.source == "block"


def test_the_noise_is_the_targets_own():
    """With the target's logits for candidates a seeded draw is guessed more often than without its noise."""
    rng, hits = np.random.default_rng(0), {0.0: 0, NOISE: 0}
    for position in range(300):
        row = (1.5 * rng.standard_normal(64)).astype(np.float32)
        said = draw(row, replace(SEEDED, size=64), 5, position)
        ids = np.argsort(-row)[:16]
        given = Lattice(ids[None], row[ids][None], np.zeros((1, 16, 16), np.float32))
        hits[NOISE] += block(given, Draw(SEEDED, 5, position)).ids[0] == said
        hits[0.0] += ids[0] == said
    assert hits[NOISE] > 1.5 * hits[0.0]


def test_lattices_of_no_or_few_candidates():
    nothing = Lattice(np.zeros((0, 4), np.int64), np.zeros((0, 4), np.float32), np.zeros((0, 4, 4), np.float32))
    by = Draw(GREEDY, 0, 1)
    for sampling in (GREEDY, SEEDED):
        assert tree(nothing, Draw(sampling, 0, 1)) == block(nothing, Draw(sampling, 0, 1)) == NOTHING
    assert len(tree(lattice(1, 1), by).ids) == 1 and tree(lattice(1, 1), by).chances == [1.0]
    assert len(tree(lattice(1, 16), by).ids) == CHILDREN and len(block(lattice(40, 2), by).ids) == NODES


@pytest.mark.parametrize("harm", ["nan", "inf", "shape"])
def test_a_lattice_that_makes_no_sense_is_an_error(harm):
    good = lattice()
    bad = good._replace(edges=good.edges[:2]) if harm == "shape" else good._replace(logits=good.logits * np.inf)
    if harm == "nan":
        bad = good._replace(edges=np.full_like(good.edges, np.nan))
    for make in (tree, block):
        with pytest.raises(ValueError, match="lattice"):
            make(bad, Draw(GREEDY, 0, 1))


def test_huge_scores_and_cold_temperatures_still_make_trees():
    given = lattice()._replace(logits=1e6 * lattice().logits)
    for sampling in (GREEDY, replace(SEEDED, temperature=1e-9)):
        draft = tree(given, Draw(sampling, 0, 1))
        assert len(draft.ids) == NODES and all(0 <= c <= 1 and math.isfinite(c) for c in draft.chances)


# The walk ------------------------------------------------------------------------------------------


def logits_for(said):
    rows = np.zeros((len(said), 256), np.float32)
    rows[range(len(said)), said] = 1
    return rows


def test_a_walk_follows_the_draws_through_the_tree():
    window = Window([9, 1, 2, 3, 4, 5], [-1, 0, 0, 2, 2, 4])
    rows = logits_for([2, 0, 4, 0, 5, 77])
    assert walk(rows, window, Draw(GREEDY, 0, 5)) == ([0, 2, 4, 5], [2, 4, 5, 77], None)
    assert walk(logits_for([3, 0, 0, 0, 0, 0]), window, Draw(GREEDY, 0, 5)) == ([0], [3], None)
    assert walk(rows[:1], chain([9]), Draw(GREEDY, 0, 5)) == ([0], [2], None)


def test_a_walk_draws_each_row_for_its_own_place():
    rows = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    said = [draw(row, SEEDED, 3, 40 + i) for i, row in enumerate(rows)]
    assert walk(rows, chain([0, *said[:4]]), Draw(SEEDED, 3, 40)) == ([0, 1, 2, 3, 4], said, None)
    ids, scattered = [0], [rows[0]]  # the same path, a row that is never taken before each of its rows
    for before, after, id in zip(rows, rows[1:], said):
        ids += [255, id]
        scattered += [before, after]
    bush = Window(ids, [-1, 0, 0, 2, 2, 4, 4, 6, 6])
    assert walk(np.stack(scattered), bush, Draw(SEEDED, 3, 40)) == ([0, 2, 4, 6, 8], said, None)


def test_rows_that_are_not_finite_end_a_walk_before_them():
    window, rows = chain([9, 1, 2]), logits_for([1, 2, 3])
    rows[1, 5] = np.nan
    walked = walk(rows, window, Draw(GREEDY, 0, 5))
    assert walked.rows == [0] and walked.ids == [1] and "not finite" in walked.error
    rows[0] = np.inf
    walked = walk(rows, window, Draw(GREEDY, 0, 5))
    assert walked.rows == walked.ids == [] and "not finite" in walked.error
