"""Seeded scenes: up to seven shapes on a background, as objects and as the numbers the painter needs.

A scene is what a picture shows; `painter` turns its two arrays into pixels on the GPU, `draw` (Pillow)
draws the same kind of scene for evaluation and for people. Lengths are pixels, y points down.
"""

import colorsys
import math
from dataclasses import dataclass, field

import numpy as np

from .words import pick

KINDS = ("circle", "square", "triangle", "diamond", "star", "cross")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
HSV = {  # hue, saturation and value ranges, all in 0..1 (hue may be negative: it wraps)
    "red": ((-0.02, 0.015), (0.78, 1.0), (0.72, 1.0)),
    "orange": ((0.06, 0.11), (0.85, 1.0), (0.92, 1.0)),
    "yellow": ((0.13, 0.172), (0.66, 1.0), (0.9, 1.0)),
    "green": ((0.28, 0.43), (0.5, 1.0), (0.36, 1.0)),
    "blue": ((0.57, 0.67), (0.66, 1.0), (0.45, 1.0)),
    "purple": ((0.74, 0.84), (0.48, 1.0), (0.38, 0.74)),
    "pink": ((0.88, 0.98), (0.22, 0.55), (0.93, 1.0)),
    "brown": ((0.0, 0.11), (0.55, 0.84), (0.3, 0.64)),
    "black": ((0.0, 1.0), (0.0, 0.35), (0.0, 0.14)),
    "white": ((0.0, 1.0), (0.0, 0.05), (0.94, 1.0)),
}
MOST = 7  # shapes in a picture
TILE = 32  # pixels on a side of one image token
LEAST_TOKENS, MOST_TOKENS = 25, 100  # image tokens after the preprocessor's resize
SHAPE_FIELDS, GROUND_FIELDS = 20, 24


@dataclass
class Shape:
    """One drawn shape; x and y in 0..1 of the picture's width and height."""

    kind: str
    colour: str
    big: bool
    x: float
    y: float


@dataclass
class Scene:
    """A picture of `columns` x `rows` image tokens (32 pixels each)."""

    columns: int
    rows: int
    shapes: list
    shape_numbers: np.ndarray = field(repr=False)  # [MOST, SHAPE_FIELDS] f32, see painter.paint
    ground_numbers: np.ndarray = field(repr=False)  # [GROUND_FIELDS] f32

    @property
    def tokens(self):
        return self.columns * self.rows


def grids(most=MOST_TOKENS, least=LEAST_TOKENS):
    """All (columns, rows) with an allowed token count and a side ratio of at most 4.2."""
    pairs = [(c, r) for c in range(2, 22) for r in range(2, 22)]
    return [(c, r) for c, r in pairs if least <= c * r <= most and max(c, r) <= 4.2 * min(c, r)]


def rgb(draw, colour):
    """A shade of `colour` as three numbers in 0..1."""
    h, s, v = (low + (high - low) * draw.random() for low, high in HSV[colour])
    return colorsys.hsv_to_rgb(h % 1, s, v)


def _palette(draw):
    """What may occur in one scene: a function drawing (kind, colour). Few kinds make counts above one."""
    u = draw.random()
    if u < 0.35:
        return lambda: (pick(draw, KINDS), pick(draw, COLOURS))
    kinds = draw.sample(KINDS, 1 + int(draw.random() * 3))
    colours = draw.sample(COLOURS, 1 + int(draw.random() * 3))
    if u < 0.75:
        return lambda: (pick(draw, kinds), pick(draw, colours))
    main = kinds[0], colours[0]
    return lambda: main if draw.random() < 0.6 else (pick(draw, KINDS), pick(draw, COLOURS))


def _place(draw, width, height, radius, placed, line):
    """A free centre for a disc of `radius`, or None. `line`: (axis, pixels) that the centre keeps to."""
    edge = radius + 2
    if width <= 2 * edge or height <= 2 * edge:
        return None
    for _ in range(30):
        spot = [edge + (width - 2 * edge) * draw.random(), edge + (height - 2 * edge) * draw.random()]
        if line:
            axis, at = line
            side = (width, height)[axis]
            spot[axis] = min(max(at + 0.02 * side * (draw.random() - 0.5), edge), side - edge)
        if all((x - spot[0]) ** 2 + (y - spot[1]) ** 2 >= ((radius + q) * 1.12 + 2) ** 2 for x, y, q in placed):
            return spot
    return None


def _shape_row(draw, scale, kind, colour, spot, radius):
    """The painter's numbers of one shape (fields as listed in painter.paint)."""
    turn = (draw.random() - 0.5) * {"square": 0.35, "diamond": 0.35, "triangle": 0.4, "cross": 0.36, "star": 1.26}.get(
        kind, 0.6
    )
    outline = 0.0 if draw.random() < 0.65 else (1 + 2 * draw.random()) * scale / 160
    dark = draw.random() * 0.5 if draw.random() < 0.8 else 1 + 0.5 * draw.random()
    pattern = 0.0 if draw.random() < 0.78 else 0.25 + 0.75 * draw.random()
    period = 2.5 + 7.5 * draw.random()
    wobble = 0.0 if draw.random() < 0.6 else 0.07 * draw.random()
    shade = 0.0 if draw.random() < 0.6 else 0.35 * (draw.random() - 0.5)
    row = (
        *spot,
        radius * (1 + 0.1 * (draw.random() - 0.5)),
        radius * (1 + 0.1 * (draw.random() - 0.5)),
        math.cos(turn),
        math.sin(turn),
        KINDS.index(kind) + 1,
        *colour,
        outline,
        dark,
        pattern,
        period,
        draw.random() * 6.283,
        0.35 + 0.3 * draw.random(),
        wobble,
        draw.random() * 6.283,
        shade,
        draw.random() * 6.283,
    )
    return row


def _ground(draw, scale, colours):
    """The painter's numbers of the background, its colours far enough from those of the shapes."""
    photo = draw.random() < 0.4
    clouds = 0.02 + 0.16 * draw.random() if photo else 0.0
    apart = (0.3 + 0.6 * clouds) ** 2
    for _ in range(24):
        u = draw.random()
        if u < 0.5:
            saturation, value = 0.25 * draw.random(), 0.8 + 0.2 * draw.random()
        elif u < 0.75:
            saturation, value = 0.35 * draw.random(), 0.35 + 0.35 * draw.random()
        else:
            saturation, value = 0.1 + 0.5 * draw.random(), 0.1 + 0.22 * draw.random()
        first = colorsys.hsv_to_rgb(draw.random(), saturation, value)
        change = (0.1 if draw.random() < 0.7 else 0.25) * (draw.random() - 0.5)
        second = tuple(min(1, max(0, c + change + 0.04 * (draw.random() - 0.5))) for c in first)
        if all(sum((a - b) ** 2 for a, b in zip(ground, c)) > apart for ground in (first, second) for c in colours):
            break
    else:
        first = second = (0.55, 0.55, 0.58)
    angle = draw.random() * 6.283
    grain = 0.0 if draw.random() < 0.4 else 0.08 * draw.random()
    shadow = 0.25 + 0.5 * draw.random() if draw.random() < (0.6 if photo else 0.08) else 0.0
    blocks = 0.0 if draw.random() < 0.5 else 0.06 * draw.random() ** 2
    blur = 0.6 + 0.9 * draw.random() if draw.random() < 0.65 else 0.2 + 3.2 * draw.random()
    numbers = (
        *first,
        *second,
        int(draw.random() * 4),
        math.cos(angle),
        math.sin(angle),
        8 + 40 * draw.random(),
        grain,
        blur,
        draw.random() * 100,
        clouds,
        10 + 50 * draw.random(),
        shadow,
        0.05 * scale * (draw.random() - 0.3),
        0.05 * scale * draw.random() + 1,
        1 + 5 * draw.random(),
        blocks,
        8 * (1 + 1.5 * draw.random()),
        0.9 + 0.2 * draw.random(),
        0.08 * (draw.random() - 0.5),
        0,
    )
    return np.array(numbers, np.float32)


_SIZES = {}


def random_scene(draw, most_tokens=MOST_TOKENS, sizes=None):
    """A new scene; small pictures are drawn more often than large ones."""
    if sizes is None:
        if most_tokens not in _SIZES:
            _SIZES[most_tokens] = grids(most_tokens)
        sizes = _SIZES[most_tokens]
    columns, rows = draw.choices(sizes, [(c * r) ** -0.8 for c, r in sizes])[0] if len(sizes) > 1 else sizes[0]
    width, height = columns * TILE, rows * TILE
    scale = 0.5 * (min(width, height) + math.sqrt(width * height))
    wanted = 0 if draw.random() < 0.02 else draw.choices(range(1, MOST + 1), (2, 2.2, 2.4, 2.4, 2.2, 2, 2))[0]
    what = _palette(draw)
    line = None
    if draw.random() < 0.15:
        axis = int(draw.random() * 2)
        line = axis, (0.2 + 0.6 * draw.random()) * (width, height)[axis]
    shapes, placed, numbers, colours = [], [], np.zeros((MOST, SHAPE_FIELDS), np.float32), []
    for index in range(wanted):
        kind, colour = what()
        big = draw.random() < 0.5
        radius = scale * ((0.135 + 0.035 * draw.random()) if big else (0.07 + 0.02 * draw.random()))
        keep = line if line and (index < 2 or draw.random() < 0.6) else None
        spot = _place(draw, width, height, radius, placed, keep)
        if spot is None:
            continue
        shade = rgb(draw, colour)
        numbers[len(shapes)] = _shape_row(draw, scale, kind, shade, spot, radius)
        placed.append((*spot, radius))
        colours.append(shade)
        shapes.append(Shape(kind, colour, big, spot[0] / width, spot[1] / height))
    return Scene(columns, rows, shapes, numbers, _ground(draw, scale, colours))
