"""The family against reference outputs of transformers 5.24 on a tiny random checkpoint, float32."""

from __future__ import annotations

import torch

from tfmagic.engine.drafting.draft import chain

from .conftest import straight

TOLERANCE = 2e-4


def all_logits(model, ids, features, positions):
    """Every row's logits and the state after them."""
    state = model.new_state()
    with torch.inference_mode():
        x = model.text.embed(ids)
        for first, rows in features.items():
            x[first : first + len(rows)] = rows
        x, _, moves, _ = model.text.prompt_pass([state], [len(x)], x, positions, [[]])
        model.text.move([state], [len(x)], moves)
        return model.text.logits(x), state


def greedy(model, row, state, count):
    ids = []
    for _ in range(count):
        ids.append(int(row.argmax()))
        rows, moved = model.round_pass([state], [chain(ids[-1:])])
        model.commit([state], moved, [[0]])
        row = rows[0]
    return ids


def test_text(tiny, golden):
    ids = golden["ids_text"][0].tolist()
    logits, state = all_logits(tiny, ids, {}, straight(len(ids)))
    assert float((logits - golden["logits_text"][0]).abs().max()) < TOLERANCE
    assert greedy(tiny, logits[-1], state, 12) == golden["gen_text"][0, len(ids) :].tolist()


def test_the_tower(features, golden):
    ours = torch.cat(list(features.values()))
    assert float((ours - golden["image_features"]).abs().max()) < 1e-5


def test_text_with_images(tiny, golden, features):
    ids, positions = golden["ids_img"][0].tolist(), golden["position_ids"][:, 0]
    logits, state = all_logits(tiny, ids, features, positions)
    assert float((logits - golden["logits_img"][0]).abs().max()) < TOLERANCE
    state.shift = int(golden["rope_delta"])
    assert greedy(tiny, logits[-1], state, 12) == golden["gen_img"][0, len(ids) :].tolist()


def test_generated_rows_stand_where_the_images_leave_off(tiny, golden, features):
    ids, positions, delta = golden["ids_img"][0].tolist(), golden["position_ids"][:, 0], int(golden["rope_delta"])
    more = golden["ids_text"][0, :30].tolist()
    behind = torch.arange(len(ids), len(ids) + len(more)).expand(3, -1) + delta
    whole, _ = all_logits(tiny, ids + more, features, torch.cat([positions, behind], 1))
    errors = {}
    for shift in (delta, 0):
        _, state = all_logits(tiny, ids, features, positions)
        state.shift = shift
        rows = []
        for start in (0, 15):
            logits, change = tiny.round_pass([state], [chain(more[start : start + 15])])
            tiny.commit([state], change, [list(range(15))])
            rows.append(logits)
        errors[shift] = float((torch.cat(rows) - whole[len(ids) :]).abs().max())
    assert errors[delta] < 5e-4 < 1e-2 < errors[0]


def test_steps_agree_with_chunks_within_rounding(tiny, golden):
    ids, state, rows = golden["ids_text"][0].tolist(), tiny.new_state(), []
    for id in ids:
        logits, moved = tiny.round_pass([state], [chain([id])])
        tiny.commit([state], moved, [[0]])
        rows.append(logits[0])
    assert float((torch.stack(rows) - golden["logits_text"][0]).abs().max()) < 5e-4
