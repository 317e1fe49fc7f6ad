"""Rendering and tokenising: exactly the tokenizer's ids, quoted markers as text, earlier turns unchanged."""

from __future__ import annotations

import json
import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.prompt import TextSide
from tfmagic.engine.prompt.shield import PRIVATE, marker_pattern
from tfmagic.errors import Refusal
from tfmagic.protocol import ImageRef, Message, Text

MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>", "<think>", "</think>"]  # fmt: skip
SENTINELS = [chr(PRIVATE[0]), chr(PRIVATE[1]), chr(PRIVATE[-1]), "\ue000"]
PIECES = ["<|", "|>", "<", "im_end", "<|im_", "end|>", " ", "\n", "\n\n", "\t", "\0", "\u200b", "a", "Hello", "123"]
FRAGMENTS = [*MARKERS, *SENTINELS, *PIECES, "é", "e\u0301", "漢字", "🧑", "\u200d🚀", "system\n", "assistant"]

plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
spiced = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
words = st.one_of(plain, spiced)


def user(*parts):
    return Message("user", [part if isinstance(part, ImageRef) else Text(part) for part in parts])


def conversation(texts, system=None):
    """User and assistant in turns."""
    turns = [Message(("user", "assistant")[i % 2], [Text(text)]) for i, text in enumerate(texts)]
    return ([Message("system", [Text(system)])] if system is not None else []) + turns


def written(messages):
    """The embedded model's template, by hand."""
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    bodies = ["".join(p.text if isinstance(p, Text) else place for p in message.parts) for message in messages]
    return (
        "".join(f"<|im_start|>{message.role}\n{body}<|im_end|>\n" for message, body in zip(messages, bodies))
        + "<|im_start|>assistant\n"
    )


def specials(text, ids):
    known = {id for id, token in text.tokenizer.get_added_tokens_decoder().items() if token.special}
    return [text.tokenizer.id_to_token(id) for id in ids if id in known]


@given(st.lists(plain, min_size=1, max_size=5), st.none() | plain)
def test_without_quotes_the_ids_are_the_tokenizers_own(text, texts, system):
    messages = conversation(texts, system)
    if not any(marker in said for said in [*texts, system or ""] for marker in MARKERS):
        assert text.render(messages) == text.tokenizer.encode(written(messages), add_special_tokens=False).ids


@given(st.lists(words, min_size=1, max_size=5), st.none() | words)
def test_quoted_markers_are_text(text, texts, system):
    messages = conversation(texts, system)
    ids = text.render(messages)
    turns = len(messages)
    assert specials(text, ids) == ["<|im_start|>", "<|im_end|>"] * turns + ["<|im_start|>"]
    spelt = text.tokenizer.decode(ids, skip_special_tokens=False)
    assert spelt == unicodedata.normalize("NFC", written(messages))


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_every_marker_in_every_role(text, marker, turn):
    messages = conversation(["u", "a", "v"], "s")
    before = text.render(messages)
    messages[turn].parts = [Text(f"what does {marker} mean?")]
    after = text.render(messages)
    assert specials(text, after) == specials(text, before)
    assert marker in text.tokenizer.decode(after, skip_special_tokens=False)


def test_quoted_text_is_tokenised_as_if_it_were_no_marker(text):
    ids = text.render([user("a<|im_end|>b")])
    layout = json.loads(text.tokenizer.to_str()) | {"added_tokens": []}
    bare = type(text.tokenizer).from_str(json.dumps(layout)).encode("user\na<|im_end|>b", add_special_tokens=False).ids
    start = text.encode("<|im_start|>")
    assert ids == start + bare + text.encode("<|im_end|>\n<|im_start|>assistant\n")


def test_a_marker_in_two_parts_is_still_quoted(text):
    assert text.render([user("<|im_", "end|>")]) == text.render([user("<|im_end|>")])


def test_of_two_markers_the_longer_is_quoted():
    assert marker_pattern(["<a", "<a>", "b", ""]).findall("<a<a>>b") == ["<a", "<a>", "b"]
    assert marker_pattern([]) is None


def test_image_places(text):
    image = ImageRef("0" * 64, "x")
    ids = text.render([user(image, "<|image_pad|>", image)])
    assert specials(text, ids).count("<|image_pad|>") == 2


def test_private_use_characters_survive_beside_quotes(text):
    said = "".join(SENTINELS) + "<|im_end|>" + "".join(SENTINELS)
    assert said in text.tokenizer.decode(text.render([user(said)]), skip_special_tokens=False)


def test_a_conversation_that_uses_every_private_character(text):
    with pytest.raises(Refusal, match="every private-use character"):
        text.render([user("".join(map(chr, PRIVATE)) + "<|im_end|>")])


@given(st.lists(words, min_size=3, max_size=7), words)
def test_earlier_turns_keep_their_ids(text, texts, system):
    """The next turn's prompt begins with this turn's; only a reply's leading space may fuse with its header."""
    texts = texts[: len(texts) - (len(texts) + 1) % 2]  # ends with the user
    earlier = text.render(conversation(texts[:-2], system))
    later = text.render(conversation(texts, system))
    whole = len(earlier) if not texts[-2][:1].isspace() else len(earlier) - 1
    assert later[:whole] == earlier[:whole]


@given(st.lists(words, min_size=1, max_size=3), st.none() | words)
def test_marks_are_rows_that_prompts_share(text, texts, system):
    """Up to its last mark, a prompt does not depend on the last user text."""
    texts = texts[: len(texts) - (len(texts) + 1) % 2]
    one = text.lay_out(conversation(texts, system))
    other = text.lay_out(conversation([*texts[:-1], "?!"], system))
    assert one.marks and one.marks == sorted(set(one.marks))
    last = min(one.marks[-1], other.marks[-1])
    assert one.ids[:last] == other.ids[:last]


def test_marks_lie_at_the_first_turn_and_the_last_text(text):
    messages = conversation(["What is 2 + 2?", "4", "And 3 + 3?"], "Be brief.")
    ids, marks = text.lay_out(messages)
    first = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    second = first + "What is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n"
    spelt = [text.tokenizer.decode(ids[:mark], skip_special_tokens=False) for mark in marks]
    assert spelt == [first, second]


def test_a_mark_after_an_image(text):
    image = ImageRef("0" * 64, "x")
    ids, marks = text.lay_out([Message("system", [Text("s")]), user(image, "What is <|im_end|> this?")])
    head = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n"
    spelt = [text.tokenizer.decode(ids[:mark], skip_special_tokens=False) for mark in marks]
    assert spelt == [head, head + "<|vision_start|><|image_pad|><|vision_end|>"]


def side(checkpoint, tmp_path, **files):
    """A TextSide of the embedded model with some files replaced."""
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint.path / name).read_bytes())
    save_file({"model.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    for name, content in files.items():
        (tmp_path / name.replace("__", ".")).write_text(content)
    return TextSide(Checkpoint(tmp_path))


def test_templates_that_change_the_text_give_no_marks(checkpoint, tmp_path):
    template = "{% for m in messages %}{{ m.content | length }}:{{ m.content }}{% endfor %}"
    changed = side(checkpoint, tmp_path, chat_template__jinja=template)
    assert changed.lay_out([user("Hello")]) == (changed.encode("5:Hello"), [])


def test_templates_that_trim_still_give_marks(checkpoint, tmp_path):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}{% endfor %}"
    trimmed = side(checkpoint, tmp_path, chat_template__jinja=template)
    ids, marks = trimmed.lay_out([user(" Hello ")])
    assert trimmed.decode(ids) == "user:Hello"
    assert [trimmed.decode(ids[:mark]) for mark in marks] == ["user:"]


def test_named_special_tokens_reach_the_template(checkpoint, tmp_path):
    config = json.dumps({"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"})
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}"
    named = side(checkpoint, tmp_path, chat_template__jinja=template, tokenizer_config__json=config)
    assert named.render([user("x")]) == named.encode("<|endoftext|>|<|im_end|>|False")


@pytest.mark.parametrize("tokenizer", ["", "{}", "[]", "null", '{"model": 3}', "\x00"])
def test_a_broken_tokenizer_is_refused(checkpoint, tmp_path, tokenizer):
    with pytest.raises(Refusal, match=r"tokenizer\.json is no tokenizer"):
        side(checkpoint, tmp_path, tokenizer__json=tokenizer)


def test_another_decoder_is_refused_by_name(checkpoint, tmp_path):
    layout = json.loads(checkpoint.tokenizer_path.read_text())
    layout["decoder"] = {"type": "Fuse"}
    with pytest.raises(Refusal, match="decodes by Fuse"):
        side(checkpoint, tmp_path, tokenizer__json=json.dumps(layout))


def test_truncation_of_the_tokenizer_file_is_off(checkpoint, tmp_path):
    layout = json.loads(checkpoint.tokenizer_path.read_text())
    layout["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    cut = side(checkpoint, tmp_path, tokenizer__json=json.dumps(layout))
    assert cut.decode(cut.encode("one two three four five six")) == "one two three four five six"
