"""What a drafter keeps of a sequence: the same however it came, only what it can see, and nobody else's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.block import TOGETHER, Ask, Drafter
from tfmagic.engine.drafting.draft import Lattice

from .conftest import FIRST, Target, changed, taps, weights

WIDE = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 12}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 12}
KINDS = {"mixed": WIDE, "sliding": SLIDING, "sliding, causal": SLIDING | {"is_causal": True}, "first kind": FIRST}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    made = {}
    for kind, changes in KINDS.items():
        folder = tmp_path_factory.mktemp("drafter")
        write_folder(folder, changed(**changes))
        made[kind] = Drafter(Checkpoint(folder), Target())
    return made


def write_folder(folder, c):
    import json

    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(c))
    save_file(weights(c), folder / "model.safetensors")


def drafted(drafter: Drafter, context, places: int = 5):
    [lattice] = drafter.lattices([Ask(context, 9, context.end, places)])
    return lattice


def alike(a, b) -> bool:
    """Within rounding: candidates may change places where their logits are as good as equal."""
    return np.abs(a.logits - b.logits).max() < 1e-3 and (a.ids == b.ids).mean() > 0.9


@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    start=st.integers(0, 300),
    pieces=st.lists(st.tuples(st.integers(0, 90), st.booleans()), min_size=1, max_size=8),
)
def test_in_pieces_or_at_once(drafters, kind, start, pieces):
    """`pieces`: rows, and whether there is a draft behind them."""
    drafter, total = drafters[kind], sum(n for n, _ in pieces)
    rows = taps(total + 1)
    once = drafter.context()
    drafter.extend(once, rows, start)
    context, at = drafter.context(), 0
    for n, draft in [*pieces, (1, False)]:
        drafter.extend(context, rows[at : at + n], start + at)
        at += n
        if draft and at:
            drafted(drafter, context)
    assert (context.start, context.end) == (once.start, once.end) == (start, start + total + 1)
    assert alike(drafted(drafter, context), drafted(drafter, once))


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_leaves_the_context_as_it_was(drafters, kind):
    drafter = drafters[kind]
    context = drafter.context()
    drafter.extend(context, taps(30), 0)
    first = drafted(drafter, context)
    for places in (1, 5, 3):
        again = drafted(drafter, context, places)
        assert alike(again, Lattice(*(part[:places] for part in first)))


def test_rows_out_of_the_window_are_dropped_and_not_missed(drafters):
    drafter = drafters["sliding"]
    long, short = drafter.context(), drafter.context()
    rows, at = taps(3000), 0
    for n in (1, 7, 64, 3, 900, 10, 11, 12, 70, *[5] * 500):
        drafter.extend(long, rows[at : at + n], at)
        at = min(at + n, 3000)
        drafted(drafter, long)
        assert sum(layer.kv.numel() * 4 for layer in long.layers) <= drafter.context_bytes(at)
    drafter.extend(short, rows[-11:], 3000 - 11)
    assert alike(drafted(drafter, long), drafted(drafter, short))
    for context in (long, short):
        assert all(layer.high - layer.low == 11 for layer in context.layers)
    less = drafter.context()
    drafter.extend(less, rows[-10:], 3000 - 10)
    assert not alike(drafted(drafter, less), drafted(drafter, short)), "the eleventh row back is still seen"


def test_every_row_is_kept_where_a_layer_has_no_window(drafters):
    drafter = drafters["mixed"]
    context = drafter.context()
    for at in range(0, 500, 20):
        drafter.extend(context, taps(20, at), at)
    drafted(drafter, context)
    assert [layer.high - layer.low for layer in context.layers] == [500, 11]
    assert sum(layer.kv.numel() * 4 for layer in context.layers) <= drafter.context_bytes(500)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waiting", [3, TOGETHER + 30])
def test_forks_go_their_own_ways(drafters, kind, waiting):
    drafter = drafters[kind]
    context = drafter.context()
    drafter.extend(context, taps(40), 0)
    drafted(drafter, context)
    drafter.extend(context, taps(waiting, 1), 40)
    forks = [context.fork() for _ in range(2)]
    before = drafted(drafter, context)
    for seed, fork in enumerate(forks):
        assert alike(drafted(drafter, fork), before)
        drafter.extend(fork, taps(6, 10 + seed), fork.end)
    a, b = (drafted(drafter, fork) for fork in forks)
    assert not alike(a, b) and not alike(a, before)
    assert alike(drafted(drafter, context), before), "the first of them is untouched"
    straight = drafter.context()
    drafter.extend(straight, torch.cat([taps(40), taps(waiting, 1), taps(6, 10)]), 0)
    assert alike(drafted(drafter, straight), a)


def test_rows_that_do_not_follow_begin_anew(drafters):
    drafter = drafters["mixed"]
    context, fresh = drafter.context(), drafter.context()
    drafter.extend(context, taps(20), 0)
    drafted(drafter, context)
    for start in (64, 5):
        drafter.extend(context, taps(8, start), start)
        drafter.extend(fresh, taps(8, start), start)
        assert context.start == start and context.end == start + 8
        assert alike(drafted(drafter, context), drafted(drafter, fresh))


def test_a_context_with_no_rows_still_drafts(drafters):
    for drafter in drafters.values():
        context = drafter.context()
        drafter.extend(context, taps(0), 0)
        [lattice] = drafter.lattices([Ask(context, 3, 50, 5)])
        assert len(lattice.ids) == 5


def test_a_context_that_ends_elsewhere_is_an_error(drafters):
    drafter = drafters["mixed"]
    context = drafter.context()
    drafter.extend(context, taps(5), 10)
    for position in (14, 16):
        with pytest.raises(ValueError, match="ends at row 15"):
            drafter.lattices([Ask(context, 3, position, 2)])


def test_the_taps_may_be_overwritten_after_they_were_given(drafters):
    drafter = drafters["mixed"]
    context, other = drafter.context(), drafter.context()
    rows = taps(10)
    drafter.extend(other, rows.clone(), 0)
    drafter.extend(context, rows, 0)
    rows.zero_()
    assert alike(drafted(drafter, context), drafted(drafter, other))
