"""Names for prompt prefixes: a real digest, chained over whole grains, and never trusted alone."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple


class Names(NamedTuple):
    """What a prompt's key is known by."""

    prefixes: list[bytes]
    """See `prefixes`."""
    whole: bytes
    """See `whole`."""


def prefixes(key: Sequence[int], grain: int) -> list[bytes]:
    """One 16-byte digest for each prefix of grain, 2 · grain, ... elements (signed 64-bit numbers), shortest first."""
    return named(key, grain).prefixes


def named(key: Sequence[int], grain: int) -> Names:
    """What `prefixes` and `whole` give, in one go over the key."""
    digests, running, rows = [], hashlib.blake2b(digest_size=16), memoryview(packed(key))
    for start in range(0, len(key) - grain + 1, grain):
        running.update(rows[8 * start : 8 * (start + grain)])
        digests.append(running.copy().digest())
    running.update(rows[8 * grain * len(digests) :])
    return Names(digests, running.digest())


def whole(key: Sequence[int]) -> bytes:
    """The digest of a prompt's whole key, 16 bytes."""
    return hashlib.blake2b(packed(key), digest_size=16).digest()


def packed(key: Sequence[int]) -> bytes:
    """Its elements as int64, little-endian."""
    return struct.pack(f"<{len(key)}q", *key)
