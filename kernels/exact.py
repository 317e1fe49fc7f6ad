"""Sums that no order can change: the ground of the row law.

A float64 holds every integer up to 2^53. Put the factors of a sum of K products on grids of `a` and `b` bits with
a + b + ceil(log2 K) <= 53: every product and every partial sum is then an integer below 2^53 times one power of two, so
every addition is exact. An exact sum has one value. Whatever library, tile, vector width, thread count, fused
multiply-add or machine computes it, and however many rows share the call, the bits are the same.

`on_grid` makes such a grid from the largest magnitude m of a row. Let c = m * 2^s with s = 53 - bits >= 28, and
u = ulp(c), so that m < 2^bits * u. Adding c to x rounds x to a multiple of u (of 2u where the sum enters the next
binade), and subtracting c again is exact: the result is u times an integer of at most 2^bits. Only where c lies within
m of its binade's lower end can x + c fall below that, onto multiples of u / 2; then m <= (1 + 2^(1-s)) 2^(bits-1) u,
and the count of halves is again at most 2^bits. A maximum does not depend on order, so a row's grid is the row's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

MANTISSA = 53
"""Bits of an integer that float64 holds exactly."""
WIDEST = 25
"""Bits of a factor at most: the proof above asks for it."""
FIXED = 1.5 * 2.0**22
"""Adding and subtracting it leaves a multiple of 2^-30, for magnitudes below 2^21."""
TINY = 2.0**-100
"""The smallest scale that `units` divides by; float32 holds it exactly."""


def split(terms: int) -> tuple[int, int]:
    """Bits of the left and of the right factor for a sum of `terms` products. Raises ValueError past 2^21 terms."""
    free = MANTISSA - (terms - 1).bit_length()
    if terms < 1 or free < 32:
        raise ValueError(f"a sum of {terms} products leaves {free} bits for its factors; at least 32 are needed")
    left = min((free + 1) // 2, WIDEST)
    return left, min(free - left, WIDEST)


def on_grid(x: Tensor, bits: int, dim: int = -1) -> Tensor:
    """`x` [..., n] rounded to `bits` bits below the largest magnitude along `dim`; float64 of x's shape."""
    c = x.abs().amax(dim, keepdim=True).double() * 2.0 ** (MANTISSA - bits)
    return x.to(torch.float64, copy=True).add_(c).sub_(c)


def fixed(x: Tensor) -> Tensor:
    """`x` rounded to a multiple of 2^-30, float64. Sums of 2^k of them are exact for magnitudes below 2^(23 - k)."""
    return (x.double() + FIXED).sub_(FIXED)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [..., m, k] times b [..., k, n], float32 in, exact inside, float32 [..., m, n] out.

    Entry (i, j) depends on row i of `a` and column j of `b` alone.
    """
    left, right = split(a.shape[-1])
    return (on_grid(a, left) @ on_grid(b, right, dim=-2)).float()


def units(v: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rows v [..., n, d] float32 as u = v / scale, in [-1, 1] on the grid 2^-bits, and scale [..., n]; both float64."""
    scale = v.abs().amax(-1).double().clamp_(min=TINY)
    c = 1.5 * 2.0 ** (52 - bits)
    return (v / scale[..., None]).add_(c).sub_(c), scale


def mix(p: Tensor, u: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Σ_j p[i, j] · scale[j] · u[j], exact: p [..., m, n]; u, scale of `units` for [..., n, d]; float64 [..., m, d].

    A row's grid comes from its own largest p · scale, so a row of v that p gives no weight does not enter, whatever it
    holds (as long as it is finite). `bits` + the bits of u + ceil(log2 n) must be at most 53.
    """
    return on_grid(p * scale[..., None, :], bits) @ u


def sum_squares(x: Tensor) -> Tensor:
    """Σ x² over the last dimension, exact after rounding x to its row's grid; float64 [..., 1]."""
    q = on_grid(x, split(x.shape[-1])[1])
    return (q * q).sum(-1, keepdim=True)


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim` (negative) by halves, additions only between equal places: one fixed order on every device."""
    n = x.shape[dim]
    while n > 1:
        half = n // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat([folded, x.narrow(dim, n - 1, 1)], dim) if n % 2 else folded
        n = x.shape[dim]
    return x.squeeze(dim)
