"""From token ids back to text, one id at a time and never a character too early."""

from __future__ import annotations

import codecs
from collections.abc import Callable


def byte_characters() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the rest for U+0100 onwards (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTES = byte_characters()


def token_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for; a token spelt otherwise is its own UTF-8."""
    values = [BYTES.get(character) for character in token]
    return token.encode() if None in values else bytes(values)


class Detokenizer:
    """One reply's decoder. The pieces and the flush together are the decoded text of all ids, special ones skipped."""

    def __init__(self, bytes_of: Callable[[int], bytes]):
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """The text that this id completes: "" for a special token and while a character lacks bytes."""
        return self._utf8.decode(self._bytes_of(id))

    def flush(self) -> str:
        """The end: U+FFFD for an unfinished character, else "". The decoder is then as new."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest
