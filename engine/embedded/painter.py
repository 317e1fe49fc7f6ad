"""Draws scenes straight into vision patches, on the device that trains.

Shapes are signed distances, so a picture is a formula: nothing is drawn on the CPU and nothing but the
few numbers of a scene crosses the bus. Styles: plain, gradient, stripes, checkers; soft colour clouds with
grain, cast shadows, blur and 8x8 block noise (photo-like); outlines, hatched fills, wobbly edges, shading.
"""

import math

import torch

STAR = [(math.sin(2 * math.pi * i / 5), -math.cos(2 * math.pi * i / 5)) for i in range(5)]


def _hash(a, b, seed):
    """A number in 0..1 for a lattice point; a smooth-free hash, good enough for noise."""
    return torch.frac(torch.sin(a * 12.9898 + b * 78.233 + seed) * 43758.5453).abs()


def _clouds(x, y, period, seed):
    """Smooth noise in -1..1: a random lattice, blended linearly."""
    u, v = x / period, y / period
    i, j = u.floor(), v.floor()
    fu, fv = u - i, v - j
    top = _hash(i, j, seed) * (1 - fu) + _hash(i + 1, j, seed) * fu
    bottom = _hash(i, j + 1, seed) * (1 - fu) + _hash(i + 1, j + 1, seed) * fu
    return (top * (1 - fv) + bottom * fv) * 2 - 1


def _ground(b, x, y):
    """Background colours, three of [P, 256], from ground numbers b [P, G] at pixels x, y [P, 256]."""

    def f(i):
        return b[:, i : i + 1]

    along, across = x * f(7) + y * f(8), y * f(7) - x * f(8)

    def wave(z):
        return (torch.remainder(z / f(9), 1.0) - 0.5).abs() * 2

    mix = torch.where(
        f(6) == 0,
        torch.zeros_like(x),
        torch.where(
            f(6) == 1,
            (along / 320 + 0.5).clamp(0, 1),
            torch.where(f(6) == 2, (wave(along) > 0.5).float(), ((wave(along) > 0.5) == (wave(across) > 0.5)).float()),
        ),
    )
    return [f(i) + (f(i + 3) - f(i)) * mix + f(13) * _clouds(x, y, f(14), f(12) + 17 * i) for i in range(3)]


def _noise(b, x, y):
    """Grain and block noise over the whole picture, [P, 256]."""

    def f(i):
        return b[:, i : i + 1]

    grain = (_hash(x, y, f(12)) - 0.5) * f(10)
    bx, by = torch.floor(x / f(20)), torch.floor(y / f(20))
    fx, fy = torch.floor(_hash(bx, by, 3.0) * 4), torch.floor(_hash(bx, by, 5.0) * 4)
    wave = torch.cos(math.pi * fx * (x / f(20) - bx)) * torch.cos(math.pi * fy * (y / f(20) - by))
    return grain + f(19) * (_hash(bx, by, 7.0) * 2 - 1) * wave


def _distance(s, dx, dy):
    """Signed distance in pixels (about) to shapes s [P, N, S] at offsets dx, dy [P, N, 256]; negative inside."""

    def g(i):
        return s[:, :, i : i + 1]

    u = (g(4) * dx + g(5) * dy) / g(2).clamp(min=1e-3)
    v = (g(4) * dy - g(5) * dx) / g(3).clamp(min=1e-3)
    au, av, kind = u.abs(), v.abs(), g(6)
    most = torch.maximum(au, av)
    triangle = torch.maximum(torch.maximum(0.866 * au - 0.5 * v, v) - 0.5, -1.2 - v)
    edges = [u * a + v * c - 0.36 for a, c in STAR]  # a point of a star is outside at most one of five half planes
    first, second = edges[0], torch.full_like(u, -9.0)
    for edge in edges[1:]:
        second = torch.maximum(second, torch.minimum(first, edge))
        first = torch.maximum(first, edge)
    d = torch.where(
        kind == 1,
        (u * u + v * v).sqrt() - 1,
        torch.where(
            kind == 2,
            most - 0.84,
            torch.where(
                kind == 3,
                triangle,
                torch.where(
                    kind == 4,
                    (au * 1.25 + av * 0.9) * 0.75 - 0.75,
                    torch.where(kind == 5, second, torch.maximum(torch.minimum(au, av) - 0.30, most - 0.95)),
                ),
            ),
        ),
    )
    d = d + g(16) * (torch.sin(5 * u + g(17)) + torch.sin(6 * v + 2 * g(17))) * 0.5
    return torch.where(kind > 0, d * torch.minimum(g(2), g(3)), torch.full_like(d, 1e4))


def paint(shapes, grounds, picture, row, column):
    """Scenes as patches.

    shapes [n, 7, 20] f32: centre x y, radii x y, cos sin of the turn, kind (0: none), r g b, outline width,
        outline shade, hatch strength, hatch period, hatch angle, hatch duty, wobble, its phase, shading, its angle.
    grounds [n, 24] f32: two colours, pattern, cos sin, period, grain, blur, seed, clouds, their period, shadow
        strength, shadow x y, shadow softness, block noise, block size, contrast, lightness.
    picture, row, column [P]: which picture and which 16-pixel patch of it.
    -> [P, 768] f32 in -1..1, channel-major like the published processor's patches.
    """
    picture = picture.long()
    s, b = shapes[picture], grounds[picture]
    k = torch.arange(256, device=shapes.device)
    x = column[:, None].float() * 16 + (k % 16)[None].float() + 0.5
    y = row[:, None].float() * 16 + (k // 16)[None].float() + 0.5

    def f(i):
        return b[:, i : i + 1]

    def g(i):
        return s[:, :, i : i + 1]

    colour, noise = _ground(b, x, y), _noise(b, x, y)
    dx, dy = x[:, None] - g(0), y[:, None] - g(1)
    d = _distance(s, dx, dy)
    cast = _distance(s, dx - f(16)[:, None], dy - f(17)[:, None])
    blur = f(11)[:, None]
    cover = (0.5 - d / blur).clamp(0, 1)
    shadow = 1 - f(15)[:, None] * (0.5 - cast / (2 * f(18)[:, None] + blur)).clamp(0, 1)
    edge = torch.where(g(10) > 0, ((d + g(10)) / blur + 0.5).clamp(0, 1), torch.zeros_like(d))
    shade = (1 - edge * (1 - g(11))) * (
        1 + g(18) * (torch.cos(g(19)) * dx + torch.sin(g(19)) * dy) / g(2).clamp(min=1.0)
    )
    phase = torch.remainder((torch.cos(g(14)) * dx + torch.sin(g(14)) * dy) / g(13).clamp(min=1.0), 1.0)
    cover = cover * (1 - g(12) * (phase > g(15)).float() * (1 - edge) * (d < -1.5).float())
    for j in range(s.shape[1]):
        colour = [c * shadow[:, j] for c in colour]
        colour = [
            c + cover[:, j] * ((s[:, j, 7 + i : 8 + i] * shade[:, j]).clamp(0, 1) - c) for i, c in enumerate(colour)
        ]

    def contrast(c):
        return (c - 0.5) * f(21) + 0.5 + f(22) + noise

    return torch.cat([contrast(c) for c in colour], 1).clamp(0, 1) * 2 - 1
