"""Activations from functions whose vector body and scalar tail agree: exp, log1p, tanh, erf and division.

torch's own sigmoid, silu and softplus give an element other bits in the last places of a buffer than inside it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x); x itself above 20, as torch does."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh form, sqrt(2/π) = 0.79788456."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def gelu(x: Tensor) -> Tensor:
    """Exact GELU."""
    return 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))
