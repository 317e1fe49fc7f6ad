"""Images: limits before work, known ones by the digest of their bytes, prepared ones for the vision tower."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tfmagic.errors import Refusal
from tfmagic.protocol import ImageRef

from . import headers
from .decode import decode

if TYPE_CHECKING:
    from .build import Family

MIB = 1024 * 1024
THREADS = ThreadPoolExecutor(4, "content")
"""For digests beside other work: tasks that wait for no other."""


@dataclass(frozen=True)
class Limits:
    """What one request may hold, counted over the whole conversation."""

    messages: int = 1000
    text_bytes: int = MIB
    images: int = 4
    image_bytes: int = 10 * MIB
    request_bytes: int = 20 * MIB
    side: int = 8192
    """Pixels."""
    pixels: int = 16 * MIB
    total_pixels: int = 32 * MIB
    aspect: int = 200
    """Longer side / shorter side."""
    scans: int = 300
    """Of a progressive JPEG, usually about ten; each of many thousands would cost a pass over the whole picture."""
    image_tokens: int = 4096
    """Prompt rows of all images together."""


@dataclass(frozen=True)
class PreparedImage:
    """One image of a prompt, ready for the tower."""

    digest: str
    """SHA-256 (hex) of the encoded bytes."""
    name: str
    width: int
    height: int
    """Pixels, upright, before resizing."""
    start: int
    tokens: int
    """The prompt rows it fills: start, ... start + tokens - 1."""
    grid: tuple[int, int, int]
    """Patches: frames, rows, columns."""
    patches: torch.Tensor
    """float32 [frames * rows * columns, values a patch]."""
    content: bytes
    """SHA-256 over the preprocessor's fingerprint and the RGB picture: equal for two encodings of the same pixels."""
    encoded: int = 0
    """Bytes as submitted."""


class MissingImages(Refusal):
    """Images that are neither known nor among the bytes given: send them and build again."""

    def __init__(self, refs: Sequence[ImageRef]):
        names = ", ".join(ref.name for ref in refs)
        super().__init__(f"The bytes of {names} are not here.", "Send the image again.")
        self.digests = list(dict.fromkeys(ref.digest for ref in refs))


class ImageCache:
    """Prepared images by (digest, fingerprint), least recently used out first. Safe to use from several threads."""

    def __init__(self, budget: int = 256 * MIB):
        """`budget`: bytes of patches kept; an image over it is not kept."""
        self.budget, self.decodes = budget, 0
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, str], PreparedImage] = OrderedDict()
        self._making: dict[tuple[str, str], Future[PreparedImage]] = {}
        self._bytes = 0

    def get(self, key: tuple[str, str]) -> PreparedImage | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def prepare(self, key: tuple[str, str], make: Callable[[], PreparedImage]) -> PreparedImage:
        """The image of this key, made at most once however many threads ask. Raises what `make` raises.

        Where another thread's making is refused, this one's is tried: other bytes may have come under that name.
        """
        with self._lock:
            if key in self._kept:
                return self._kept[key]
            if running := self._making.get(key):
                mine = None
            else:
                mine = self._making[key] = Future()
                self.decodes += 1
        if mine is None:
            try:
                return running.result()
            except Refusal:
                return self.prepare(key, make)
        try:
            image = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            mine.set_exception(error)
            raise
        mine.set_result(image)
        with self._lock:
            del self._making[key]
            self._keep(key, image)
        return image

    def _keep(self, key: tuple[str, str], image: PreparedImage) -> None:
        self._kept[key] = image
        self._bytes += image.patches.nbytes
        while self._bytes > self.budget:
            _, gone = self._kept.popitem(last=False)
            self._bytes -= gone.patches.nbytes


KNOWN = ImageCache()
"""The process's own."""


class Header(NamedTuple):
    """What is known of an image before it is decoded."""

    format: str
    width: int
    height: int


def prepare(
    refs: Sequence[ImageRef], encoded: Mapping[str, bytes], family: Family, limits: Limits, cache: ImageCache
) -> list[PreparedImage]:
    """The images in the order of `refs`, their `start` still 0. Every limit is checked before the first is decoded;
    new ones are prepared side by side, in threads (Pillow, numpy and hashlib leave the interpreter's lock alone).

    Raises Refusal naming the image and the limit; MissingImages when bytes are needed.
    """
    refs = [ImageRef(ref.digest, shown(ref.name)) for ref in refs]
    if len(refs) > limits.images:
        fix = f"At most {limits.images} are read: leave some out, or start a new conversation."
        raise Refusal(f"The conversation has {len(refs)} images.", fix)
    fingerprint = family.preprocessor.fingerprint
    known = {ref.digest: cache.get((ref.digest, fingerprint)) for ref in refs}
    if missing := [ref for ref in refs if known[ref.digest] is None and ref.digest not in encoded]:
        raise MissingImages(missing)
    lengths = {digest: image.encoded if image else len(encoded[digest]) for digest, image in known.items()}
    check_bytes([(ref.name, lengths[ref.digest]) for ref in refs], limits)
    heads = [known[ref.digest] or header(encoded[ref.digest], ref, limits) for ref in refs]
    check_sizes([(ref.name, head.width, head.height) for ref, head in zip(refs, heads)], family, limits)
    several = sum(image is None for image in known.values()) > 1
    with ThreadPoolExecutor(min(len(refs), os.cpu_count() or 1)) if several else nullcontext() as threads:
        each = threads.map if threads else map
        return list(each(lambda ref, head: made(ref, head, encoded, family, cache), refs, heads))


def made(
    ref: ImageRef, head: Header | PreparedImage, encoded: Mapping[str, bytes], family: Family, cache: ImageCache
) -> PreparedImage:
    """The image under this name, decoded unless it is known."""
    if isinstance(head, Header):
        make = partial(prepared, encoded[ref.digest], ref, head, family)
        head = cache.prepare((ref.digest, family.preprocessor.fingerprint), make)
    return replace(head, name=ref.name)


def shown(name: str) -> str:
    """A name fit for one line, whatever it was."""
    printable = "".join(character if character.isprintable() else " " for character in name)
    return " ".join(printable.split())[:80] or "without a name"


def check_bytes(sizes: Sequence[tuple[str, int]], limits: Limits) -> None:
    for name, size in sizes:
        if size > limits.image_bytes:
            fix = f"At most {limits.image_bytes / MIB:g} MiB an image are read: make it smaller, or save it as JPEG."
            raise Refusal(f"Image {name} has {size / MIB:.1f} MiB.", fix)
    if (total := sum(size for _, size in sizes)) > limits.request_bytes:
        fix = f"At most {limits.request_bytes / MIB:g} MiB a request are read: make them smaller, or leave some out."
        raise Refusal(f"The images have {total / MIB:.1f} MiB together.", fix)


def header(data: bytes, ref: ImageRef, limits: Limits) -> Header:
    """Format and stored size, from magic bytes and header. Raises Refusal by name for what is not read."""
    format = headers.kind(data)
    if not data:
        raise Refusal(f"Image {ref.name} is empty.", "Check the file.")
    if format not in headers.READ:
        known = f"is {format}" if format else "is in no known image format"
        raise Refusal(f"Image {ref.name} {known}; PNG, JPEG and WebP are read.", "Save it as PNG.")
    size = headers.size(data, format)
    if size is None or 0 in size:
        raise Refusal(f"Image {ref.name} is a damaged {format}: its header gives no size.", "Save it again, as PNG.")
    if format == "JPEG" and (scans := data.count(b"\xff\xda")) > limits.scans:
        fix = f"At most {limits.scans} are read: save it again, as PNG."
        raise Refusal(f"Image {ref.name} is a progressive JPEG of {scans:,} scans.", fix)
    return Header(format, *size)


def check_sizes(sizes: Sequence[tuple[str, int, int]], family: Family, limits: Limits) -> None:
    """Sides, pixels, aspect and tokens; `sizes` holds (name, width, height)."""
    for name, width, height in sizes:
        shape = f"Image {name} is {width:,} x {height:,} pixels"
        if max(width, height) > limits.side:
            raise Refusal(f"{shape}.", f"At most {limits.side:,} a side are read: make it smaller.")
        if width * height > limits.pixels:
            fix = f"At most {limits.pixels / MIB:g} MP an image are read: make it smaller."
            raise Refusal(f"{shape}, {width * height / MIB:.1f} MP.", fix)
        if max(width, height) > limits.aspect * min(width, height):
            raise Refusal(f"{shape}.", f"One side may be at most {limits.aspect} times the other: crop it.")
    if (total := sum(width * height for _, width, height in sizes)) > limits.total_pixels:
        fix = f"At most {limits.total_pixels / MIB:g} MP a request are read: make them smaller, or leave some out."
        raise Refusal(f"The images have {total / MIB:.1f} MP together.", fix)
    if (tokens := sum(family.preprocessor.tokens(width, height) for _, width, height in sizes)) > limits.image_tokens:
        share = limits.image_tokens // len(sizes)
        side = next((s for s in range(limits.side, 0, -16) if family.preprocessor.tokens(s, s) <= share), 1)
        fix = f"At most {limits.image_tokens:,} are read: image.thumbnail(({side}, {side})) each, or leave some out."
        raise Refusal(f"The images take {tokens:,} tokens of the prompt.", fix)


def prepared(data: bytes, ref: ImageRef, head: Header, family: Family) -> PreparedImage:
    announced = THREADS.submit(check_digest, data, ref)
    try:
        pixels = np.asarray(decode(data, head.format, ref.name))
    finally:
        announced.result()  # whatever has become of them, other bytes are refused as such
    content = THREADS.submit(content_id, pixels, family.preprocessor.fingerprint)
    patches, grid, tokens = family.prepare(pixels)
    height, width, _ = pixels.shape
    return PreparedImage(ref.digest, ref.name, width, height, 0, tokens, grid, patches, content.result(), len(data))


def check_digest(data: bytes, ref: ImageRef) -> None:
    if hashlib.sha256(data).hexdigest() != ref.digest:
        raise Refusal(f"Image {ref.name} is not the one announced: its SHA-256 differs.", "Send it again.")


def content_id(pixels: np.ndarray, fingerprint: str) -> bytes:
    """SHA-256 over fingerprint, width and height (big-endian u32) and RGB bytes; pixels uint8 [height, width, 3]."""
    height, width, _ = pixels.shape
    digest = hashlib.sha256(fingerprint.encode() + b"\0" + width.to_bytes(4, "big") + height.to_bytes(4, "big"))
    digest.update(np.ascontiguousarray(pixels))
    return digest.digest()
