"""The fields of a body."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfmagic.template import Field, FieldError, is_image, resolve, split

TEXT = st.text(st.characters(codec="utf-8"), max_size=200)
BRACES = st.text("{}ab.[]'\"$ \n", max_size=40)


@given(TEXT)
def test_text_without_two_braces_passes_unchanged(text):
    text = text.replace("{{", "{ {")
    assert split(text) == ([text] if text else [])


@given(BRACES)
def test_any_body_is_text_and_fields_or_refused(body):
    try:
        parts = split(body)
    except FieldError as error:
        assert "{{" in body and "\n" not in str(error)
        return
    assert all(parts)
    assert not any(type(a) is str and type(b) is str for a, b in pairwise(parts))


@given(TEXT, TEXT)
def test_a_field_stands_between_its_neighbours(before, after):
    before, after = before.replace("{", "("), after.replace("{", "(")
    assert split(f"{before}{{{{name}}}}{after}") == [part for part in (before, Field("name"), after) if part]


@given(TEXT)
def test_doubled_braces_give_the_text_back(text):
    assert "".join(split(text.replace("{", "(").replace("((", "{{{{"))) == text.replace("{", "(").replace("((", "{{")


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("{{ a }}", [Field("a")]),
        ("{{a.b[0]['k'][\"x y\"][-1]}}", [Field("a.b[0]['k'][\"x y\"][-1]")]),
        ("{{größe}}", [Field("größe")]),
        ("{{{{a}}", ["{{a}}"]),
        ('{"n": {{{n}}}}', ['{"n": {', Field("n"), "}}"]),
        ("{{a}}{{b}}", [Field("a"), Field("b")]),
        ("}} {x} ${y}", ["}} {x} ${y}"]),
    ],
)
def test_examples(body, parts):
    assert [(type(part), part) for part in split(body)] == [(type(part), part) for part in parts]


@pytest.mark.parametrize("field", ["{{", "{{}}", "{{a b}}", "{{a|b}}", "{{f()}}", "{{1}}", "{{a[b]}}", "{{a._b}}"])
def test_what_is_no_field_is_refused(field):
    with pytest.raises(FieldError, match="is not a field"):
        split(f"text {field} text")


def test_resolve_looks_up_and_never_runs():
    class Trap:
        called = False

        def __call__(self):
            Trap.called = True

    names = {"a": {"k": [1, 2]}, "t": Trap()}
    assert resolve("a['k'][-1]", names) == 2
    assert resolve('a["k"]', names) == [1, 2]
    assert resolve("t", names) is names["t"] and not Trap.called
    for path, message in [
        ("b", "b is not defined"),
        ("a['j']", "a has no ['j']"),
        ("a['k'][5]", "a['k'] has no [5]"),
        ("a.x", "a has no .x"),
    ]:
        with pytest.raises(FieldError) as error:
            resolve(path, names)
        assert str(error.value).startswith(message)


def test_what_is_an_image():
    import numpy
    from PIL import Image

    assert is_image(Image.new("RGB", (2, 2)))
    assert is_image(numpy.zeros((2, 2, 3), numpy.uint8)) and is_image(numpy.zeros((2, 2), numpy.uint8))
    assert is_image(numpy.zeros((2, 2, 4)))
    assert not is_image(numpy.zeros((2, 2))) and not is_image(numpy.zeros(3, numpy.uint8))
    assert is_image(b"\x89PNG\r\n") and is_image(b"\xff\xd8\xff") and is_image(b"RIFF....WEBP")
    assert not is_image(b"text") and not is_image("cat.png") and not is_image(None)
