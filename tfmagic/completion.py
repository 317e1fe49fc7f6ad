"""Tab in `%tfold` and `%%tfold`: flags, their values, subcommands, and the names inside `{{`.

Driven by the argument tables. It looks at the notebook's variables, the file system and what the engine told last, and
never asks the engine anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from .arguments import CELL, COMMANDS, SWEPT, Table
from .template import FieldError, is_image, resolve, visible

LINE = re.compile(r"^\s*(?:\w+\s*=\s*)?%tfold\s+(.*)$")
FIELD = re.compile(r"\{\{\s*([\w.]*)$")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
MOST = 200
"""Names offered at most."""


class Known(NamedTuple):
    """What Tab may offer beside the tables."""

    names: Mapping[str, Any] = {}
    runs: Iterable[str] = ()
    chats: Iterable[str] = ()


class Offer(NamedTuple):
    """The words that go on from `typed`, the part of the line that they replace."""

    typed: str
    words: list[str]
    kind: str


def matcher(magics):
    """An IPython matcher (API v2) for this instance of the magics."""

    @context_matcher(identifier="tfmagic")
    def tfold_matcher(context: CompletionContext) -> SimpleMatcherResult:
        known = Known(magics.shell.user_ns, magics.runs, magics.chats)
        offer = offers(context.full_text, context.cursor_line, context.text_until_cursor, known)
        if offer is None:
            return SimpleMatcherResult(completions=[])
        # IPython cuts its token at characters such as `=`, so an offer replaces only the part that is in the token.
        replaced = offer.typed if context.token.endswith(offer.typed) else context.token
        skip = len(offer.typed) - len(replaced)
        completions = [SimpleCompletion(text=word[skip:], type=offer.kind) for word in offer.words]
        return SimpleMatcherResult(completions=completions, matched_fragment=replaced, suppress=True, ordered=True)

    return tfold_matcher


def offers(text: str, line: int, before: str, known: Known) -> Offer | None:
    """What Tab offers in a cell of this text: at `line` (from 0), `before` being that line up to the cursor.

    None: the place is not ours.
    """
    first = text.partition("\n")[0]
    if first.startswith("%%tfold"):
        if line == 0:
            return _flags(CELL, before[len("%%tfold") :], known) if before[len("%%tfold") :][:1] == " " else None
        return None if re.search(r"\s--raw\b", first) else _field(before, known)
    if match := LINE.match(before):
        command, space, rest = match[1].partition(" ")
        if not space:
            return _offer(command, COMMANDS, "subcommand")
        if command in COMMANDS:
            return _flags(COMMANDS[command], rest, known)
    return None


def _flags(table: Table, before: str, known: Known) -> Offer | None:
    """Within the words of a magic's line."""
    *given, typed = re.split(r"\s+", before.lstrip())
    options = {name: action for action in table.flags() for name in action.option_strings}
    if typed.startswith("-"):
        name, equals, value = typed.partition("=")
        if equals:
            return _values(options.get(name), value, known)
        once = {name for name, action in options.items() if name in given and not isinstance(action.default, list)}
        return _offer(typed, [name for name in options if name not in once], "flag")
    if given and given[-1] in options and options[given[-1]].nargs != 0:
        return _values(options[given[-1]], typed, known)
    positional = next((action for action in table._actions if not action.option_strings), None)
    if positional is not None and (typed or positional.complete == "run"):
        return _values(positional, typed, known)
    return _offer(typed, options, "flag")


def _values(action, typed: str, known: Known) -> Offer | None:
    kind = getattr(action, "complete", None)
    if isinstance(kind, tuple):
        return _offer(typed, kind, "value")
    if kind == "variable":
        return _offer(typed, visible(known.names), "variable")
    if kind == "image":
        pictures = [name for name in visible(known.names) if is_image(known.names[name])]
        return _offer(typed, [*pictures, *_paths(typed, PICTURES)], "image")
    if kind == "sweep":
        return _offer(typed, [name.replace("_", "-") + "=" for name in SWEPT], "value")
    if kind in ("model", "drafter"):
        return _offer(typed, [*["none"] * (kind == "drafter"), *_paths(typed, ())], "path")
    return _offer(typed, {"run": known.runs, "chat": known.chats}.get(kind, ()), kind or "value")


def _field(before: str, known: Known) -> Offer | None:
    """Within the body: the names, or the attributes, after `{{`."""
    match = FIELD.search(before)
    if match is None:
        return None
    path, dot, _ = match[1].rpartition(".")
    if not dot:
        return _offer(match[1], visible(known.names), "variable")
    try:
        value = resolve(path, known.names)
    except FieldError:
        return None
    return _offer(match[1], [f"{path}.{name}" for name in dir(value) if not name.startswith("_")], "attribute")


def _paths(typed: str, endings: tuple[str, ...]) -> list[str]:
    """Folders and files that go on from `typed`; `endings`: only such files, none: only folders."""
    folder, slash, start = typed.rpartition("/")
    try:
        entries = sorted(Path(folder + slash or ".").expanduser().iterdir())
    except OSError:
        return []
    found = [entry for entry in entries if entry.name.startswith(start) and (start or not entry.name.startswith("."))]
    return [
        f"{folder}{slash}{entry.name}" + ("/" if entry.is_dir() else "")
        for entry in found[:MOST]
        if entry.is_dir() or entry.suffix.lower() in endings
    ]


def _offer(typed: str, words: Iterable[str], kind: str) -> Offer:
    return Offer(typed, [word for word in words if word.startswith(typed)][:MOST], kind)
