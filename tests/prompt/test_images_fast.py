"""The quick ways of preparing images give the bits of the plain ones, and several images their own order and errors."""

from __future__ import annotations

import hashlib
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.bench.images import encoded, picture, plain
from tests.patience import LONG
from tfmagic.engine.families.qwen3_5 import images
from tfmagic.engine.prompt.decode import decode
from tfmagic.engine.prompt.images import ImageCache, Limits, prepare
from tfmagic.errors import Refusal
from tfmagic.protocol import ImageRef


@settings(max_examples=60)
@given(
    size=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    patch=st.sampled_from([1, 7, 14, 16, 32]),
    merge=st.integers(1, 4),
    frames=st.integers(1, 3),
    levels=st.tuples(*(st.floats(0.01, 2) for _ in range(7))),
)
def test_patches_are_those_of_the_plain_form(size, patch, merge, frames, levels):
    if max(size) > 200 * min(size):
        return
    noise = np.random.default_rng(size[0]).integers(0, 256, (*size, 3), dtype=np.uint8)
    made = images.Preprocessor(patch, frames, merge, 1024, 65536, levels[:3], levels[3:6], levels[6] / 255)
    patches, grid, tokens = images.prepare(noise, made)
    expected = plain(Image.fromarray(noise), made)
    assert patches.dtype == torch.float32 and patches.is_contiguous() and torch.equal(patches, expected)
    assert len(patches) == grid[1] * grid[2] == tokens * merge**2


def test_every_level_is_rounded_as_the_reference_rounds_it():
    """All 256 values, against the arithmetic spelt out: double product, float32, float32 difference and quotient."""
    ramp = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, 2)
    clip = images.Preprocessor(16, 2, 1, 256, 65536, (0.48, 0.45, 0.4), (0.26, 0.26, 0.27))
    for p in (images.Preprocessor(least=256, merge=1), clip):
        patch = images.prepare(ramp, p)[0][0].view(3, 2, 256)
        for colour in range(3):
            x = (np.arange(256, dtype=np.float64) * p.scale).astype(np.float32)
            x = (x - np.float32(p.mean[colour])) / np.float32(p.std[colour])
            assert np.array_equal(patch[colour, 0].numpy(), x) and torch.equal(patch[colour, 0], patch[colour, 1])


def test_decoding_gives_rgb_of_its_own():
    for format in ("PNG", "JPEG", "WEBP"):
        image = decode(encoded(picture(64, 1), format), format, "x")
        assert image.mode == "RGB" and image.size == (64, 64)
    assert np.array_equal(np.asarray(decode(encoded(picture(64, 1), "PNG"), "PNG", "x")), np.asarray(picture(64, 1)))


class Watched:
    """A family that counts how many of its images are prepared at once."""

    def __init__(self, together: int):
        self.preprocessor = images.Preprocessor(least=4096, most=65536)
        self.barrier, self.threads = threading.Barrier(together, timeout=LONG), set()

    def prepare(self, image):
        self.threads.add(threading.get_ident())
        self.barrier.wait()
        return images.prepare(image, self.preprocessor)


def test_more_requests_at_once_than_threads_all_come_to_an_end():
    """No task of the shared pools waits for another of them."""
    p = images.Preprocessor(least=4096)
    family = SimpleNamespace(preprocessor=p, prepare=partial(images.prepare, preprocessor=p))
    requests = [sent(*(encoded(picture(96, 4 * i + j), "PNG") for j in range(4))) for i in range(12)]
    with ThreadPoolExecutor(12) as threads:
        each = [threads.submit(prepare, *request, family, Limits(), ImageCache()) for request in requests]
        assert all(len(request.result(LONG)) == 4 for request in each)


def sent(*pictures):
    known = {hashlib.sha256(data).hexdigest(): data for data in pictures}
    return [ImageRef(hashlib.sha256(data).hexdigest(), f"p{i}") for i, data in enumerate(pictures)], known


def test_new_images_are_prepared_side_by_side_and_come_in_order(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    refs, known = sent(*(encoded(picture(48 + 16 * i, i), "PNG") for i in range(4)))
    family = Watched(4)
    made = prepare(refs, known, family, Limits(), ImageCache())
    assert len(family.threads) == 4
    assert [(image.name, image.width) for image in made] == [("p0", 48), ("p1", 64), ("p2", 80), ("p3", 96)]


def test_the_same_image_twice_is_made_once():
    refs, known = sent(*[encoded(picture(64, 0), "PNG")] * 3, encoded(picture(64, 1), "PNG"))
    cache, p = ImageCache(), images.Preprocessor(least=4096)
    family = SimpleNamespace(preprocessor=p, prepare=partial(images.prepare, preprocessor=p))
    made = prepare(refs, known, family, Limits(), cache)
    assert cache.decodes == 2 and [image.name for image in made] == ["p0", "p1", "p2", "p3"]
    assert made[0].patches is made[2].patches


def test_of_several_damaged_images_the_first_is_named():
    whole = encoded(picture(64, 0), "PNG")
    refs, known = sent(whole, whole[:-2000], whole[:-1900])
    p = images.Preprocessor(least=4096)
    family = SimpleNamespace(preprocessor=p, prepare=partial(images.prepare, preprocessor=p))
    cache = ImageCache()
    for _ in range(3):
        with pytest.raises(Refusal, match="Image p1 is a damaged PNG"):
            prepare(refs, known, family, Limits(), cache)
    buffer = io.BytesIO()
    picture(64, 5).save(buffer, "GIF")
    refs, known = sent(whole, buffer.getvalue())
    with pytest.raises(Refusal, match="Image p1 is GIF"):
        prepare(refs, known, family, Limits(), cache)
