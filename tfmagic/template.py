"""The fields of a cell's body: `{{name}}` inserts a notebook variable, and nothing else is touched.

A field holds a name and steps into it (`.attribute`, `[3]`, `["key"]`): it looks values up and never evaluates code.
`{{{{` is two literal braces. A third brace in front of a field is text, so a JSON body may read `{"n": {{{n}}}}`.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

STEP = r"""\.[A-Za-z]\w*|\[\s*(?:-?\d+|"[^"\\\n]*"|'[^'\\\n]*')\s*\]"""
PATH = rf"(?:[^\W\d]\w*)(?:{STEP})*"
TOKEN = re.compile(
    r"(?P<escape>\{{4})"
    r"|(?P<brace>\{(?=\{\{(?!\{)))"
    rf"|\{{\{{\s*(?P<path>{PATH})\s*\}}\}}"
    r"|(?P<bad>\{\{)"
)


SIGNATURES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"BM")
"""How PNG, JPEG, GIF and BMP files begin."""


class FieldError(ValueError):
    """A field that cannot be filled; the message is one line and names the fix."""


class Field(str):
    """The path that a field names, such as `df.shape` or `row["x"]`."""


def split(body: str) -> list[str | Field]:
    """Cut a body into text and fields, in order; text parts are never empty and never adjacent.

    A body without `{{` comes back whole. Raises FieldError for a `{{` that opens no field.
    """
    parts: list[str | Field] = []
    text, end = [], 0
    for match in TOKEN.finditer(body):
        text.append(body[end : match.start()])
        end = match.end()
        if match["bad"]:
            raise FieldError(_malformed(body[match.start() :]))
        if match["path"] is None:
            text.append("{{" if match["escape"] else "{")
            continue
        parts += [*_joined(text), Field(match["path"])]
        text = []
    return parts + _joined([*text, body[end:]])


def resolve(path: str, names: Mapping[str, Any]) -> Any:
    """The value of `name`, `name.attribute`, `name[3]`, `name["key"]` and chains of them.

    Raises FieldError when a name or a step is missing.
    """
    root = re.match(r"\w+", path)[0]
    if root not in names:
        raise FieldError(f"{root} is not defined{did_you_mean(root, visible(names))}")
    value, seen = names[root], root
    for step in re.findall(STEP, path):
        try:
            value = getattr(value, step[1:]) if step[0] == "." else value[ast.literal_eval(step[1:-1].strip())]
        except Exception as error:
            raise FieldError(f"{seen} has no {step}{did_you_mean(_plain(step), _steps(value, step))}") from error
        seen += step
    return value


def is_image(value: Any) -> bool:
    """Whether a notebook's value is a picture: a PIL image, a matplotlib figure, encoded bytes, or an array of pixels.

    Looks at names only, so that neither PIL nor numpy nor matplotlib is imported.
    """
    if isinstance(value, bytes):
        return value.startswith(SIGNATURES) or value[8:12] == b"WEBP"
    kinds = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(value).__mro__}
    if ("numpy", "ndarray") in kinds:
        pixels = str(value.dtype) == "uint8" or (value.dtype.kind == "f" and value.ndim == 3)
        return pixels and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4)))
    return not kinds.isdisjoint({("PIL", "Image"), ("matplotlib", "Figure")})


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean a or b?`, or nothing."""
    near = difflib.get_close_matches(word, [str(name) for name in known], n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def visible(names: Mapping[str, Any]) -> list[str]:
    """The names a person made: no underscore in front, no module of ours or of IPython's."""
    return [name for name in names if not name.startswith("_") and name not in ("In", "Out", "exit", "quit")]


def _joined(text: list[str]) -> list[str]:
    whole = "".join(text)
    return [whole] if whole else []


def _plain(step: str) -> str:
    return step.strip(".[]\"' ")


def _steps(value: Any, step: str) -> list[str]:
    if step[0] == ".":
        return [name for name in dir(value) if not name.startswith("_")]
    return list(value) if isinstance(value, Mapping) else []


def _malformed(rest: str) -> str:
    line = rest.splitlines()[0]
    shown = line[: line.find("}}") + 2] if "}}" in line else line
    shown = shown if len(shown) <= 40 else shown[:39] + "…"
    return (
        f"{shown} is not a field: a field is {{{{name}}}}, with .attribute or [index]; "
        "write {{{{ for two braces, or use --raw"
    )
