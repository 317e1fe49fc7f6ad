"""Rotary position embeddings, halves rotated (never interleaved pairs)."""

from __future__ import annotations

import torch
from torch import Tensor


def frequencies(theta: float, dims: int, device: torch.device | str = "cpu") -> Tensor:
    """theta^(-2j / dims), j = 0 ... dims/2 - 1; float32 [dims / 2]."""
    return 1.0 / theta ** (torch.arange(0, dims, 2, device=device).float() / dims)


def axes(section: list[int], half: int, device: torch.device | str = "cpu") -> Tensor:
    """The position row (0 time, 1 height, 2 width) of each frequency in interleaved M-RoPE; int64 [half]."""
    axis = torch.zeros(half, dtype=torch.long, device=device)
    for row in (1, 2):
        axis[row : min(3 * section[row], half) : 3] = row
    return axis


def tables(positions: Tensor, inverse: Tensor, axis: Tensor) -> tuple[Tensor, Tensor]:
    """positions [3, L] integers -> (cos, sin), each float32 [L, 2 · half], the angles doubled by concatenation."""
    angles = (positions.float()[axis] * inverse[:, None]).t()
    return doubled(angles)


def doubled(angles: Tensor) -> tuple[Tensor, Tensor]:
    """angles [L, half] -> (cos, sin), each [L, 2 · half]."""
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [L, heads, d] with its first r dims rotated by tables [L, r]; the rest passes through."""
    r = cos.shape[-1]
    part, rest = x[..., :r], x[..., r:]
    turned = torch.cat([-part[..., r // 2 :], part[..., : r // 2]], -1)
    return torch.cat([part * cos[:, None] + turned * sin[:, None], rest], -1)
