"""What an image file says of itself in its first bytes: format and size, read before anything is decoded."""

from __future__ import annotations

import re
import struct

READ = ("PNG", "JPEG", "WEBP")

MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"GIF8", "GIF"), (b"BM", "BMP"),
    (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"II+\0", "TIFF"), (b"MM\0+", "TIFF"), (b"%PDF", "PDF"),
    (b"\0\0\1\0", "ICO"), (b"8BPS", "PSD"), (b"\xff\x0a", "JPEG XL"), (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"), (b"\xff\x4f\xff\x51", "JPEG 2000"), (b"qoif", "QOI"), (b"DDS ", "DDS"),
    (b"P1", "PNM"), (b"P2", "PNM"), (b"P3", "PNM"), (b"P4", "PNM"), (b"P5", "PNM"), (b"P6", "PNM"),
    (b"v/1\x01", "EXR"), (b"PK\x03\x04", "ZIP"), (b"\x1f\x8b", "gzip"),
)  # fmt: skip
BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC", b"msf1": "HEIC"}

MARKER = re.compile(rb"\xff([^\xff])")
"""Of a JPEG segment; any fill bytes stand before it."""
MAX_SEGMENTS = 10_000
"""Of a JPEG before its frame."""


def kind(data: bytes) -> str | None:
    """The format's name by magic bytes; None when they say nothing."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        return BRANDS.get(data[8:12], "MP4")
    for magic, name in MAGIC:
        if data.startswith(magic):
            return name
    text = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<svg", b"<?xml")) and b"<svg" in text:
        return "SVG"
    return "HTML" if text.startswith((b"<!doctype html", b"<html")) else None


def size(data: bytes, format: str) -> tuple[int, int] | None:
    """Width and height in pixels as stored, of a format in READ; None when the header does not give them."""
    try:
        return {"PNG": png_size, "JPEG": jpeg_size, "WEBP": webp_size}[format](data)
    except (struct.error, IndexError):
        return None


def png_size(data: bytes) -> tuple[int, int] | None:
    return struct.unpack_from(">II", data, 16) if data[12:16] == b"IHDR" else None


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Of the first start-of-frame segment; bytes between segments are passed over, as decoders do."""
    at = 2
    for _ in range(MAX_SEGMENTS):
        found = MARKER.search(data, at)
        if found is None or found[1] in b"\xd9\xda":  # the data or the end, and no frame yet
            return None
        marker, at = found[1][0], found.end() - 2
        if marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD7:  # without a length
            at += 2
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        else:
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None


def webp_size(data: bytes) -> tuple[int, int] | None:
    chunk = data[12:16]
    if chunk == b"VP8X":
        wide, high = (int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        return (wide + 1, high + 1) if len(data) >= 30 else None
    if chunk == b"VP8L" and data[20] == 0x2F:
        bits = struct.unpack_from("<I", data, 21)[0]
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        wide, high = struct.unpack_from("<HH", data, 26)
        return wide & 0x3FFF, high & 0x3FFF
    return None
