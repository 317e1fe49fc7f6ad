"""The pieces of a reply are its decoded text, in order and never too early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfmagic.engine.prompt.detokenize import Detokenizer, token_bytes

ids = st.lists(st.integers(0, 3200), max_size=60)
"""Random ids, some past the vocabulary's end."""


def pieces(text, ids):
    detokenizer = text.detokenizer()
    return [detokenizer.push(id) for id in ids], detokenizer.flush()


@given(ids)
def test_the_pieces_are_the_decoded_text(text, ids):
    pushed, rest = pieces(text, ids)
    assert "".join(pushed) + rest == text.decode(ids)


@given(ids)
def test_a_piece_never_turns_out_wrong(text, ids):
    """What was said after k ids is the beginning of what all ids say."""
    pushed, _ = pieces(text, ids)
    whole = text.decode(ids)
    said = ""
    for piece in pushed:
        said += piece
        assert whole.startswith(said)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back(text, words):
    ids = text.encode(words)
    pushed, rest = pieces(text, ids)
    assert "".join(pushed) + rest == text.decode(ids)


@given(st.binary(max_size=40), st.data())
def test_bytes_in_any_cut(data, draw):
    """One byte an id: as Python decodes the whole, with U+FFFD for what is no UTF-8."""
    detokenizer = Detokenizer(lambda id: bytes([id]))
    assert "".join(map(detokenizer.push, data)) + detokenizer.flush() == data.decode("utf-8", "replace")


def test_a_character_waits_for_its_bytes():
    detokenizer = Detokenizer(lambda id: bytes([id]))
    assert [detokenizer.push(byte) for byte in "🧑".encode()] == ["", "", "", "🧑"]
    assert detokenizer.flush() == ""
    assert [detokenizer.push(byte) for byte in "🧑".encode()[:2]] == ["", ""]
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.push(ord("a")) == "a"


def test_special_tokens_and_unknown_ids_say_nothing(text):
    detokenizer = text.detokenizer()
    for id in (*text.encode("<|im_end|><|image_pad|>"), 10**9):
        assert detokenizer.push(id) == ""
    assert detokenizer.flush() == ""


def test_token_bytes():
    assert token_bytes("Ġhi") == b" hi"
    assert token_bytes("Ċ") == b"\n"
    assert token_bytes("Ã©") == "é".encode()
    assert token_bytes("漢") == "漢".encode()
    assert token_bytes("") == b""
