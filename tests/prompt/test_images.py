"""Images: what is read and what is refused, by name and before work; pixels; the known ones; content ids."""

from __future__ import annotations

import hashlib
import io
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.patience import LONG
from tfmagic.engine.prompt import ImageCache, Limits, MissingImages, PreparedImage, headers
from tfmagic.engine.prompt import images as pictures
from tfmagic.engine.prompt.decode import decode
from tfmagic.errors import Refusal
from tfmagic.protocol import ImageRef

from .conftest import Family, picture, save

FORMATS = {"PNG": {}, "JPEG": {"quality": 90}, "WEBP": {"lossless": True}}


def prepare(data, family, limits=Limits(), cache=None):  # noqa: B008 - frozen
    """One image, or a list of them."""
    data = data if isinstance(data, list) else [data]
    refs = [ImageRef(hashlib.sha256(d).hexdigest(), f"picture {i}") for i, d in enumerate(data)]
    sent = {ref.digest: d for ref, d in zip(refs, data)}
    return pictures.prepare(refs, sent, family, limits, ImageCache() if cache is None else cache)


def refused(data, family, match, limits=Limits()):  # noqa: B008 - frozen
    with pytest.raises(Refusal, match=match) as refusal:
        prepare(data, family, limits)
    assert family.prepared == 0
    assert "\n" not in refusal.value.problem + refusal.value.fix


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, *chunks, depth=8, colour=2):
    """A PNG with a sound header that promises this size, whatever follows."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


# Formats -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_the_formats_that_are_read(family, format):
    (image,) = prepare(save(picture(50, 40), format, **FORMATS[format]), family)
    assert (image.width, image.height) == (50, 40)
    assert image.grid == (1, 4, 6)
    assert image.tokens == 6
    assert image.patches.shape == (24, 3 * 2 * 16 * 16)
    assert image.patches.dtype.is_floating_point and image.patches.abs().max() <= 1


@pytest.mark.parametrize("format", ["GIF", "BMP", "TIFF", "ICO", "PPM", "AVIF", "JPEG2000", "PDF", "DDS"])
def test_formats_that_pillow_writes_and_we_do_not_read(family, format):
    name = {"PPM": "PNM", "JPEG2000": "JPEG 2000"}.get(format, format)
    refused(save(picture(32, 32), format), family, f"Image picture 0 is {name}; PNG, JPEG and WebP are read")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- x --><svg/>', "SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"), (b"\0\0\0\x18ftypavif\0\0\0\0", "AVIF"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "MP4"), (b"II+\0\x08\0\0\0", "TIFF"), (b"8BPS\0\1", "PSD"),
        (b"\xff\x0a\xfa", "JPEG XL"), (b"PK\x03\x04", "ZIP"), (b"<!DOCTYPE html><html>", "HTML"), (b"qoif", "QOI"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_by_name(family, data, name):
    refused(data, family, f"is {name}; PNG, JPEG and WebP are read")


@pytest.mark.parametrize(
    "data", [b"\0", b"hello, I am an image", b"\x89PNG", b"\xff\xd8", b"RIFF\0\0\0\0WAVE", b"\xff" * 99]
)
def test_bytes_in_no_format(family, data):
    refused(data, family, "is in no known image format")


def test_no_bytes(family):
    refused(b"", family, "is empty")


@pytest.mark.parametrize("length", [None, -60])
def test_other_bytes_than_announced(family, length):
    """Whole or damaged, they are refused as such, and nothing is kept of them."""
    whole, cache = save(picture()), ImageCache()
    ref = ImageRef(hashlib.sha256(whole).hexdigest(), "x")
    with pytest.raises(Refusal, match="its SHA-256 differs"):
        pictures.prepare([ref], {ref.digest: save(picture(seed=1))[:length]}, family, Limits(), cache)
    assert family.prepared == 0
    with pytest.raises(MissingImages):
        pictures.prepare([ref], {}, family, Limits(), cache)
    assert pictures.prepare([ref], {ref.digest: whole}, family, Limits(), cache)


def test_other_bytes_under_the_same_digest_spoil_no_other_request(family):
    """The second asks while the first, whose bytes will be refused, is at work."""
    cache, (image,) = ImageCache(), prepare(save(picture()), family)
    begun, go = threading.Event(), threading.Event()

    def refuse():
        begun.set()
        go.wait(LONG)
        raise Refusal("Other bytes.", "Send it again.")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.prepare, ("d", "f"), refuse)
        assert begun.wait(LONG)
        second = threads.submit(cache.prepare, ("d", "f"), lambda: image)
        threading.Timer(0.05, go.set).start()
        assert isinstance(first.exception(), Refusal)
        assert second.result() is image
    assert cache.decodes == 2


@given(width=st.integers(1, 300), height=st.integers(1, 300), kind=st.integers(0, 6))
@settings(max_examples=60)
def test_the_header_gives_the_size(width, height, kind):
    format, options = [
        ("PNG", {}), ("PNG", {"compress_level": 0}), ("WEBP", {}), ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": Image.Exif().tobytes(), "icc_profile": b"x" * 30}),
        ("JPEG", {}), ("JPEG", {"progressive": True, "comment": "\xff" * 9}),
    ][kind]  # fmt: skip
    data = save(Image.new("RGB", (width, height)), format, **options)
    assert headers.kind(data) == format
    assert headers.size(data, format) == (width, height)


@pytest.mark.parametrize("format", FORMATS)
def test_a_header_cut_short_gives_no_size_or_the_right_one(format):
    data = save(picture(70, 50), format)
    for length in range(12, 200):
        assert headers.size(data[:length], format) in (None, (70, 50))


def test_junk_and_fill_bytes_between_jpeg_segments(family):
    data = save(picture(70, 50), "JPEG")
    for junk in (b"junk", b"\xff\xff\xff", b"\xff\x00", b"\xff\xd0\x00"):
        odd = data[:2] + junk + data[2:] if junk[:1] == b"\xff" else data[:20] + junk + data[20:]
        assert headers.size(odd, "JPEG") == (70, 50)


def test_a_jpeg_header_without_end_is_given_up_soon():
    for filler in (b"\xff\xd0", b"\xff", b"\0", b"\xff\xe0\0\2"):
        data = b"\xff\xd8\xff" + filler * (10 * 1024 * 1024 // len(filler))
        started = time.process_time()  # of the processor, so that a busy machine does not matter
        assert headers.size(data, "JPEG") is None
        assert time.process_time() - started < 1.5


# Limits ------------------------------------------------------------------------------------------


def test_too_many_images(family):
    images = [save(picture(seed=i)) for i in range(5)]
    refused(images, family, "has 5 images")
    refused([images[0]] * 5, family, "has 5 images")
    assert len(prepare(images, family, Limits(images=5))) == 5


def test_too_many_bytes(family):
    data = save(picture())
    refused(data, family, r"picture 0 has [\d.]+ MiB", Limits(image_bytes=len(data) - 1))
    refused([data, data], family, r"MiB together", Limits(request_bytes=2 * len(data) - 1))
    assert prepare([data, data], family, Limits(image_bytes=len(data), request_bytes=2 * len(data)))


@pytest.mark.parametrize(
    ("width", "height", "match"),
    [
        (8193, 100, "8,193 x 100 pixels"),
        (100, 8193, "100 x 8,193 pixels"),
        (8192, 8192, r"64\.0 MP"),
        (4097, 4096, r"16\.0 MP"),
        (2**31 - 1, 2**31 - 1, "2,147,483,647 x 2,147,483,647"),
        (201, 1, "201 x 1 pixels"),
        (1, 8192, "1 x 8,192 pixels"),
        (0, 5, "gives no size"),
    ],
)
def test_sizes_are_refused_from_the_header(family, width, height, match):
    """The file is only a header: whoever decoded it would say `damaged`."""
    refused(png(width, height), family, match)


def test_sizes_at_the_limit_are_decoded(family):
    for width, height in [(8192, 2048), (4096, 4096), (200, 1), (1, 200)]:
        with pytest.raises(Refusal, match="damaged PNG"):
            prepare(png(width, height), family)


def test_total_pixels(family):
    refused([png(4096, 4096), png(4096, 4095), png(64, 65)], family, r"MP together")


def test_the_shared_token_budget(checkpoint):
    family = Family(checkpoint.config["image_token_id"], most=4096 * 1024)
    refused([png(2048, 2048), png(2048, 1024)], family, "take 6,144 tokens")
    limits = Limits(image_tokens=100)
    with pytest.raises(Refusal) as refusal:
        prepare([png(640, 640)] * 2, family, limits)
    side = int(refusal.value.fix.split("thumbnail((")[1].split(",")[0])
    shrunk = []
    for seed in range(2):
        image = picture(640, 500, seed=seed)
        image.thumbnail((side, side))
        shrunk.append(save(image))
    assert sum(image.tokens for image in prepare(shrunk, family, limits)) <= 100


def test_limits_count_known_images_too(family):
    cache, data = ImageCache(), [save(picture(seed=i)) for i in range(2)]
    prepare(data, family, cache=cache)
    with pytest.raises(Refusal, match="MiB together"):
        prepare(data, family, Limits(request_bytes=len(data[0]) + 10), cache)
    with pytest.raises(Refusal, match="MP together"):
        prepare(data, family, Limits(total_pixels=40 * 30 + 1), cache)


# Pixels ------------------------------------------------------------------------------------------


def pixels(data, format="PNG"):
    image = decode(data, format, "x")
    assert image.mode == "RGB"
    return np.asarray(image)


def over_white(rgb, alpha):
    """Within one level of the exact blend."""
    rgb, alpha = np.asarray(rgb, float), np.asarray(alpha, float)[..., None] / 255
    return rgb * alpha + 255 * (1 - alpha)


def test_rgb_is_unchanged():
    image = picture(33, 21)
    assert np.array_equal(pixels(save(image)), np.asarray(image))
    assert np.array_equal(pixels(save(image, "WEBP", lossless=True), "WEBP"), np.asarray(image))


@pytest.mark.parametrize(("mode", "format"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP")])
def test_alpha_lies_over_white(mode, format):
    image = picture(20, 20, mode)
    options = {"lossless": True, "exact": True} if format == "WEBP" else {}
    expected = over_white(image.convert("RGB"), image.getchannel("A"))
    assert np.abs(pixels(save(image, format, **options), format) - expected).max() <= 1


def test_a_palette_with_transparency():
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    image.putdata([0, 1, 2])
    assert pixels(save(image)).tolist() == [[[10, 20, 30], [40, 50, 60], [70, 80, 90]]]
    data = save(image, transparency=bytes([255, 0, 128]))
    expected = over_white([[[10, 20, 30], [40, 50, 60], [70, 80, 90]]], [[255, 0, 128]])
    assert np.abs(pixels(data) - expected).max() <= 1


@pytest.mark.parametrize(("mode", "clear"), [("L", 7), ("RGB", (1, 2, 3)), ("1", 0)])
def test_one_transparent_colour(mode, clear):
    image = Image.new(mode, (2, 1), clear)
    image.putpixel((1, 0), {"L": 200, "RGB": (9, 9, 9), "1": 255}[mode])
    left, right = pixels(save(image, transparency=clear))[0].tolist()
    assert left == [255, 255, 255]
    assert right == {"L": [200] * 3, "RGB": [9] * 3, "1": [255] * 3}[mode]


def test_sixteen_bit_grey_keeps_its_high_byte():
    deep = np.array([[0, 255, 256, 0x1234, 0x8000, 0xFFFF]], np.uint16)
    data = save(Image.fromarray(deep))
    assert pixels(data)[0, :, 0].tolist() == [0, 0, 1, 0x12, 0x80, 0xFF]
    at = data.index(b"IDAT") - 4
    clear = data[:at] + chunk(b"tRNS", struct.pack(">H", 0x1234)) + data[at:]
    assert pixels(clear)[0, :, 0].tolist() == [0, 0, 1, 255, 0x80, 0xFF]


def test_sixteen_bit_colour_keeps_its_high_byte():
    row = struct.pack(">6H", 0x1234, 0x5678, 0x9ABC, 0xFFFF, 0, 0x80FF)
    data = png(2, 1, chunk(b"IDAT", zlib.compress(b"\0" + row)), depth=16)
    assert pixels(data).tolist() == [[[0x12, 0x56, 0x9A], [0xFF, 0, 0x80]]]


def test_cmyk_jpeg():
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red = pixels(save(image, "JPEG", quality=100), "JPEG")[8, 8]
    assert red[0] > 240 and red[1] < 15 and red[2] < 15


def test_grey_jpeg():
    assert pixels(save(Image.new("L", (8, 8), 99), "JPEG", quality=100), "JPEG")[4, 4].tolist() == [99, 99, 99]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("orientation", range(0, 10))
def test_exif_orientation(format, orientation):
    image = picture(48, 32)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = save(image, format, exif=exif, **FORMATS[format])
    turned = decode(data, format, "x")
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert turned.size == ((32, 48) if 5 <= orientation <= 8 else (48, 32))
    assert np.array_equal(np.asarray(turned), np.asarray(expected))


def test_a_turned_image_has_its_upright_size(family):
    exif = Image.Exif()
    exif[0x0112] = 6
    (image,) = prepare(save(picture(90, 40), "JPEG", exif=exif), family)
    assert (image.width, image.height) == (40, 90)
    assert image.grid[1] > image.grid[2]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_is_no_reason_to_refuse():
    data = save(picture(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 40)
    assert pixels(data, "JPEG").shape == (30, 40, 3)


# Hostile files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_animations_are_refused(family, format):
    frames = [picture(seed=i) for i in range(3)]
    data = save(frames[0], format, save_all=True, append_images=frames[1:])
    refused(data, family, "an animation of 3 frames")


def test_an_animation_of_one_frame_is_a_picture(family):
    assert prepare(save(picture(), "PNG", save_all=True, append_images=[]), family)


def test_a_multi_picture_jpeg_is_its_first_picture(family):
    first, second = Image.new("RGB", (32, 32), "red"), Image.new("RGB", (32, 32), "blue")
    data = save(first, "MPO", save_all=True, append_images=[second])
    assert headers.kind(data) == "JPEG"
    assert pixels(data, "JPEG")[16, 16].tolist()[0] > 240
    assert prepare(data, family)


@pytest.mark.parametrize("format", FORMATS)
def test_truncated_files(family, format):
    data = save(picture(64, 64), format, **FORMATS[format])
    for length in (len(data) // 4, len(data) // 2, len(data) - 40):
        refused(data[:length], family, f"damaged {format}")


def test_bombs(family):
    text = chunk(b"zTXt", b"k\0\0" + zlib.compress(b"\0" * 70_000_000, 9))
    refused(png(8, 8, text), family, "damaged PNG")
    refused(png(8, 8, chunk(b"iCCP", b"k\0\0" + zlib.compress(b"\0" * 70_000_000, 9))), family, "damaged PNG")
    canvas = b"VP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + b"\xff\x3f\0" * 2
    refused(b"RIFF" + struct.pack("<I", 4 + len(canvas)) + b"WEBP" + canvas, family, "16,384 x 16,384 pixels")


def test_a_jpeg_of_very_many_scans(family):
    """Each costs a decoder about 10 ms at 16 MP, and 14 bytes of file."""
    data = save(picture(64, 64), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    refused(data[:-2] + scan * 1000 + data[-2:], family, r"progressive JPEG of 1,0\d\d scans")
    assert prepare(data[:-2] + scan * 20 + data[-2:], family)


def test_more_rows_than_promised_do_no_harm(family):
    data = png(8, 8, chunk(b"IDAT", zlib.compress(b"\0" * 50_000_000, 9)))
    assert prepare(data, family)[0].tokens == 4


seeds = [
    save(picture(24, 24)), save(picture(24, 24), "JPEG"), save(picture(24, 24), "WEBP"),
    save(picture(24, 24), "JPEG", progressive=True), save(picture(24, 24, "CMYK"), "JPEG"),
    save(picture(24, 24, "LA")), save(picture(24, 24).quantize(8), transparency=0),
    save(picture(24, 24), save_all=True, append_images=[picture(24, 24, seed=1)]),
    save(picture(24, 24, "RGBA"), "WEBP", lossless=True),
    save(picture(24, 24), "WEBP", save_all=True, append_images=[picture(24, 24, seed=1)]),
    save(picture(24, 24), "MPO", save_all=True, append_images=[picture(24, 24, seed=1)]),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow tells of what it mends
@settings(max_examples=400)
@given(st.sampled_from(seeds), st.data())
def test_any_damage_is_an_image_or_a_refusal(checkpoint, seed, data):
    damaged = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, min(len(damaged) - 1, 400)))] = data.draw(st.integers(0, 255))
    damaged = bytes(damaged[: data.draw(st.integers(1, len(damaged)))] if data.draw(st.booleans()) else damaged)
    survives(damaged, checkpoint)


@settings(max_examples=200)
@given(st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBPVP8 ", b"RIFF\0\0\0\0WEBPVP8L"]),
       st.binary(max_size=200))  # fmt: skip
def test_any_bytes_are_an_image_or_a_refusal(checkpoint, magic, rest):
    survives(magic + rest, checkpoint)


def survives(data, checkpoint):
    family = Family(checkpoint.config["image_token_id"])
    try:
        (image,) = prepare(data, family)
        assert image.patches.shape[0] == image.tokens * 4
    except Refusal as refusal:
        assert "\n" not in refusal.problem + refusal.fix


# Known images ------------------------------------------------------------------------------------


def test_a_known_image_is_neither_decoded_nor_resized_again(family):
    cache, data = ImageCache(), save(picture())
    (first,) = prepare(data, family, cache=cache)
    ref = ImageRef(first.digest, "another name")
    (again,) = pictures.prepare([ref], {}, family, Limits(), cache)
    assert cache.decodes == family.prepared == 1
    assert again.patches is first.patches
    assert (again.name, first.name) == ("another name", "picture 0")


def test_the_same_image_twice_is_prepared_once(family):
    cache, data = ImageCache(), save(picture())
    assert len(prepare([data, data, data], family, cache=cache)) == 3
    assert cache.decodes == family.prepared == 1


def test_other_options_are_another_image(checkpoint):
    cache, data = ImageCache(), save(picture(200, 200))
    small, large = (Family(checkpoint.config["image_token_id"], most=most) for most in (4096, 65536))
    (one,), (other,) = prepare(data, small, cache=cache), prepare(data, large, cache=cache)
    assert cache.decodes == 2
    assert one.tokens < other.tokens
    assert one.content != other.content


def test_missing_bytes_are_named(family):
    cache, data = ImageCache(), save(picture())
    (known,) = prepare(data, family, cache=cache)
    refs = [ImageRef(known.digest, "known"), *(ImageRef(c * 64, c) for c in "aba")]
    with pytest.raises(MissingImages, match="The bytes of a, b, a are not here") as missing:
        pictures.prepare(refs, {}, family, Limits(), cache)
    assert missing.value.digests == ["a" * 64, "b" * 64]


def test_the_oldest_goes_first(family):
    images = [save(picture(seed=i)) for i in range(3)]
    (sample,) = prepare(images[0], family)
    cache = ImageCache(budget=2 * sample.patches.nbytes)
    prepare(images[0], family, cache=cache)
    prepare(images[1], family, cache=cache)
    prepare(images[0], family, cache=cache)  # used again
    prepare(images[2], family, cache=cache)  # over the budget: 1 goes
    assert cache.decodes == 3
    prepare(images[0], family, cache=cache)
    assert cache.decodes == 3
    prepare(images[1], family, cache=cache)
    assert cache.decodes == 4


def test_an_image_over_the_budget_is_not_kept(family):
    cache = ImageCache(budget=10)
    for _ in range(2):
        prepare(save(picture()), family, cache=cache)
    assert cache.decodes == 2


def test_many_threads_prepare_once(family):
    cache, data, gate = ImageCache(), save(picture()), threading.Barrier(8)
    made = []

    def ask():
        gate.wait()
        made.extend(prepare(data, family, cache=cache))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and all(image.patches is made[0].patches for image in made)
    assert cache.decodes == family.prepared == 1


def test_a_failure_is_not_kept(family):
    cache, data = ImageCache(), save(picture())[:-60]
    for _ in range(2):
        with pytest.raises(Refusal, match="damaged PNG"):
            prepare(data, family, cache=cache)
    assert cache.decodes == 2
    assert not cache._making


def test_content_is_the_pixels(family):
    image = picture(50, 40)
    files = [
        save(image),
        save(image, compress_level=0),
        save(image, "WEBP", lossless=True),
        save(image.convert("RGBA")),
    ]
    prepared = [prepare(data, family)[0] for data in files]
    assert len({p.digest for p in prepared}) == 4
    assert len({p.content for p in prepared}) == 1
    changed = image.copy()
    changed.putpixel((0, 0), tuple(255 - v for v in image.getpixel((0, 0))))
    assert prepare(save(changed), family)[0].content != prepared[0].content


def test_content_knows_the_shape(family):
    """The same bytes as 2 x 8 and as 8 x 2 pixels are two contents."""
    flat = picture(16, 1).tobytes()
    tall, wide = (Image.frombytes("RGB", size, flat) for size in [(2, 8), (8, 2)])
    assert prepare(save(tall), family)[0].content != prepare(save(wide), family)[0].content


NAMES = [("a\nb\x1b[31m", "a b [31m"), ("x" * 500, "x" * 80), ("", "without a name")]


@pytest.mark.parametrize(("name", "shown"), NAMES)
def test_names_fit_one_line(family, name, shown):
    ref = ImageRef("0" * 64, name)
    with pytest.raises(MissingImages) as missing:
        pictures.prepare([ref], {}, family, Limits(), ImageCache())
    assert missing.value.problem == f"The bytes of {shown} are not here."
    data = save(picture())
    ref = ImageRef(hashlib.sha256(data).hexdigest(), name)
    assert pictures.prepare([ref], {ref.digest: data}, family, Limits(), ImageCache())[0].name == shown


def test_prepared_images_are_values(family):
    (image,) = prepare(save(picture()), family)
    assert isinstance(image, PreparedImage)
    assert replace(image, start=7).start == 7 and image.start == 0
