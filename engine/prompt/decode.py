"""From encoded bytes to upright RGB pixels, or a refusal: whatever the bytes are, nothing else comes out."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

from tfmagic.errors import Refusal

UPRIGHT = {
    2: [Image.Transpose.FLIP_LEFT_RIGHT],
    3: [Image.Transpose.ROTATE_180],
    4: [Image.Transpose.FLIP_TOP_BOTTOM],
    5: [Image.Transpose.TRANSPOSE],
    6: [Image.Transpose.ROTATE_270],
    7: [Image.Transpose.TRANSVERSE],
    8: [Image.Transpose.ROTATE_90],
}
"""EXIF orientation → what turns the stored picture upright."""


def decode(data: bytes, format: str, name: str) -> Image.Image:
    """The single picture in `data`, of a format in `headers.READ`, as RGB: upright, alpha over white.

    Raises Refusal for an animation and for anything that Pillow cannot read.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=[format])
        # A multi-picture JPEG (format MPO) is a camera's photo with a preview or a depth map behind it.
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            problem = f"Image {name} is an animation of {image.n_frames} frames."
            raise Refusal(problem, "Send one frame of it: image.seek(0) and image.convert('RGB').")
        image.load()
        return rgb(upright(image))
    except Refusal:
        raise
    except Exception as error:  # Pillow raises OSError, ValueError, SyntaxError, struct.error, ... by plugin
        cause = " ".join(str(error).split())[:160] or type(error).__name__
        cause = "its header is unreadable" if isinstance(error, UnidentifiedImageError) else cause
        raise Refusal(f"Image {name} is a damaged {format}: {cause}", "Save it again, as PNG or JPEG.") from None


def upright(image: Image.Image) -> Image.Image:
    """The picture turned as its EXIF orientation says; unreadable EXIF says nothing."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:
        return image
    for turn in UPRIGHT.get(orientation, ()) if isinstance(orientation, int) else ():
        image = image.transpose(turn)
    return image


def rgb(image: Image.Image) -> Image.Image:
    """RGB of any Pillow mode: 16-bit grey by its high byte, transparency over white."""
    if image.mode.startswith(("I", "F")):
        image = eight_bit(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255)), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def eight_bit(image: Image.Image) -> Image.Image:
    """L, or LA where one 16-bit grey is named as transparent."""
    deep = np.asarray(image)
    grey = Image.fromarray((np.clip(deep, 0, 65535).astype(np.uint16) >> 8).astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey.putalpha(Image.fromarray(np.where(deep == clear, 0, 255).astype(np.uint8)))
    return grey
