"""What a person can hand to the client, and what is said when it is wrong."""

from __future__ import annotations

import io
import sys
import types

import numpy
import pytest
from PIL import Image

from tfmagic import pictures
from tfmagic.client import connect, parse
from tfmagic.errors import TfmagicError


def pixels(data: bytes) -> numpy.ndarray:
    return numpy.asarray(Image.open(io.BytesIO(data)))


RGB = numpy.arange(4 * 6 * 3, dtype=numpy.uint8).reshape(4, 6, 3)


@pytest.mark.parametrize(
    "array", [RGB, RGB[..., 0], numpy.dstack([RGB, RGB[..., :1]]), RGB[::2, ::-1]], ids=["rgb", "grey", "rgba", "view"]
)
def test_arrays_come_through_without_loss(array):
    assert (pixels(pictures.encode(array)[1]) == array).all()


def test_float_arrays_are_scaled_and_booleans_are_black_and_white():
    grey = numpy.array([[0.0, 0.5], [1.0, 0.25]], numpy.float32)
    assert pixels(pictures.encode(grey)[1]).tolist() == [[0, 128], [255, 64]]
    assert pixels(pictures.encode(grey > 0.4)[1]).tolist() == [[0, 255], [255, 0]]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (numpy.zeros((2, 2, 2), numpy.uint8), r"shape \(2, 2, 2\)"),
        (numpy.zeros((0, 2), numpy.uint8), r"shape \(0, 2\)"),
        (numpy.zeros(3, numpy.uint8), r"shape \(3,\)"),
        (numpy.full((2, 2), 1.5), "not within 0 to 1"),
        (numpy.full((2, 2), numpy.nan), "not within 0 to 1"),
        (numpy.zeros((2, 2), numpy.int64), "array of int64"),
    ],
)
def test_other_arrays_are_refused_with_the_fix(array, words):
    with pytest.raises(TfmagicError, match=words):
        pictures.encode(array)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_pil_images_come_through(mode):
    image = Image.fromarray(RGB).convert(mode)
    name, data = pictures.encode(image)
    expected = image if mode not in ("CMYK", "YCbCr") else image.convert("RGB")
    assert name == "image" and Image.open(io.BytesIO(data)).convert("RGBA") == expected.convert("RGBA")


def test_a_file_gives_its_own_bytes_and_its_name(tmp_path):
    path = tmp_path / "red.jpg"
    Image.new("RGB", (3, 3), "red").save(path)
    for source in (path, str(path)):
        assert pictures.encode(source) == ("red.jpg", path.read_bytes())
    assert pictures.encode(path.read_bytes()) == ("image", path.read_bytes())
    assert pictures.encode(Image.open(path))[0] == "red.jpg"


def test_the_rotation_of_a_photograph_is_kept():
    image = Image.new("RGB", (4, 2), "red")
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(buffer, "JPEG", exif=exif)
    data = pictures.encode(Image.open(io.BytesIO(buffer.getvalue())))[1]
    assert Image.open(io.BytesIO(data)).getexif()[0x0112] == 6


def test_figures_and_objects_that_show_themselves(monkeypatch):
    class Drawing:
        def _repr_png_(self):
            return b"png bytes"

    class Figure:
        def savefig(self, file, format):
            Image.fromarray(RGB).save(file, format)

    monkeypatch.setitem(sys.modules, "matplotlib.figure", types.SimpleNamespace(Figure=Figure))
    assert pictures.encode(Drawing()) == ("Drawing", b"png bytes")
    name, data = pictures.encode(Figure())
    assert name == "figure" and (pixels(data) == RGB).all()


@pytest.mark.parametrize("source", [object(), 3, None, Image, {"a": 1}])
def test_anything_else_is_refused_with_what_is_accepted(source):
    with pytest.raises(TfmagicError, match=r"(?s)is not an image.*a path, encoded bytes, a PIL image, a numpy array"):
        pictures.encode(source)


def test_files_that_cannot_be_read_empty_and_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "LIMIT", 10)
    (tmp_path / "empty.png").touch()
    (tmp_path / "large.png").write_bytes(bytes(11))
    for name, words in (("none.png", "No such file"), ("empty.png", "is empty"), ("large.png", "the limit is")):
        with pytest.raises(TfmagicError, match=words):
            pictures.encode(tmp_path / name)
    with pytest.raises(TfmagicError, match="cannot be read"):
        pictures.encode("a\0b")
    with pytest.raises(TfmagicError, match="addresses are not read yet"):
        pictures.encode("https://example.org/a.png")
    monkeypatch.undo()
    with pytest.raises(TfmagicError, match="Is a directory"):
        pictures.encode(tmp_path)


def test_parameters_are_checked_by_name_and_type():
    assert parse({"temperature": 0, "stop": "x", "top_k": numpy.int64(3)}).stop == ["x"]
    for given, words in (
        ({"temprature": 1}, "(?s)no parameter 'temprature'.*Did you mean temperature"),
        ({"zzz": 1}, "Known: max_tokens, temperature"),
        ({"temperature": "hot"}, "temperature: Expected `float"),
        ({"draft": "maybe"}, "draft: Invalid enum value 'maybe'"),
        ({"max_tokens": 1.5}, "max_tokens: Expected `int"),
    ):
        with pytest.raises(TfmagicError, match=words):
            parse(given)


def test_prompts_messages_and_options_of_another_kind(engine):
    for call in (
        lambda: engine.run(3),
        lambda: engine.run(messages=["x"]),
        lambda: engine.run("x", images=[3]),
        lambda: engine.run(messages=[{"role": "robot", "content": "x"}]),
        lambda: engine.run("x", streams="two"),
    ):
        with pytest.raises(TfmagicError):
            call()
    with pytest.raises(TfmagicError, match=r"(?s)no option 'contxt'.*context"):
        connect(contxt=3)
    assert engine.run("fine").status == "done"


def test_one_image_need_not_be_in_a_list(engine):
    red = pictures.encode(RGB)[1]
    for images in (red, RGB, ("name", RGB), [RGB], (red, red)):
        assert engine.run("x", images=images).pictures
