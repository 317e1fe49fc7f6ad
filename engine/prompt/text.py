"""The text side of a checkpoint: its tokenizer and its chat template."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tfmagic.errors import Refusal
from tfmagic.protocol import ImageRef, Message, Text

from ..checkpoint import Checkpoint
from .detokenize import Detokenizer, token_bytes
from .shield import Shield, marker_pattern, spare_characters
from .template import ChatTemplate

NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Rendered(NamedTuple):
    ids: list[int]
    """One placeholder an image."""
    marks: list[int]
    """Rows at which prompts are likely to part: where the first turn starts, where the last user texts start."""


class TextSide:
    """Tokenizer, template and detokenizer of one checkpoint. Safe to use from several threads.

    Raises Refusal for a tokenizer or template that cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint):
        path = checkpoint.tokenizer_path
        try:
            source = path.read_text("utf-8")
            layout = json.loads(source)
            self.tokenizer = Tokenizer.from_str(source)
            self._plain = Tokenizer.from_str(json.dumps(layout | {"added_tokens": [], "post_processor": None}))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise Refusal(f"{path} is no tokenizer: {str(error)[:120]}", "Download the model again.") from None
        if (decoder := (layout.get("decoder") or {}).get("type")) != "ByteLevel":
            raise Refusal(f"{checkpoint.name}'s tokenizer decodes by {decoder}, which is not read yet.",
                          "Use a model with a byte-level tokenizer.")  # fmt: skip
        for tokenizer in (self.tokenizer, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        self._added = marker_pattern(token.content for token in added.values())
        self._special_markers = marker_pattern(added[id].content for id in self._special)
        self._bytes: dict[int, bytes] = {}
        named = {name: spelling(checkpoint.tokenizer_config.get(name)) for name in NAMED}
        self.template = ChatTemplate(checkpoint.template, {name: token for name, token in named.items() if token})

    def encode(self, text: str) -> list[int]:
        """The ids of raw text, in which a special token's spelling is that token."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens skipped."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.bytes_of)

    def bytes_of(self, id: int) -> bytes:
        """The bytes that this id adds to the text; none for a special token or an id without a token."""
        if id not in self._bytes:
            token = None if id in self._special else self.tokenizer.id_to_token(id)
            self._bytes[id] = b"" if token is None else token_bytes(token)
        return self._bytes[id]

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The conversation's ids with one placeholder an image. Raises Refusal as the template does."""
        return self.lay_out(messages).ids

    def lay_out(self, messages: Sequence[Message]) -> Rendered:
        """As `render`, with the marks."""
        said = "".join(part.text for message in messages for part in message.parts if isinstance(part, Text))
        spare = spare_characters(said + self.template.source)
        shield, probe = Shield(spare), next(spare)
        turns = [self._turn(message, shield) for message in messages]
        rendered = self.template.render([written(turn) for turn in turns])
        ids, ends = self._tokenise(rendered, shield)
        starts = self._starts(turns, rendered, probe)
        return Rendered(ids, sorted({bisect_right(ends, len(shield.uncover(rendered[:at]))) for at in starts}))

    def _turn(self, message: Message, shield: Shield) -> tuple[str, list[str | ImageRef]]:
        """Role and parts, adjacent texts joined and their quoted markers covered.

        A reply's own words may hold markers that the template reads, such as the end of its thinking; only
        special tokens are covered there.
        """
        markers = self._special_markers if message.role == "assistant" else self._added
        parts: list[str | ImageRef] = []
        for is_text, run in groupby(message.parts, lambda part: isinstance(part, Text)):
            if is_text:
                parts.append(shield.cover("".join(part.text for part in run), markers))
            else:
                parts += run
        return message.role, parts

    def _tokenise(self, rendered: str, shield: Shield) -> tuple[list[int], list[int]]:
        """Ids, and for each the place in the uncovered text at which it ends."""
        ids, ends, at = [], [], 0
        for covered, run in self._runs(rendered, shield):
            text = shield.uncover(run)
            encoding = (self._plain if covered else self.tokenizer).encode(text, add_special_tokens=False)
            ids += encoding.ids
            ends += [at + end for _, end in encoding.offsets]
            at += len(text)
        return ids, ends

    def _runs(self, rendered: str, shield: Shield) -> list[tuple[bool, str]]:
        """`rendered` cut at its real special tokens into runs that hold quoted markers and runs that hold none."""
        if self._added is None or not shield.covers(rendered):
            return [(False, rendered)]
        cuts = [at for match in self._added.finditer(rendered) for at in match.span()]
        pieces = [rendered[a:b] for a, b in zip([0, *cuts], [*cuts, len(rendered)])]
        return [(covered, "".join(run)) for covered, run in groupby(filter(None, pieces), shield.covers)]

    def _starts(self, turns: list[tuple[str, list]], rendered: str, probe: str) -> list[int]:
        """Places in `rendered` where the first turn after the system's starts and where the last turn's texts start.

        Found by rendering again with the probe character there, or behind leading space that the template trims;
        none if that changes anything else.
        """
        for put in (str.__add__, before_words):
            try:
                pieces = self.template.render([written(turn) for turn in probed(turns, probe, put)]).split(probe)
            except Refusal:
                return []
            if "".join(pieces) == rendered:
                return list(accumulate(map(len, pieces[:-1])))
        return []


def probed(turns: list[tuple[str, list]], probe: str, put: Callable[[str, str], str]) -> list[tuple[str, list]]:
    """The turns with the probe put into each text of the last and at the start of the first after the system's."""
    role, parts = turns[-1]
    probed = [*turns[:-1], (role, [put(probe, part) if isinstance(part, str) else part for part in parts])]
    first = next((i for i, (role, _) in enumerate(turns) if role != "system"), 0)
    role, parts = probed[first]
    text_first = bool(parts) and isinstance(parts[0], str)
    probed[first] = (role, [put(probe, parts[0]), *parts[1:]] if text_first else [probe, *parts])
    return probed


def before_words(probe: str, text: str) -> str:
    words = text.lstrip()
    return text[: len(text) - len(words)] + probe + words


def written(turn: tuple[str, list[str | ImageRef]]) -> dict[str, Any]:
    """A turn as templates expect it: plain text as one string, a turn with images as a list of parts."""
    role, parts = turn
    if all(isinstance(part, str) for part in parts):
        return {"role": role, "content": "".join(parts)}
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    return {"role": role, "content": content}


def spelling(token: Any) -> str | None:
    """A named special token of tokenizer_config.json, which is a string or an object with `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
