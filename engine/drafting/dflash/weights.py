"""A drafter's tensors, in the form the pass uses: fused where they share an input, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfmagic.errors import Refusal

from ...checkpoint.affine import Affine
from .config import OTHER, Config

AGAIN = "Download the drafter again, or use --drafter none."
GROUP = 64
"""Values of a row that share a scale, at 4 bits."""

Product = Callable[[Tensor], Tensor]
"""Rows [..., in] → rows [..., out]."""


@dataclass
class Convolution:
    """A dynamic grouped convolution before and behind a sub-layer."""

    base: Tensor  # [2, kernel, groups, group], the first for before
    dynamic: Product  # D → 2 · kernel · groups


@dataclass
class Layer:
    before: Tensor  # input_layernorm [D]
    mix: Convolution | None
    inputs: Product  # q | k | v, per head
    norms: Tensor  # q_norm / sqrt(d), once a head | k_norm, once a kv head [heads + kv, d]
    out: Product
    after: Tensor  # post_attention_layernorm [D]
    feed: Convolution | None
    up: Product  # gate and up, to silu(gate) · up
    down: Product


@dataclass
class Selector:
    """What a candidate gains behind another: Σ_r before[a, r] · projected[r] · behind[b, r]."""

    before: Tensor  # predecessor_codebook [vocab, rank]
    behind: Tensor  # successor_codebook [vocab, rank]
    projection: Product  # D → rank


@dataclass
class Weights:
    taps: Product  # fc: taps · D → D
    context: Tensor  # hidden_norm [D]
    keys: Product  # D → every layer's k | v, one layer behind the other
    key_norms: Tensor  # k_norm [layers, 1, 1, d]
    layers: list[Layer]
    norm: Tensor  # [D]
    selector: Selector | None


class Reader:
    """Takes tensors by name and shape, and puts them on the device in the pass's precision."""

    def __init__(self, tensors, device: torch.device, dtype: torch.dtype, bits: int):
        self.tensors, self.device, self.dtype, self.bits = tensors, device, dtype, bits

    def take(self, name: str, *shape: int) -> Tensor:
        x = self.tensors.take(name, shape)
        if not x.is_floating_point():
            raise Refusal(f"{name} is of type {str(x.dtype).removeprefix('torch.')}.", OTHER)
        x = x.to(self.device, self.dtype)
        if not math.isfinite(float(x.sum(dtype=torch.float64))):
            raise Refusal(f"{name} holds numbers that are not finite.", AGAIN)
        return x

    def matrices(self, prefix: str, sizes: dict[str, int], inputs: int) -> Product:
        parts = [self.take(f"{prefix}{name}.weight", n, inputs) for name, n in sizes.items()]
        return product(torch.cat(parts), self.bits)

    def gated(self, prefix: str, c: Config) -> Product:
        gate, up = (self.take(f"{prefix}{name}_proj.weight", c.intermediate, c.hidden) for name in ("gate", "up"))
        return gated(gate, up, self.bits)


def held(matrix: Tensor, bits: int) -> Tensor | Any:
    """A matrix [out, in] as it is multiplied with: for rows in bf16 a weight of `kernels.gpu.linear`, packed at 4 bits;
    for rows in float32 a tensor, rounded at 4 bits. Rows that are no whole groups stay as they are."""
    rounds = bits == 4 and not matrix.shape[1] % GROUP
    if matrix.dtype != torch.bfloat16:
        return quantize_rows(matrix).dequantised().to(matrix.dtype) if rounds else matrix
    from tfmagic.kernels.gpu import affine, linear

    if not rounds:
        return linear.Dense(matrix)
    found = quantize_rows(matrix)
    return affine.Affine(found.q, found.scales, found.biases, found.bits, found.group)


def product(matrix: Tensor, bits: int) -> Product:
    """The product with a matrix [out, in] transposed."""
    w = held(matrix, bits)
    if isinstance(w, Tensor):
        return lambda x: F.linear(x, w)
    from tfmagic.kernels.gpu import linear

    return lambda x: linear.linear(x.flatten(0, -2), w).view(*x.shape[:-1], w.n)


def gated(gate: Tensor, up: Tensor, bits: int) -> Product:
    """silu(x · gateᵀ) · (x · upᵀ); gate, up [N, K] -> a product of x [..., K], [..., N]."""
    if gate.dtype != torch.bfloat16:
        w = held(torch.cat([gate, up]), bits)

        def run(x: Tensor) -> Tensor:
            gates, ups = F.linear(x, w).chunk(2, -1)
            return F.silu(gates) * ups

        return run
    from tfmagic.kernels.gpu import linear

    w = held(linear.interleave(gate, up), bits)
    return lambda x: linear.gate_up(x.flatten(0, -2), w).view(*x.shape[:-1], w.n // 2)


def quantize_rows(matrix: Tensor) -> Affine:
    """matrix [N, K], K a multiple of `GROUP`, in MLX's affine form of 4 bits, by MLX's rule: of each group's two ends
    the one farther from 0 becomes the bias, and the scale is such that 0 itself falls on the grid."""
    groups = matrix.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    end = torch.where(low.abs() > high.abs(), low, high)
    scale = ((high - low) / 15).clamp_min(1e-7).copysign(-end)
    steps = torch.round(end / scale)
    bias = torch.where(steps == 0, 0.0, end)
    scale = torch.where(steps == 0, scale, end / steps)
    scale, bias = scale.to(torch.bfloat16), bias.to(torch.bfloat16)
    q = torch.round((groups - bias.float()) / scale.float()).clamp_(0, 15).to(torch.uint8).flatten(1)
    words = (q[:, ::2] | q[:, 1::2] << 4).view(torch.uint32)  # a byte holds two values, the first one low
    return Affine(words, scale.squeeze(-1), bias.squeeze(-1), 4, GROUP)


def read(tensors, c: Config, device: torch.device, dtype: torch.dtype, bits: int) -> Weights:
    """`dtype`: of the pass's rows; `bits`: 16, or 4 to round matrices to. Raises Refusal naming a tensor that is
    missing, left over, of another shape or not finite."""
    r = Reader(tensors, device, dtype, bits)
    layers = [read_layer(r, f"layers.{i}.", c) for i in range(c.layers)]
    kv = {"k_proj": c.kv_heads * c.head_dim, "v_proj": c.kv_heads * c.head_dim}
    paths = {f"layers.{i}.self_attn.{name}": n for i in range(c.layers) for name, n in kv.items()}
    weights = Weights(
        taps=r.matrices("", {"fc": c.hidden}, len(c.taps) * c.hidden),
        context=r.take("hidden_norm.weight", c.hidden),
        keys=r.matrices("", paths, c.hidden),
        key_norms=torch.stack([layer.norms[-1] for layer in layers])[:, None, None],
        layers=layers,
        norm=r.take("norm.weight", c.hidden),
        selector=read_selector(r, c) if c.second else None,
    )
    if left := tensors.leftover():
        raise Refusal(f"It holds {len(left)} tensors of no known part, {left[0][:80]} first.", OTHER)
    return weights


def read_layer(r: Reader, prefix: str, c: Config) -> Layer:
    attention, feed = prefix + "self_attn.", prefix + "mlp."
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    norms = r.take(attention + "q_norm.weight", c.head_dim), r.take(attention + "k_norm.weight", c.head_dim)
    return Layer(
        before=r.take(prefix + "input_layernorm.weight", c.hidden),
        mix=read_convolution(r, prefix + "attention_conv.", c) if c.second else None,
        inputs=r.matrices(attention, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, c.hidden),
        norms=torch.stack([norms[0] * c.head_dim**-0.5] * c.heads + [norms[1]] * c.kv_heads),
        out=r.matrices(attention, {"o_proj": c.hidden}, queries),
        after=r.take(prefix + "post_attention_layernorm.weight", c.hidden),
        feed=read_convolution(r, prefix + "mlp_conv.", c) if c.second else None,
        up=r.gated(feed, c),
        down=r.matrices(feed, {"down_proj": c.hidden}, c.intermediate),
    )


def read_convolution(r: Reader, prefix: str, c: Config) -> Convolution:
    groups = c.hidden // c.group
    base = r.take(prefix + "base_kernel", 2, c.kernel, c.hidden).view(2, c.kernel, groups, c.group)
    return Convolution(base, r.matrices(prefix, {"kernel_projection": 2 * c.kernel * groups}, c.hidden))


def read_selector(r: Reader, c: Config) -> Selector:
    prefix = "candidate_selector."
    return Selector(
        before=r.take(prefix + "predecessor_codebook", c.vocab, c.rank),
        behind=r.take(prefix + "successor_codebook", c.vocab, c.rank),
        projection=r.matrices(prefix, {"hidden_projection": c.rank}, c.hidden),
    )
