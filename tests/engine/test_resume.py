"""Where a prompt resumes and what lies around that row: lengths, long suffixes, pictures; always what it is cold."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace

import pytest
from PIL import Image

from tfmagic import protocol
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model

from .conftest import SEEDED, Bench, picture_prompt, text_prompt
from .test_loop import ids
from .test_promises import same_states

SERIAL = replace(SEEDED, draft="off", stop_ids=frozenset())


def resumed_is_cold(tiny, first, second):
    """Run one prompt, then the other on its states; returns the second's record."""
    warm, cold = Bench(tiny), Bench(tiny)
    warm.run(first)
    run = warm.run(second, SERIAL)
    assert run.streams[0].token_ids == cold.run(second, SERIAL).streams[0].token_ids
    same_states(warm, cold)
    return run


@pytest.mark.parametrize("rows", [64 * k + d for k in (2, 3, 5) for d in (-1, 0, 1)])
def test_an_equal_prompt_of_any_length_keeps_its_prefix(tiny, rows):
    run = resumed_is_cold(tiny, text_prompt(ids(rows)), text_prompt(ids(rows)))
    assert run.cached_tokens == (rows - 1) // 64 * 64 and rows - run.cached_tokens <= 64
    assert run.cache_source == "exact" and run.miss is None


@pytest.mark.parametrize("rows", [127, 128, 129])
def test_a_long_suffix_keeps_a_shared_prefix(tiny, rows):
    system = ids(rows)
    run = resumed_is_cold(tiny, text_prompt(system + ids(30, 1), [rows]), text_prompt(system + ids(1500, 2), [rows]))
    assert run.cached_tokens == rows // 64 * 64


@pytest.mark.parametrize("before", [10, 57, 58, 60, 63, 64, 80])
def test_a_picture_before_across_or_after_the_resume_row(tiny, pictures, before):
    parts = [ids(before), pictures[0], ids(90 - before)]  # the picture's six rows begin at before + 1
    run = resumed_is_cold(tiny, picture_prompt(tiny, parts), picture_prompt(tiny, [*parts, ids(30, 1)]))
    whole = before + 7 <= run.cached_tokens
    assert run.cached_tokens == 64 and (run.images_kept, run.tower_calls) == ((1, 0) if whole else (0, 1))


def test_two_equal_pictures(tiny, pictures):
    one = pictures[0]
    run = resumed_is_cold(
        tiny, picture_prompt(tiny, [one, ids(70), one, ids(3)]), picture_prompt(tiny, [one, ids(70), one, ids(60, 1)])
    )
    assert run.cached_tokens == 64 and (run.images_kept, run.tower_calls) == (1, 1)


def test_swapped_pictures_share_nothing_from_the_first_on(tiny, pictures):
    one, two = pictures
    a, b = (picture_prompt(tiny, [ids(70), x, ids(20, 1), y, ids(40, 2)]) for x, y in ((one, two), (two, one)))
    run = resumed_is_cold(tiny, replace(a, marks=[70]), b)
    assert a.ids == b.ids and run.cached_tokens == 64 and run.tower_calls == 2 and "at row 71" in run.miss


def test_a_text_alone_on_a_model_with_a_tower_resumes_as_any(tiny, pictures):
    first = text_prompt(ids(200))
    run = resumed_is_cold(tiny, first, picture_prompt(tiny, [ids(200), pictures[0], ids(9)]))
    assert run.cached_tokens == 192 and run.tower_calls == 1


def test_a_marker_that_a_user_types_is_no_picture():
    opened = open_model(None, "cpu", Settings(), lambda event: None)
    data = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(data, "PNG")
    digest = hashlib.sha256(data.getvalue()).hexdigest()
    typed = "Not a picture: <|vision_start|><|image_pad|><|vision_end|>. " * 6

    def prompt(text):
        parts = [protocol.Text(typed), protocol.ImageRef(digest, "red.png"), protocol.Text(text)]
        return opened.prepare([protocol.Message("user", parts)], {digest: data.getvalue()})

    asked = replace(SERIAL, size=opened.engine.model.vocab, max_tokens=6)
    warm, cold = Bench(opened.engine.model), Bench(opened.engine.model)
    warm.run(prompt("Hello!"), asked)
    run = warm.run(prompt("What do you see?"), asked)
    assert len(run.pictures) == 1 and run.pictures[0].start > 60 and run.cached_tokens >= 64
    assert run.streams[0].token_ids == cold.run(prompt("What do you see?"), asked).streams[0].token_ids
