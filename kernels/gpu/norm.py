"""Norms of bf16 rows: statistics in float32, one program a row, so that a row's bits are its own."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import EARLY, cdiv, jit, launchable, let_next_start, power_of_two, tl, wait_for_last


def rms(x: Tensor, w: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · w over rows, rounded once: x [M, D] bf16 (rows may be strided), w [D] float32 (pass
    1 + w for a zero-centred norm) -> bf16 [M, D]."""
    out = x.new_empty(x.shape) if out is None else out
    if not launchable(x):
        return out.copy_(rms_twin(x, w, eps))
    if len(x):
        D = x.shape[-1]
        block = power_of_two(D)
        strides = x.stride(0), 0, out.stride(0), 0
        _rms[(len(x),)](
            x, x, w, out, out, *strides, eps, D, block, False, EARLY, num_warps=_warps(block), launch_pdl=EARLY
        )
    return out


def add_rms(
    x: Tensor, h: Tensor, w: Tensor, eps: float, total: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The residual x + h, rounded, and `rms` of what was rounded: x, h bf16 [M, D] -> two bf16 [M, D]. `total` may be
    x."""
    total = x.new_empty(x.shape) if total is None else total
    out = x.new_empty(x.shape) if out is None else out
    if not launchable(x):
        total.copy_(x.float() + h.float())
        return total, out.copy_(rms_twin(total, w, eps))
    if len(x):
        D = x.shape[-1]
        block = power_of_two(D)
        strides = x.stride(0), h.stride(0), out.stride(0), total.stride(0)
        _rms[(len(x),)](
            x, h, w, out, total, *strides, eps, D, block, True, EARLY, num_warps=_warps(block), launch_pdl=EARLY
        )
    return total, out


def layer(x: Tensor, w: Tensor, b: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + eps) · w + b over rows, rounded once: x [M, D] bf16, w, b [D] float32 -> bf16."""
    out = x.new_empty(x.shape) if out is None else out
    if not launchable(x):
        return out.copy_(layer_twin(x, w, b, eps))
    if len(x):
        D = x.shape[-1]
        block = power_of_two(D)
        _layer[(len(x),)](x, w, b, out, x.stride(0), out.stride(0), eps, D, block, num_warps=_warps(block))
    return out


def gated_rms(o: Tensor, z: Tensor, w: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Gated DeltaNet's norm, a head at a time: o [M, heads, dv] bf16, z [M, heads · dv] bf16 (rows may be strided), w
    [dv] bf16 -> bf16 [M, heads · dv]. Rounds where the model does: n = w · bf16(o / rms(o)) in bf16, then n · silu(z)
    in float32, rounded."""
    M, heads, dv = o.shape
    out = o.new_empty(M, heads * dv) if out is None else out
    if not launchable(o):
        return out.copy_(gated_rms_twin(o, z, w, eps))
    if M:
        together = max(1, min(power_of_two(heads), 1024 // power_of_two(dv)))
        grid, width = (M, cdiv(heads, together)), power_of_two(dv)
        strides = o.stride(0), o.stride(1), z.stride(0), out.stride(0)
        _gated_rms[grid](o, z, w, out, *strides, eps, heads, dv, together, width, EARLY, num_warps=4, launch_pdl=EARLY)
    return out


def _warps(block: int) -> int:
    """Of a row's length alone: how a sum is cut among threads is part of its bits."""
    return min(max(block // 512, 1), 8)


@jit
def _rms(x, h, w, out, total, sx, sh, so, st, eps, D, BLOCK: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    there = i < D
    let_next_start(EARLY)
    weight = tl.load(w + i, mask=there, other=0.0)  # nobody writes it
    wait_for_last(EARLY)
    a = tl.load(x + row * sx + i, mask=there, other=0.0).to(tl.float32)
    if ADD:
        b = tl.load(h + row * sh + i, mask=there, other=0.0).to(tl.float32)
        rounded = (a + b).to(tl.bfloat16)
        tl.store(total + row * st + i, rounded, mask=there)
        a = rounded.to(tl.float32)
    mean = tl.sum(a * a, 0) / D
    y = a * tl.rsqrt(mean + eps) * weight
    tl.store(out + row * so + i, y.to(tl.bfloat16), mask=there)


@jit
def _layer(x, w, b, out, sx, so, eps, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    there = i < D
    a = tl.load(x + row * sx + i, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(w + i, mask=there, other=0.0)
    bias = tl.load(b + i, mask=there, other=0.0)
    a = tl.where(there, a - tl.sum(a, 0) / D, 0.0)
    variance = tl.sum(a * a, 0) / D
    y = a * tl.rsqrt(variance + eps) * weight + bias
    tl.store(out + row * so + i, y.to(tl.bfloat16), mask=there)


@jit
def _gated_rms(
    o, z, w, out, so, sh, sz, sy, eps, heads, dv, HEADS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, BLOCK)
    there = (head < heads)[:, None] & (i < dv)[None, :]
    let_next_start(EARLY)
    weight = tl.load(w + i, mask=i < dv, other=0.0).to(tl.float32)  # nobody writes it
    wait_for_last(EARLY)
    place = head[:, None] * dv + i[None, :]
    a = tl.load(o + row * so + head[:, None] * sh + i[None, :], mask=there, other=0.0).to(tl.float32)
    gate = tl.load(z + row * sz + place, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(a * a, 1) / dv
    n = (a * tl.rsqrt(mean + eps)[:, None]).to(tl.bfloat16).to(tl.float32)
    n = (n * weight[None, :]).to(tl.bfloat16).to(tl.float32)
    y = n * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + row * sy + place, y.to(tl.bfloat16), mask=there)


def rms_twin(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """`rms` in float64, unrounded."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.double()


def layer_twin(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """`layer` in float64, unrounded."""
    x = x.double()
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.double() + b.double()


def gated_rms_twin(o: Tensor, z: Tensor, w: Tensor, eps: float) -> Tensor:
    """`gated_rms` in float64 between the model's roundings."""
    n = rms_twin(o, torch.ones(()), eps).bfloat16().double()
    n = (n * w.double()).bfloat16().double()
    return (n.flatten(1) * torch.nn.functional.silu(z.double())).bfloat16()
