"""The bf16 form against float32 references, as near as bf16 comes: transformers' own bf16 is as far off."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..families.conftest import straight
from .conftest import GREEDY, Reply, rounds


def all_logits(model, ids, features, positions):
    """Every row's logits, by prompt passes that end at each."""
    state, rows = model.new_state(), []
    model.tap([len(model.config.text.full) - 1])
    try:
        tapped = model.prompt_passes([(state, ids, features, positions, [])])[0][2]
    finally:
        model.tap([])
    with torch.no_grad():
        rows = model.text.logits(tapped, torch.arange(len(ids)))
    return rows, state


def near(found, reference, mean: float) -> None:
    assert float((found - reference).abs().mean()) < mean
    agree = (found.argmax(-1) == reference.argmax(-1)).float().mean()
    assert agree > 0.8


def test_text(tiny, golden):
    ids = golden["ids_text"][0].tolist()
    logits, _ = all_logits(tiny, ids, {}, straight(len(ids)))
    near(logits, golden["logits_text"][0], 0.12)


def features_of(model, golden):
    ids, found, start = golden["ids_img"][0].tolist(), {}, 0
    places = [i for i, id in enumerate(ids) if id == model.image_token_id and ids[i - 1] != id]
    for place, grid in zip(places, golden["image_grid_thw"].tolist(), strict=True):
        patches = golden["pixel_values"][start : start + grid[0] * grid[1] * grid[2]]
        found[place] = model.tower(patches, tuple(grid))
        start += len(patches)
    return found


def test_the_tower(tiny, golden):
    found = torch.cat(list(features_of(tiny, golden).values())).float()
    error = (found - golden["image_features"]).norm() / golden["image_features"].norm()
    assert float(error) < 0.02


def test_images_run_together_have_the_features_that_they_have_alone(tiny, golden):
    grids = [tuple(grid) for grid in golden["image_grid_thw"].tolist()]
    patches = list(golden["pixel_values"].split([t * h * w for t, h, w in grids]))
    for _ in range(2):
        together = tiny.towers(patches, grids)
        for one, grid, rows in zip(patches, grids, together):
            assert torch.equal(tiny.tower(one, grid), rows)
        patches, grids = patches[::-1], grids[::-1]


def test_text_with_images(tiny, golden):
    ids, positions = golden["ids_img"][0].tolist(), golden["position_ids"][:, 0]
    logits, _ = all_logits(tiny, ids, features_of(tiny, golden), positions)
    near(logits, golden["logits_img"][0], 0.12)


def test_generated_rows_stand_where_the_images_leave_off(tiny, exact, golden):
    """The key of a step behind a picture is the one that a prompt's row has there."""
    ids, positions, delta = golden["ids_img"][0].tolist(), golden["position_ids"][:, 0], int(golden["rope_delta"])
    features, place = features_of(tiny, golden), len(ids)
    reference = exact.new_state()
    behind = torch.full((3, 1), place + delta)
    laid = {first: rows.float() for first, rows in features.items()}
    exact.prompt_pass(reference, [*ids, 7], laid, torch.cat([positions, behind], 1), [])
    key = reference.layers[3].k[:, place].float()
    errors = {}
    for shift in (delta, 0):
        state = tiny.new_state()
        tiny.prompt_pass(state, ids, features, positions, [])
        state.shift = shift
        rounds(tiny, [Reply(state, place, 7)])
        errors[shift] = float((state.named()["page 0.k"][0, place].float() - key).abs().max())
    assert 4 * errors[delta] < errors[0]


def test_steps_agree_with_chunks_within_rounding(shipped):

    ids = torch.randint(0, 4000, (70,), generator=torch.Generator().manual_seed(2)).tolist()
    whole = shipped.prompt_pass(shipped.new_state(), ids, {}, straight(70), [])[0]
    state = shipped.new_state()
    shipped.prompt_pass(state, ids[:60], {}, straight(60), [])
    for place, id in enumerate(ids[60:], 60):
        rounds(shipped, [Reply(state, place, id, replace(GREEDY, size=4000))])
    assert float((shipped.text.space.logits[0] - whole).abs().mean()) < 0.1
