"""What a cell hands in: its body with the fields filled, and images from the notebook's variables or from files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from . import template
from .template import FieldError, did_you_mean

Image = tuple[str, Any]
"""Its name and the thing itself; `pictures.encode` says what may be one."""


def prompt(body: str, images: list[str], raw: bool, names: Mapping[str, Any]) -> list[str | Image]:
    """Texts and images in order: the images of the flags, then the body; `raw`: no fields in it.

    The newline that ends a cell is not part of the body. Raises UsageError.
    """
    body = body.removesuffix("\n")
    parts: list[str | Image] = [image(given, names) for given in images]
    try:
        for piece in [body] if raw else template.split(body):
            part = filled(piece, names) if isinstance(piece, template.Field) else piece
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            elif part:
                parts.append(part)
    except FieldError as error:
        raise UsageError(f"%%tfold: {error}") from None
    if not any(isinstance(part, tuple) or part.strip() for part in parts):
        raise UsageError("%%tfold: the prompt is empty; write it into the cell's body")
    return parts


def filled(field: template.Field, names: Mapping[str, Any]) -> str | Image:
    """The text of a field's value, or the image that it is. Raises FieldError."""
    value = template.resolve(field, names)
    if template.is_image(value):
        return str(field), value
    if isinstance(value, bytes):
        raise FieldError(f"{field} holds bytes that are no image; decode them to text first")
    return str(value)


def image(given: str, names: Mapping[str, Any]) -> Image:
    """The image of `--image`: a variable's name, or a path of names, or a file. Raises UsageError."""
    if re.match(r"[a-z]+://", given):
        raise UsageError(f"%%tfold --image takes a variable or a file, not an address: {given}; download it first")
    value, file = variable(given, names), Path(given).expanduser()
    if value is not None and file.is_file():
        raise UsageError(f"%%tfold --image {given} is a variable and a file; write ./{given} for the file")
    if isinstance(value, str | os.PathLike):
        file = Path(value).expanduser()
        if not file.is_file():
            raise UsageError(f"%%tfold --image {given}: there is no file {value}")
    if value is None or isinstance(value, str | os.PathLike):
        if file.is_file():
            return file.name, file
        raise UsageError(f"%%tfold --image {given}: no such variable or file{did_you_mean(given, near(file, names))}")
    return given, value


def variable(given: str, names: Mapping[str, Any]) -> Any:
    """The value, or None: `cat.png` is a file unless there is a `cat` with a `png`."""
    if not re.fullmatch(template.PATH, given):
        return None
    try:
        return template.resolve(given, names)
    except FieldError:
        return None


def near(file: Path, names: Mapping[str, Any]) -> list[str]:
    """What else may have been meant: the pictures among the variables, and the folder's files."""
    pictures = [name for name, value in names.items() if template.is_image(value)]
    try:
        return pictures + [str(entry) for entry in sorted(file.parent.iterdir())[:1000] if entry.is_file()]
    except OSError:
        return pictures
