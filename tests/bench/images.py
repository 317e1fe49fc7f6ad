"""Pictures from encoded bytes to patches: `python -m tests.bench.images [SIDE] [PICTURES] [PAIRS]`.

Before: one after another, the patches gathered value by value. After: what the engine does. Order A-B-B-A, medians;
the patches must be the same bits, or nothing is printed but the difference. Then what each step of one picture takes.
"""

from __future__ import annotations

import hashlib
import io
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from tfmagic.engine.families.qwen3_5 import images
from tfmagic.engine.prompt.decode import decode
from tfmagic.engine.prompt.images import ImageCache, Limits, content_id, prepare
from tfmagic.protocol import ImageRef

ROOM = Limits(images=64, request_bytes=1 << 30, total_pixels=1 << 30, image_tokens=1 << 20)


def plain(image: Image.Image, p: images.Preprocessor) -> torch.Tensor:
    """The patches of `images.prepare`, gathered value by value from a table of the 256 levels of each colour."""
    wide, high = p.resized(*image.size)
    pixels = np.asarray(image.resize((wide, high), Image.Resampling.BICUBIC))
    gh, gw, m = high // p.patch, wide // p.patch, p.merge
    cells = pixels.reshape(gh // m, m, p.patch, gw // m, m, p.patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    scaled = (np.arange(256) * p.scale).astype(np.float32)
    levels = (scaled - np.array(p.mean, np.float32)[:, None]) / np.array(p.std, np.float32)[:, None]
    x = levels[np.arange(3)[:, None, None], cells]
    x = np.repeat(x[:, :, :, :, :, None], p.frames, axis=5)
    return torch.from_numpy(x.reshape(gh * gw, -1))


def picture(side: int, seed: int) -> Image.Image:
    """Waves with some noise: a photograph's work for the decoders, about."""
    y, x = np.mgrid[0:side, 0:side]
    waves = [np.sin(x / (31 + seed)) * 60 + np.cos(y / 53) * 60 + 128, x * y / 4096 % 256, (x + seed * y) % 256]
    noise = np.random.default_rng(seed).normal(0, 6, (side, side, 3))
    return Image.fromarray((np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **({} if format == "PNG" else {"quality": 90}))
    return file.getvalue()


def before(pictures: dict[str, bytes], format: str, p: images.Preprocessor) -> list[torch.Tensor]:
    out = []
    for digest, data in pictures.items():
        assert hashlib.sha256(data).hexdigest() == digest
        image = decode(data, format, digest)
        out.append(plain(image, p))
        content_id(np.asarray(image), p.fingerprint)
    return out


def after(pictures: dict[str, bytes], p: images.Preprocessor) -> list[torch.Tensor]:
    family = SimpleNamespace(preprocessor=p, prepare=partial(images.prepare, preprocessor=p))
    refs = [ImageRef(digest, digest[:8]) for digest in pictures]
    return [image.patches for image in prepare(refs, pictures, family, ROOM, ImageCache(0))]


def timed(do: Callable) -> tuple[float, object]:
    began = time.perf_counter()
    made = do()
    return 1e3 * (time.perf_counter() - began), made


def main(side: int = 1024, pictures: int = 4, pairs: int = 5) -> None:
    p = images.Preprocessor(most=4096 * 1024)
    cores = len(os.sched_getaffinity(0))
    print(f"{pictures} pictures of {side:,} x {side:,}, {cores} processors, {4 * pairs} runs a line; ms, and of CPU")
    for format in ("PNG", "JPEG", "WEBP"):
        made = [encoded(picture(side, seed), format) for seed in range(pictures)]
        known = {hashlib.sha256(data).hexdigest(): data for data in made}
        a, b = partial(before, known, format, p), partial(after, known, p)
        if not all(torch.equal(x, y) for x, y in zip(a(), b(), strict=True)):
            sys.exit(f"{format}: the patches differ")
        times = {a: [], b: []}
        for way in (a, b, b, a) * pairs:
            cpu = time.process_time()
            wall = timed(way)[0]
            times[way].append((wall, 1e3 * (time.process_time() - cpu)))
        (old, old_cpu), (new, new_cpu) = (map(statistics.median, zip(*times[way])) for way in (a, b))
        best = min(times[b])[0]
        print(f"{format:5s} before {old:6.1f} ({old_cpu:.0f}), after {new:6.1f} ({new_cpu:.0f}), {best:.1f} at best")
    steps(picture(side, 0), p)


def steps(image: Image.Image, p: images.Preprocessor) -> None:
    """The best of several runs of each step of one picture."""
    data = {format: encoded(image, format) for format in ("PNG", "JPEG", "WEBP")}
    wide, high = p.resized(*image.size)
    pixels, odd = np.asarray(image), np.asarray(image.resize((wide - 20, high - 10)))
    cut = images.squares(pixels.transpose(2, 0, 1), p.patch, p.merge)
    patches = np.empty((len(cut), 3, p.frames, p.patch**2), np.float32)
    for name, do in {
        **{f"decode {format}": partial(decode, data[format], format, "") for format in data},
        "digest of the PNG": lambda: hashlib.sha256(data["PNG"]).hexdigest(),
        "pixels out of Pillow": lambda: np.asarray(image),
        "resize one colour": lambda: images.resized(odd[..., 0], wide, high),
        "cut into patches": lambda: images.squares(pixels.transpose(2, 0, 1), p.patch, p.merge),
        "normalise": lambda: images.normalise(cut, p, patches),
        "content id": lambda: content_id(pixels, ""),
        "patches, before": lambda: plain(image, p),
        "patches, in threads": lambda: images.prepare(pixels, p),
        "of another size": lambda: images.prepare(odd, p),
    }.items():
        print(f"  {name:22s} {min(timed(do)[0] for _ in range(9)):6.2f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
