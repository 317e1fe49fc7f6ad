"""What follows a product while its sums are still in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import jit, tl

PLAIN, GATED, GELU, GELU_TANH = 0, 1, 2, 3
"""Nothing; silu(gate) · up of columns that hold them in turn; GELU; GELU by its tanh form."""
TURN = 8
"""Columns of a gate, and then of its up part."""


@jit
def finish(y, WHAT: tl.constexpr):
    """y [rows, columns] float32, after `WHAT` (of the names above); half as many columns where GATED."""
    if WHAT == 1:
        turns = tl.reshape(y, [y.shape[0], y.shape[1] // 16, 2, 8])
        gate, up = tl.split(tl.permute(turns, [0, 1, 3, 2]))
        y = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [y.shape[0], y.shape[1] // 2])
    elif WHAT == 2:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif WHAT == 3:
        # 1 + tanh(u) = 2 / (1 + exp(-2u)). What could be fused is, in every form of a product alike.
        u = tl.fma(y * y * 0.044715, y, y)
        y = y / (1.0 + tl.exp(-1.5957691216057308 * u))
    return y


def finish_twin(y: Tensor, what: int, residual: Tensor | None) -> Tensor:
    """What follows a product, in float64."""
    if what == GATED:
        gate, up = y.unflatten(1, (-1, 2, TURN)).unbind(2)
        y = (torch.nn.functional.silu(gate) * up).flatten(1)
    elif what != PLAIN:
        y = torch.nn.functional.gelu(y, approximate="none" if what == GELU else "tanh")
    return y if residual is None else y + residual.double()
