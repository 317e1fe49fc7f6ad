"""y = x · Wᵀ (+ b), the same bits for a row however many rows share the call (see `exact`).

`linear` takes rows of any size, and cuts each row's grid from its own largest magnitude. `rms_linear` normalises its
rows first and so knows their length beforehand: |x| <= sqrt(K). By Cauchy and Schwarz every partial sum of x · w is
then at most |x| |w|, so with x on a fixed grid ux and w on uw, |x| |w| <= 2^53 ux uw makes every sum exact. That is two
to three bits finer than bounds by the largest magnitude, and costs two operations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import exact

LENGTH_BITS = 27
"""The length of a normalised row, counted in its grid, is below 2^27."""
SLACK = 1.001
"""Covers the rounding of the normalisation and of the grids (under 1e-4 of a row's length)."""
FEW = 3
"""Rows for which a CPU is faster with the matrix on the left."""


class Weight:
    """One or several [out, in] matrices that share their input, fused along `out` and prepared once.

    Held as float64 [out, in], each output row on its own grid. `normed`: for `rms_linear`, the norm's weight [in],
    which is folded in.
    """

    def __init__(
        self,
        *matrices: Tensor,
        bias: Tensor | None = None,
        normed: Tensor | None = None,
        device: torch.device | str = "cpu",
    ):
        fused = torch.cat([m.to(device) for m in matrices]).float()
        self.sizes = [len(m) for m in matrices]
        self.bias = None if bias is None else bias.to(device).float()
        if normed is None:
            self.bits, right = exact.split(fused.shape[1])
            rows = exact.on_grid(fused, right)
        else:
            length = SLACK * math.sqrt(fused.shape[1])
            unit = 2.0 ** (math.ceil(math.log2(length)) - LENGTH_BITS)
            self.offset = 1.5 * 2.0**52 * unit
            rows = on_length_grid(fused.double() * normed.double(), length / unit)
        self.matrix = rows


def on_length_grid(rows: Tensor, other: float) -> Tensor:
    """rows [n, K] float64, each on the finest power of two for which |row| · `other` <= 2^53 grid steps."""
    lengths = SLACK * torch.sqrt(exact.sum_squares(rows))
    exponent = torch.frexp(lengths * (other / 2.0**exact.MANTISSA))[1]
    offset = torch.ldexp(torch.full_like(lengths, 1.5 * 2.0**52), exponent)
    return (rows + offset).sub_(offset)


def linear(x: Tensor, w: Weight) -> Tensor:
    """x [M, in] float32 -> [M, out] float32."""
    y = product(exact.on_grid(x, w.bits), w.matrix)
    return y if w.bias is None else y + w.bias


def rms_linear(x: Tensor, w: Weight, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · norm weight, then the product; x [M, in] float32 -> [M, out] float32."""
    mean = exact.sum_squares(x) / x.shape[-1]
    rows = (x * torch.rsqrt(mean + eps)).add_(w.offset).sub_(w.offset)
    return product(rows, w.matrix)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x [M, in] times matrix [out, in] transposed, both on their grids; float32 [M, out].

    The sums are exact, so each number of rows may take the form that is fastest for it. On a CPU that is, for few rows,
    the matrix from the left, and two rows are faster than one.
    """
    rows = len(x)
    if x.device.type == "cpu" and rows <= FEW:
        if rows == 1:
            x = x.expand(2, -1).contiguous()
        y = (matrix @ x.t()).t()[:rows]
    else:
        y = x @ matrix.t()
    return y.to(torch.float32, memory_format=torch.contiguous_format)


def linear_twin(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` in plain float64, without a grid."""
    y = x.double() @ matrix.double().t()
    return (y if bias is None else y + bias.double()).float()


def rms_linear_twin(x: Tensor, matrix: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_linear` in plain float64, without a grid."""
    x = x.double()
    rows = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    return (rows @ matrix.double().t()).float()
