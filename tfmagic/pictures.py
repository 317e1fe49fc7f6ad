"""What may be given as an image, and its encoded bytes. PIL is imported only when something has to be encoded."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

from .errors import TfmagicError

LIMIT, TOTAL = 16 << 20, 48 << 20
"""Encoded bytes of one image, and of one prompt's images."""
ACCEPTED = "a path, encoded bytes, a PIL image, a numpy array, a matplotlib figure, or what shows itself as PNG"


def encode(source: Any, name: str | None = None) -> tuple[str, bytes]:
    """(name, encoded bytes) of a path, bytes, PIL.Image, array [H, W] or [H, W, 3|4] (uint8, or float 0 to 1), figure.

    Pixels are encoded as PNG, without loss. Raises TfmagicError for anything else and for more than `LIMIT` bytes.
    """
    found, data = _encoded(source)
    if not data:
        raise TfmagicError(f"The image {name or found} is empty.", "Give a PNG, JPEG, WebP or GIF file.")
    _check_size(name or found, len(data))
    return name or found, data


def _check_size(name: str, size: int) -> None:
    if size > LIMIT:
        raise TfmagicError(
            f"The image {name} has {size / 2**20:.1f} MiB encoded; the limit is {LIMIT >> 20} MiB.",
            "Make it smaller, or save it as JPEG.",
        )


def _encoded(source: Any) -> tuple[str, bytes]:
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        raise TfmagicError("Image addresses are not read yet.", "Download the picture, and give the file or its bytes.")
    if isinstance(source, str | os.PathLike):
        return _read(Path(source).expanduser())
    if isinstance(source, bytes | bytearray | memoryview):
        return "image", bytes(source)
    if _is(source, "PIL.Image", "Image"):
        return Path(getattr(source, "filename", "") or "image").name, _png(source)
    if _is(source, "numpy", "ndarray"):
        return "array", _png(_from_array(source))
    if _is(source, "matplotlib.figure", "Figure"):
        buffer = io.BytesIO()
        source.savefig(buffer, format="png")
        return "figure", buffer.getvalue()
    if callable(draw := getattr(source, "_repr_png_", None)) and not isinstance(source, type):
        data = draw()
        data = data[0] if isinstance(data, tuple) else data
        if isinstance(data, bytes):
            return type(source).__name__, data
    raise TfmagicError(f"A {type(source).__name__} is not an image.", f"Give {ACCEPTED}.")


def _read(path: Path) -> tuple[str, bytes]:
    try:
        _check_size(path.name, path.stat().st_size)
        return path.name, path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise TfmagicError(f"The image {path} cannot be read: {why}.", "Check the path.") from None


def _is(source: Any, module: str, name: str) -> bool:
    """Is it an instance of that class? Without importing the module: an instance means that it is loaded."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(source, cls)


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    lossless = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else image.convert("RGB")
    lossless.save(buffer, format="PNG", exif=image.getexif(), compress_level=1)
    return buffer.getvalue()


def _from_array(array: Any) -> Any:
    import numpy
    from PIL import Image

    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or not array.size:
        problem = f"An array of shape {tuple(array.shape)} is not an image."
        raise TfmagicError(problem, "Give [height, width] or [height, width, 3 or 4].")
    if array.dtype.kind == "f":
        if not (numpy.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise TfmagicError("The array's values are not within 0 to 1.", "Scale them, or convert to uint8.")
        array = numpy.rint(array.astype(numpy.float64) * 255).astype(numpy.uint8)
    elif array.dtype == bool:
        array = array.astype(numpy.uint8) * 255
    elif array.dtype != numpy.uint8:
        raise TfmagicError(f"An array of {array.dtype} is not an image.", "Convert it to uint8, or to float 0 to 1.")
    return Image.fromarray(numpy.ascontiguousarray(array))
