"""A second, independent drawer of the same kind of pictures, by Pillow: for evaluation and for demos.

    from tfmagic.engine.embedded.draw import draw
    draw([("circle", "red", 0.2, 0.3), ("square", "blue", 0.7, 0.6, "big")], size=(256, 192))

It shares no code, colours or textures with the painter that made the training pictures.
"""

import io
import math
import random

from PIL import Image, ImageChops, ImageDraw, ImageFilter

STYLES = ("plain", "smooth", "ink", "hatch", "photo")
PALETTE = {
    "red": (214, 30, 36),
    "orange": (247, 140, 20),
    "yellow": (250, 214, 50),
    "green": (42, 150, 66),
    "blue": (36, 92, 214),
    "purple": (122, 54, 164),
    "pink": (248, 140, 186),
    "brown": (118, 70, 34),
    "black": (16, 16, 18),
    "white": (250, 250, 248),
}
GROUNDS = (
    (236, 232, 222),
    (222, 230, 238),
    (196, 200, 188),
    (150, 156, 160),
    (108, 114, 122),
    (62, 66, 76),
    (206, 186, 196),
    (228, 236, 214),
    (172, 190, 204),
    (88, 84, 96),
)
SIZES = {"small": 0.08, "big": 0.152}  # radius over the mean of the short side and the geometric mean of both


def outline(kind, turn=0.0, points=48):
    """The corners of a unit shape, y down, turned by `turn` radians."""
    star = [((1.0, 0.42)[i % 2], i * math.pi / 5) for i in range(10)]
    corners = {
        "circle": [(math.cos(2 * math.pi * i / points), math.sin(2 * math.pi * i / points)) for i in range(points)],
        "square": [(-0.83, -0.83), (0.83, -0.83), (0.83, 0.83), (-0.83, 0.83)],
        "triangle": [(0, -1.0), (0.88, 0.55), (-0.88, 0.55)],
        "diamond": [(0, -1.1), (0.8, 0), (0, 1.1), (-0.8, 0)],
        "star": [(r * math.sin(a), -r * math.cos(a)) for r, a in star],
        "cross": [
            (-0.3, -0.95),
            (0.3, -0.95),
            (0.3, -0.3),
            (0.95, -0.3),
            (0.95, 0.3),
            (0.3, 0.3),
            (0.3, 0.95),
            (-0.3, 0.95),
            (-0.3, 0.3),
            (-0.95, 0.3),
            (-0.95, -0.3),
            (-0.3, -0.3),
        ],
    }[kind]
    cos, sin = math.cos(turn), math.sin(turn)
    return [(cos * x - sin * y, sin * x + cos * y) for x, y in corners]


def _scatter(points, amount, chance):
    """A line by an unsteady hand: every side in three pieces, their ends moved."""
    out = []
    for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1]):
        for t in (0, 1 / 3, 2 / 3):
            out.append((x0 + (x1 - x0) * t + chance.gauss(0, amount), y0 + (y1 - y0) * t + chance.gauss(0, amount)))
    return out


def _cloudy(size, colour, step, chance):
    """A photo-like ground: soft blotches of colour around `colour`."""
    width, height = (max(2, side // step) for side in size)
    blotches = Image.new("RGB", (width, height))
    blotches.putdata(
        [tuple(min(255, max(0, c + chance.randint(-26, 26))) for c in colour) for _ in range(width * height)]
    )
    return blotches.resize(size, Image.BICUBIC)


def _jpeg(image, quality):
    box = io.BytesIO()
    image.save(box, "JPEG", quality=quality)
    return Image.open(box).convert("RGB")


def _stripes(size, step, width):
    """A mask of diagonal stripes."""
    mask = Image.new("L", size, 0)
    pen = ImageDraw.Draw(mask)
    for x in range(-size[1], size[0], step):
        pen.line([(x, size[1]), (x + size[1], 0)], fill=255, width=width)
    return mask


def draw(shapes, size=(256, 192), style="smooth", background=None, seed=0):
    """Draw shapes, each `(kind, colour, x, y)` with x, y in 0..1; a fifth item may be "small", "big" or a radius.

    kind: circle, square, triangle, diamond, star, cross; colour: a name of PALETTE or (r, g, b); radius: pixels.
    style: one of STYLES; background: (r, g, b), by default a light one. -> PIL.Image, mode RGB.
    """
    if style not in STYLES:
        raise ValueError(f"no style {style!r}; there are {', '.join(STYLES)}")
    chance = random.Random(seed)
    zoom = {"plain": 1, "smooth": 4, "ink": 3, "hatch": 3, "photo": 2}[style]
    width, height = size[0] * zoom, size[1] * zoom
    ground = background or GROUNDS[0]
    image = (
        _cloudy((width, height), ground, 22 * zoom, chance)
        if style == "photo"
        else Image.new("RGB", (width, height), ground)
    )
    scale = 0.5 * (min(width, height) + math.sqrt(width * height))
    for kind, colour, x, y, *rest in shapes:
        wanted = rest[0] if rest else "big"
        radius = SIZES[wanted] * scale * chance.uniform(0.94, 1.06) if isinstance(wanted, str) else wanted * zoom
        points = [
            (x * width + radius * u, y * height + radius * v) for u, v in outline(kind, chance.uniform(-0.14, 0.14))
        ]
        _put(image, points, PALETTE[colour] if isinstance(colour, str) else tuple(colour), style, radius, zoom, chance)
    if zoom > 1:
        image = image.resize(size, Image.LANCZOS)
    return _jpeg(image, 60) if style in ("ink", "photo") else image


def _put(image, points, colour, style, radius, zoom, chance):
    """Draw one filled outline in `style`."""
    pen = ImageDraw.Draw(image)
    if style in ("ink", "hatch"):
        points = _scatter(points, 0.03 * radius, chance)
    if style == "photo":
        shadow = Image.new("L", image.size, 0)
        ImageDraw.Draw(shadow).polygon([(x + 0.12 * radius, y + 0.15 * radius) for x, y in points], fill=110)
        image.paste((0, 0, 0), mask=shadow.filter(ImageFilter.GaussianBlur(0.08 * radius + 1)))
    if style == "hatch":
        mask = Image.new("L", image.size, 0)
        ImageDraw.Draw(mask).polygon(points, fill=255)
        image.paste(colour, mask=ImageChops.multiply(mask, _stripes(image.size, 7 * zoom, 3 * zoom)))
        pen.line(points + points[:2], fill=colour, width=2 * zoom)
        return
    pen.polygon(points, fill=colour)
    if style == "ink":
        pen.line(points + points[:2], fill=(24, 24, 26), width=int(1.7 * zoom))


def shade(colour, chance):
    """A variation of a palette colour."""
    return tuple(min(255, max(0, c + chance.randint(-9, 9))) for c in PALETTE[colour])


def ground_for(colours, chance):
    """A background that every one of the colours stands out from."""
    far = [g for g in GROUNDS if all(sum((a - b) ** 2 for a, b in zip(g, c)) > 90**2 for c in colours)]
    return chance.choice(far or [(140, 140, 148)])
