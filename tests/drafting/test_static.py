"""The drafter's form for a GPU, on a CPU: it gives what the CPU's form gives, in static memory."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tfmagic.engine import families
from tfmagic.engine.cache.store import Store
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.block import Ask, Drafter
from tfmagic.engine.drafting.dflash.weights import quantize_rows
from tfmagic.engine.drafting.static import CONTEXTS, StaticDrafter
from tfmagic.engine.loop import Engine
from tfmagic.kernels.gpu import affine, linear

from ..engine.conftest import GREEDY, SEEDED, Bench, letter, text_prompt
from .conftest import FIRST, GOLDEN, Target, changed, taps, weights
from .test_engine import DRAFTERS, IDS
from .test_forward import CASES

KINDS = {
    "full and sliding": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 12},
    "a short window": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3},
    "a window longer than the ring's tile": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 100},
    "causal": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 12, "is_causal": True},
    "first kind": FIRST,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Of each kind the CPU's form and this one."""
    made = {}
    for kind, changes in KINDS.items():
        folder, c = tmp_path_factory.mktemp("drafter"), changed(**changes)
        (folder / "config.json").write_text(json.dumps(c))
        save_file(weights(c), folder / "model.safetensors")
        made[kind] = Drafter(Checkpoint(folder), Target()), StaticDrafter(Checkpoint(folder), Target(), kept=640)
    return made


def alike(a, b, within: float = 1e-3) -> bool:
    """Within rounding: candidates may change places where their logits are as good as equal."""
    if a.logits.shape != b.logits.shape or np.abs(a.logits - b.logits).max() > within:
        return False
    same = a.ids == b.ids
    rows = np.concatenate([np.ones_like(same[:1]), same[:-1]])[:, :, None] & same[:, None]
    rows[0, 1:] = True
    return same.mean() > 0.9 and np.abs(a.edges - b.edges)[rows].max() < within


PIECE = st.tuples(st.integers(0, 3), st.one_of(st.integers(1, 9), st.integers(10, 200)))


@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    starts=st.lists(st.integers(0, 300), min_size=4, max_size=4),
    steps=st.lists(st.one_of(PIECE, st.sampled_from(["draft", "fork", "restart"])), min_size=1, max_size=12),
)
def test_both_forms_draft_the_same(pairs, kind, starts, steps):
    """Four sequences grow by pieces, draft, are forked and begun anew; every draft is the same in both forms."""
    contexts = [[drafter.context() for _ in starts] for drafter in pairs[kind]]
    at, last = list(starts), 0

    def drafted(places: int):
        asks = [[Ask(c, 9 + i, at[i], 1 + (i + places) % 5) for i, c in enumerate(own)] for own in contexts]
        found = [drafter.lattices(own) for drafter, own in zip(pairs[kind], asks)]
        return all(alike(a, b) for a, b in zip(*found, strict=True))

    for n, step in enumerate([*steps, "draft"]):
        if step == "draft":
            assert drafted(n)
        elif step == "fork":
            for own in contexts:
                own[(last + 1) % 4] = own[last].fork()
            at[(last + 1) % 4] = at[last]
        elif step == "restart":
            at[last] += 17
        else:
            last, rows = step
            for drafter, own in zip(pairs[kind], contexts):
                drafter.extend(own[last], taps(rows, n), at[last])
            at[last] += rows
        if step == "restart":
            for drafter, own in zip(pairs[kind], contexts):
                drafter.extend(own[last], taps(2, n), at[last])
            at[last] += 2


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_every_layout(write, changes):
    folder, found = write(changed(**changes)), []
    for drafter in (Drafter(Checkpoint(folder), Target()), StaticDrafter(Checkpoint(folder), Target())):
        asks = []
        for i, rows in enumerate((0, 1, 9, 130)):
            context = drafter.context()
            drafter.extend(context, taps(rows, i), 1000 * i)
            asks.append(Ask(context, 70 + i, context.end, 5))
        found.append(drafter.lattices(asks))
    assert all(alike(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("changes", [{}, FIRST], ids=["second", "first"])
def test_in_bf16_it_drafts_nearly_the_same(write, changes, bits):
    """As on a GPU: rows in bf16, matrices as the kernels take them."""
    folder = write(changed(hidden_size=64, **changes))
    found = []
    for form, dtype in ((Drafter, torch.float32), (StaticDrafter, torch.bfloat16)):
        drafter = form(Checkpoint(folder), Target(hidden=64), bits=bits, dtype=dtype)
        context = drafter.context()
        drafter.extend(context, taps(30, 1, 128), 0)
        found += drafter.lattices([Ask(context, 9, 30, 5)])
    a, b = found
    assert np.mean([len({*x} & {*y}) / len(x) for x, y in zip(a.ids, b.ids)]) > (0.85 if bits == 16 else 0.6)
    assert np.linalg.norm(a.logits - b.logits) / np.linalg.norm(a.logits) < (0.05 if bits == 16 else 0.2)


def test_more_streams_than_one_launch_takes(pairs):
    one, other = pairs["full and sliding"]
    found = []
    for drafter in (one, other):
        contexts = [drafter.context() for _ in range(CONTEXTS)]
        for i, context in enumerate(contexts):
            drafter.extend(context, taps(1 + 5 * i, i), i)
        found.append(drafter.lattices([Ask(c, 3, c.end, 1 + i % 5) for i, c in enumerate(contexts)]))
    assert len(found[0]) == CONTEXTS and all(alike(a, b) for a, b in zip(*found, strict=True))
    assert other.lattices([]) == []


def test_what_has_piled_up_is_projected_together(pairs, monkeypatch):
    cpu, ours = pairs["full and sliding"]
    held, sizes, project = [[form.context() for _ in range(3)] for form in (cpu, ours)], [], ours.project
    monkeypatch.setattr(ours, "project", lambda rows, *told: sizes.append(len(rows)) or project(rows, *told))
    for i, pieces in enumerate(((4, 30, 3), (50, 60), (2, 1))):
        for form, own in zip((cpu, ours), held):
            for n in pieces:
                form.extend(own[i], taps(n, i), own[i].end)
    asks = [[Ask(context, 5, context.end, 5) for context in own] for own in held]
    assert not sizes and [context.waiting for context in held[1]] == [0, 0, 3]
    found = [form.lattices(own) for form, own in zip((cpu, ours), asks)]
    assert sizes[0] == 37 + 110 and all(alike(a, b) for a, b in zip(*found))
    ours.extend(held[1][0], taps(200), held[1][0].end)
    assert sizes[-1] == 200, "so many do not wait"


def test_slots_come_back_with_their_contexts(pairs):
    drafter = pairs["causal"][1]
    held = [drafter.context() for _ in range(CONTEXTS)]
    assert len({context.slot for context in held}) == CONTEXTS and 0 not in {context.slot for context in held}
    with pytest.raises(MemoryError, match=f"all {CONTEXTS} contexts"):
        drafter.context()
    with pytest.raises(MemoryError, match=f"all {CONTEXTS} contexts"):
        held[0].fork()
    del held[3:5]
    held += [held[0].fork(), drafter.context()]
    assert len({context.slot for context in held}) == CONTEXTS
    held.clear()
    assert sorted(drafter.free) == list(range(1, CONTEXTS + 1))


def test_no_more_rows_than_the_ring_holds_are_seen(write):
    folder = write(changed(layer_types=["full_attention"] * 2))
    short, long = StaticDrafter(Checkpoint(folder), Target(), kept=64), Drafter(Checkpoint(folder), Target())
    rows, found = taps(300), []
    for drafter, first in ((short, 0), (long, 236)):
        context = drafter.context()
        for at in range(first, 300, 4):
            drafter.extend(context, rows[at : at + 4], at)
        found += drafter.lattices([Ask(context, 5, 300, 5)])
    assert alike(*found)
    assert short.ring.k.shape[3] == 64 and short.context_bytes(1000) == 0 and "0.00 GiB" in short.plan


def test_errors_are_those_of_the_cpu_s_form(pairs):
    for drafter in pairs["causal"]:
        context = drafter.context()
        drafter.extend(context, taps(5), 10)
        for position in (14, 16):
            with pytest.raises(ValueError, match="ends at row 15"):
                drafter.lattices([Ask(context, 3, position, 2)])


@pytest.mark.parametrize("draft", ["tree", "block"])
def test_it_changes_no_token(write, draft):
    """In the engine, with the target's bf16 form, whose streams come and go."""
    target = families.load(Checkpoint(GOLDEN / "qwen3_5_tiny"), "cpu", form="bf16")
    c = changed(**DRAFTERS["second"])
    said, drafter = [], StaticDrafter(Checkpoint(write(c)), target)
    for drafting in (None, drafter):
        made = Bench(target)
        made.engine = Engine(target, Store(1 << 30, target.grain), made.take, letter, drafter=drafting)
        for sampling in (GREEDY, SEEDED):
            short = replace(sampling, draft=draft if drafting else "off", max_tokens=8)
            run = made.run(text_prompt(IDS[:70]), short, 3)
            said.append([[token.id for token in stream.tokens] for stream in run.streams])
    assert said[:2] == said[2:] and any(r.drafted for r in run.streams[0].rounds)
    assert len(drafter.free) == CONTEXTS


@pytest.mark.parametrize("size", [1, 16, 37, 48])
def test_a_head_s_first_rows(size):
    """As the target lends them: of a bf16 and of a packed head."""
    g = torch.Generator().manual_seed(6)
    x, matrix, bias = (torch.randn(*shape, generator=g).bfloat16() for shape in ((3, 128), (48, 128), (48,)))
    q = quantize_rows(matrix)
    for w in (linear.Dense(matrix, bias), affine.Affine(q.q, q.scales, q.biases, 4, 64, bias)):
        first = w.first(size)
        assert first.n == size and torch.equal(linear.logits(x, first), linear.logits(x, w)[:, :size])
