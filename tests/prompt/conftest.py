from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from PIL import Image

from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.families.qwen3_5 import images, positions
from tfmagic.engine.prompt import ImageCache, Limits, TextSide, build
from tfmagic.protocol import ImageRef, Message, Text


class Family:
    """The image side of a family, with options of one's own."""

    def __init__(self, image_token_id, **options):
        self.image_token_id = image_token_id
        self.preprocessor = images.Preprocessor(**{"least": 4096, "most": 65536, **options})
        self.prepared = 0

    def prepare(self, image):
        self.prepared += 1
        return images.prepare(image, self.preprocessor)

    def positions(self, ids, images):
        return positions.positions(ids, images, self.image_token_id)


class Desk:
    """Builds prompts from short descriptions: a str is text, bytes are an image."""

    def __init__(self, text, family):
        self.text, self.family, self.cache, self.limits = text, family, ImageCache(), Limits()
        self.sent: dict[str, bytes] = {}

    def turn(self, role, *parts):
        return Message(role, [self.ref(part) if isinstance(part, bytes) else Text(part) for part in parts])

    def ref(self, data, name="picture"):
        digest = hashlib.sha256(data).hexdigest()
        self.sent[digest] = data
        return ImageRef(digest, name)

    def build(self, *turns, encoded=None):
        messages = [self.turn(*turn) for turn in turns]
        return build(
            messages, self.sent if encoded is None else encoded, self.text, self.family, self.limits, self.cache
        )


def picture(width=40, height=30, mode="RGB", seed=0):
    rng = np.random.default_rng(seed)
    bands = len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(
        mode, (width, height), rng.integers(0, 256, width * height * bands, dtype=np.uint8).tobytes()
    )


def save(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def checkpoint():
    return Checkpoint(resolve(None))


@pytest.fixture(scope="session")
def text(checkpoint):
    return TextSide(checkpoint)


@pytest.fixture
def family(checkpoint):
    return Family(checkpoint.config["image_token_id"])


@pytest.fixture
def desk(text, family):
    return Desk(text, family)
