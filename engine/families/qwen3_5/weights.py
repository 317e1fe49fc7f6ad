"""A checkpoint's tensors, put into the form the passes use: fused, on their grids, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tfmagic.kernels.linear import Weight

from .config import Config, Text, Vision

UNUSED = ("mtp.*",)
"""Stored in released checkpoints and not run here."""


@dataclass
class Delta:
    """A Gated DeltaNet mixer."""

    inputs: Weight  # qkv | z | b | a; 1 + input_layernorm folded in
    taps: Tensor  # [K, C]
    rate: Tensor  # -exp(A_log) [value heads]
    bias: Tensor  # dt_bias [value heads]
    norm: Tensor  # [dv]
    out: Weight


@dataclass
class Attention:
    """A full-attention mixer."""

    inputs: Weight  # q with its gate, per head | k | v; 1 + input_layernorm folded in
    query: Tensor  # 1 + q_norm [d]
    key: Tensor  # 1 + k_norm [d]
    out: Weight


@dataclass
class Layer:
    mixer: Delta | Attention
    up: Weight  # gate | up; 1 + post_attention_layernorm folded in
    down: Weight


@dataclass
class TextWeights:
    embed: Tensor  # [V, D] as stored
    layers: list[Layer]
    head: Weight  # 1 + the last norm's weight folded in


@dataclass
class Block:
    """A block of the tower."""

    norm1: tuple[Tensor, Tensor]
    qkv: Weight
    proj: Weight
    norm2: tuple[Tensor, Tensor]
    fc1: Weight
    fc2: Weight


@dataclass
class VisionWeights:
    patch: Weight
    table: Tensor  # [side, side, Dv]
    blocks: list[Block]
    norm: tuple[Tensor, Tensor]
    fc1: Weight
    fc2: Weight


class Reader:
    """Takes tensors by name and shape and puts them on the device."""

    def __init__(self, tensors, device: torch.device):
        self.tensors, self.device = tensors, device

    def vector(self, name: str, *shape: int, plus: float = 0.0) -> Tensor:
        return self.tensors.take(name, shape).to(self.device).float() + plus

    def weight(
        self, prefix: str, names: dict[str, int], inputs: int, bias: bool = False, normed: Tensor | None = None
    ) -> Weight:
        matrices = [self.tensors.take(f"{prefix}{name}.weight", (rows, inputs)) for name, rows in names.items()]
        biases = [self.tensors.take(f"{prefix}{name}.bias", (rows,)) for name, rows in names.items()] if bias else []
        return Weight(*matrices, bias=torch.cat(biases) if bias else None, normed=normed, device=self.device)

    def pair(self, prefix: str, size: int) -> tuple[Tensor, Tensor]:
        return self.vector(f"{prefix}.weight", size), self.vector(f"{prefix}.bias", size)


def read_text(tensors, config: Config, device: torch.device) -> TextWeights:
    """Raises Refusal naming a tensor that is missing or of another shape."""
    t, read = config.text, Reader(tensors, device)
    root = "model.language_model."
    embed = tensors.take(root + "embed_tokens.weight", (t.vocab, t.hidden)).to(device)
    head = embed if config.tied else tensors.take("lm_head.weight", (t.vocab, t.hidden))
    return TextWeights(
        embed=embed,
        layers=[read_layer(read, f"{root}layers.{i}.", config, full) for i, full in enumerate(t.full)],
        head=Weight(head, normed=read.vector(root + "norm.weight", t.hidden, plus=1.0), device=device),
    )


def read_layer(read: Reader, prefix: str, config: Config, full: bool) -> Layer:
    t = config.text
    before = read.vector(prefix + "input_layernorm.weight", t.hidden, plus=1.0)
    after = read.vector(prefix + "post_attention_layernorm.weight", t.hidden, plus=1.0)
    up = {"gate_proj": t.intermediate, "up_proj": t.intermediate}
    return Layer(
        mixer=(read_attention if full else read_delta)(read, prefix, t, before),
        up=read.weight(prefix + "mlp.", up, t.hidden, normed=after),
        down=read.weight(prefix + "mlp.", {"down_proj": t.hidden}, t.intermediate),
    )


def read_attention(read: Reader, prefix: str, t: Text, before: Tensor) -> Attention:
    prefix, keys = prefix + "self_attn.", t.kv_heads * t.head_dim
    sizes = {"q_proj": 2 * t.heads * t.head_dim, "k_proj": keys, "v_proj": keys}
    return Attention(
        inputs=read.weight(prefix, sizes, t.hidden, normed=before),
        query=read.vector(prefix + "q_norm.weight", t.head_dim, plus=1.0),
        key=read.vector(prefix + "k_norm.weight", t.head_dim, plus=1.0),
        out=read.weight(prefix, {"o_proj": t.hidden}, t.heads * t.head_dim),
    )


def read_delta(read: Reader, prefix: str, t: Text, before: Tensor) -> Delta:
    prefix, values = prefix + "linear_attn.", t.value_heads * t.value_dim
    sizes = {"in_proj_qkv": t.channels, "in_proj_z": values, "in_proj_b": t.value_heads, "in_proj_a": t.value_heads}
    return Delta(
        inputs=read.weight(prefix, sizes, t.hidden, normed=before),
        taps=read.vector(prefix + "conv1d.weight", t.channels, 1, t.conv)[:, 0].t().contiguous(),
        rate=-torch.exp(read.vector(prefix + "A_log", t.value_heads)),
        bias=read.vector(prefix + "dt_bias", t.value_heads),
        norm=read.vector(prefix + "norm.weight", t.value_dim),
        out=read.weight(prefix, {"out_proj": t.hidden}, values),
    )


def read_vision(tensors, config: Config, device: torch.device) -> VisionWeights:
    """Raises Refusal naming a tensor that is missing or of another shape."""
    v, read, root = config.vision, Reader(tensors, device), "model.visual."
    shape = (v.hidden, v.channels, v.temporal, v.patch, v.patch)
    patch = tensors.take(root + "patch_embed.proj.weight", shape).flatten(1)
    wide = v.hidden * v.merge**2
    return VisionWeights(
        patch=Weight(patch, bias=tensors.take(root + "patch_embed.proj.bias", (v.hidden,)), device=device),
        table=read.vector(root + "pos_embed.weight", v.side**2, v.hidden).view(v.side, v.side, v.hidden),
        blocks=[read_block(read, f"{root}blocks.{i}.", v) for i in range(v.depth)],
        norm=read.pair(root + "merger.norm", v.hidden),
        fc1=read.weight(root + "merger.", {"linear_fc1": wide}, wide, bias=True),
        fc2=read.weight(root + "merger.", {"linear_fc2": v.out}, wide, bias=True),
    )


def read_block(read: Reader, prefix: str, v: Vision) -> Block:
    return Block(
        norm1=read.pair(prefix + "norm1", v.hidden),
        qkv=read.weight(prefix + "attn.", {"qkv": 3 * v.hidden}, v.hidden, bias=True),
        proj=read.weight(prefix + "attn.", {"proj": v.hidden}, v.hidden, bias=True),
        norm2=read.pair(prefix + "norm2", v.hidden),
        fc1=read.weight(prefix + "mlp.", {"linear_fc1": v.intermediate}, v.hidden, bias=True),
        fc2=read.weight(prefix + "mlp.", {"linear_fc2": v.hidden}, v.intermediate, bias=True),
    )
