"""Pillow's own test pictures, a thousand odd and broken files: each becomes an image or a refusal, and soon."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import time
from collections import Counter

import pytest

from tfmagic.engine.prompt import ImageCache, Limits
from tfmagic.engine.prompt import images as pictures
from tfmagic.errors import Refusal
from tfmagic.protocol import ImageRef

from .conftest import Family

PILLOW = "13.0.0"
SECONDS = 20
"""Of the processor, so that a busy machine does not matter."""
TRIES = 4


@pytest.fixture(scope="module")
def suite(request):
    """The folder of the pictures, out of the source distribution on PyPI (47 MB; kept in pytest's cache)."""
    kept = request.config.cache.mkdir("pillow-suite")
    archive = kept / f"pillow-{PILLOW}.tar.gz"
    if not archive.is_file():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(kept)]
        for tries_left in reversed(range(TRIES)):  # a network may fail
            if subprocess.run([*pip, f"pillow=={PILLOW}"], check=not tries_left).returncode == 0:
                break
    folder = kept / f"pillow-{PILLOW}" / "Tests" / "images"
    if not folder.is_dir():
        with tarfile.open(archive) as tar:
            inside = [member for member in tar if "/Tests/images/" in member.name and member.isfile()]
            tar.extractall(kept, inside, filter="data")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_picture_is_an_image_or_a_refusal(suite, checkpoint, record_property):
    limits, outcomes = Limits(), Counter()
    for path in sorted(suite.rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        ref = ImageRef(hashlib.sha256(data).hexdigest(), path.name)
        family = Family(checkpoint.config["image_token_id"])
        started = time.process_time()
        try:
            (image,) = pictures.prepare([ref], {ref.digest: data}, family, limits, ImageCache())
            assert image.patches.shape == (image.tokens * 4, 1536)
            outcomes["read"] += 1
        except Refusal as refusal:
            assert "\n" not in refusal.problem + refusal.fix and path.name in refusal.problem
            outcomes[reason(refusal.problem)] += 1
        assert time.process_time() - started < SECONDS, path.name
    for name, count in outcomes.items():
        record_property(name, count)
    print(dict(outcomes.most_common()))
    assert outcomes["read"] > 400
    assert outcomes["animation"] > 40
    assert outcomes["damaged"] > 5
    assert sum(outcomes.values()) > 1000


def reason(problem: str) -> str:
    known = ("animation", "damaged", "PNG, JPEG and WebP are read", "empty", "pixels", "MiB")
    return next(word for word in known if word in problem)
