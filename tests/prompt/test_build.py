"""Whole prompts: form, placeholders, keys, positions, marks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tfmagic.engine.prompt import Limits, Prompt, build
from tfmagic.engine.prompt.build import content_rows
from tfmagic.errors import Refusal
from tfmagic.protocol import ImageRef, Message, Text

from .conftest import Family, picture, save

PAD = "<|image_pad|>"


def test_text_alone(desk, text):
    prompt = desk.build(("system", "Be brief."), ("user", "Hello"))
    assert isinstance(prompt, Prompt)
    assert prompt.ids == prompt.key
    assert prompt.images == [] and prompt.rope_delta == 0
    assert torch.equal(prompt.positions, torch.arange(len(prompt.ids)).expand(3, -1))
    assert all(type(id) is int for id in prompt.ids + prompt.key)


def test_images_are_laid_in(desk, text):
    one, two = save(picture(100, 60)), save(picture(60, 100, seed=1))
    prompt = desk.build(("user", "Compare ", one, " with ", two, "."))
    pad = text.encode(PAD)[0]
    assert [image.tokens for image in prompt.images] == [6, 6]
    rows = [row for row, id in enumerate(prompt.ids) if id == pad]
    assert rows == [r for image in prompt.images for r in range(image.start, image.start + image.tokens)]
    for image in prompt.images:
        assert text.tokenizer.id_to_token(prompt.ids[image.start - 1]) == "<|vision_start|>"
        assert text.tokenizer.id_to_token(prompt.ids[image.start + image.tokens]) == "<|vision_end|>"
    assert prompt.positions.shape == (3, len(prompt.ids))
    assert prompt.rope_delta == int(prompt.positions.max()) + 1 - len(prompt.ids)


def test_keys_are_contents_where_ids_are_placeholders(desk, text):
    image = picture(64, 64)
    png, webp = save(image), save(image, "WEBP", lossless=True)
    one, same = desk.build(("user", png, "What?")), desk.build(("user", webp, "What?"))
    other = desk.build(("user", save(picture(64, 64, seed=1)), "What?"))
    assert one.key == same.key != other.key
    assert one.ids == other.ids
    for row, (id, key) in enumerate(zip(one.ids, one.key)):
        inside = any(i.start <= row < i.start + i.tokens for i in one.images)
        assert (-(2**63) <= key < 0) if inside else key == id
    rows = [key for key in one.key + other.key if key < 0]
    assert len(set(rows)) == len(rows)


def test_the_same_image_twice_has_the_same_rows(desk):
    image = save(picture(64, 64))
    prompt = desk.build(("user", image, "and", image))
    first, second = (prompt.key[i.start : i.start + i.tokens] for i in prompt.images)
    assert first == second
    assert desk.cache.decodes == 1


@given(st.binary(min_size=32, max_size=32), st.integers(0, 50), st.integers(0, 50))
def test_content_rows_do_not_depend_on_their_number(content, few, more):
    assert content_rows(content, few + more)[:few] == content_rows(content, few)


def test_the_next_turn_begins_with_this_one(desk):
    image = save(picture(64, 64))
    first = desk.build(("system", "s"), ("user", image, "What is <|im_end|>?"))
    again = desk.build(
        ("system", "s"), ("user", image, "What is <|im_end|>?"), ("assistant", "A red one."), ("user", "Why?")
    )
    rows = len(first.key)
    assert again.key[:rows] == first.key
    assert torch.equal(again.positions[:, :rows], first.positions)
    assert desk.cache.decodes == 1


def test_marks_count_image_rows(desk, text):
    image = save(picture(64, 64))
    prompt = desk.build(("system", "s"), ("user", image, "one"), ("assistant", "two"), ("user", "three", image, "four"))
    ends = [text.tokenizer.decode(prompt.ids[:mark], skip_special_tokens=False) for mark in prompt.marks]
    assert [end.replace(PAD, "")[-14:] for end in ends] == ["im_start|>user\n"[-14:]] * 2 + ["<|vision_end|>"[-14:]]
    assert prompt.marks[1] > prompt.images[0].start + prompt.images[0].tokens
    assert prompt.marks[2] == prompt.images[1].start + prompt.images[1].tokens + 1


def test_quoted_placeholders_are_not_image_places(desk):
    prompt = desk.build(("user", f"{PAD} {PAD}", save(picture()), f"<|vision_start|>{PAD}<|vision_end|>"))
    assert len(prompt.images) == 1


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "match"),
    [
        ([], "does not end with a user turn"),
        ([("system", "s")], "does not end with a user turn"),
        ([("assistant", "a")], "Turn 1 of the conversation is out of order: assistant"),
        ([("user", "u"), ("user", "v")], "Turn 2 of the conversation is out of order: user"),
        ([("user", "u"), ("system", "s"), ("user", "v")], "Turn 2 .* out of order: system"),
        ([("system", "s"), ("system", "s"), ("user", "v")], "Turn 1 .* out of order: system"),
        ([("user", "u"), ("assistant", "a")], "does not end with a user turn"),
        ([("user", "")], "The prompt is empty"),
        ([("user",)], "The prompt is empty"),
        ([("user", " \n", "\t")], "The prompt is empty"),
        ([("user", ""), ("assistant", "a"), ("user", "x")], "The prompt is empty"),
        ([("system", b"x"), ("user", "x")], "image in a turn of the system"),
        ([("user", "x"), ("assistant", b"x"), ("user", "x")], "image in a turn of the assistant"),
        ([("user", "x" * (1024 * 1024 + 1))], "1,024 KiB of text"),
        ([("user", "é" * (512 * 1024)), ("assistant", ""), ("user", "x")], "1,024 KiB of text"),
        ([("user", "half \ud83d")], r"half a character \(surrogate U\+D83D\)"),
    ],
)
def test_form(desk, turns, match):
    with pytest.raises(Refusal, match=match) as refusal:
        desk.build(*turns)
    assert "\n" not in refusal.value.problem + refusal.value.fix


def test_an_image_alone_is_a_prompt(desk):
    assert len(desk.build(("user", save(picture()))).images) == 1


def test_an_empty_reply_is_a_turn(desk):
    assert desk.build(("user", "u"), ("assistant", ""), ("user", "v")).ids


def test_too_many_turns(desk):
    desk.limits = Limits(messages=3)
    assert desk.build(("user", "u"), ("assistant", "a"), ("user", "v"))
    with pytest.raises(Refusal, match="has 4 turns"):
        desk.build(("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"))


def test_a_model_without_a_tower(desk, text):
    family = Family(None)
    assert build([Message("user", [Text("x")])], {}, text, family).ids
    with pytest.raises(Refusal, match="reads no images"):
        build([Message("user", [ImageRef("0" * 64, "x")])], {}, text, family)


def test_a_template_that_drops_images(desk, text, monkeypatch):
    monkeypatch.setattr(text.template, "render", lambda messages: "no places here")
    with pytest.raises(Refusal, match="wrote 0 image places for 1 images"):
        desk.build(("user", save(picture())))
    assert desk.build(("user", "x")).marks == []


def test_no_image_is_decoded_for_a_request_that_is_refused_by_its_form(desk):
    with pytest.raises(Refusal):
        desk.build(("user", save(picture())), ("user", "x"))
    assert desk.cache.decodes == 0
