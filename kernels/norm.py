"""Root-mean-square and layer norms. Row statistics are exact sums, so a row's bits are its own (see `exact`)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import exact


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; float32. Pass 1 + w for a zero-centred norm."""
    mean = exact.sum_squares(x) / x.shape[-1]
    return x * torch.rsqrt(mean + eps).float() * weight


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σ x² + eps) over the last dimension: eps inside the root of the sum. float32."""
    return x * torch.rsqrt(exact.sum_squares(x) + eps).float()


def layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last dimension; float32."""
    q = exact.on_grid(x, exact.split(x.shape[-1])[1])
    mean = q.sum(-1, keepdim=True) / x.shape[-1]
    variance = (q * q).sum(-1, keepdim=True) / x.shape[-1] - mean * mean
    return ((q - mean) * torch.rsqrt(variance.clamp_(min=0) + eps)).float() * weight + bias


def rms_twin(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms` in plain float64."""
    x = x.double()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()).float()


def layer_twin(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`layer` in plain float64."""
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.double() + bias.double()).float()
