"""A checkpoint's tensors in the form that the kernels of the bf16 form take: fused where they share their input.

Matrices are bf16, or packed as the checkpoint packs them (`affine`); norms' weights and the recurrence's constants are
float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tfmagic.kernels.gpu import conv
from tfmagic.kernels.gpu.affine import Affine
from tfmagic.kernels.gpu.linear import Dense, Weight, interleave

from ..config import Config, Text

Laid = tuple[Tensor, Tensor, Tensor]
"""A frame's position rows, cos, sin."""


@dataclass
class Delta:
    """A Gated DeltaNet mixer."""

    inputs: Weight  # qkv | z | b | a
    conv: conv.Weights  # and the gates' constants
    norm: Tensor  # [dv]
    out: Weight


@dataclass
class Attention:
    """A full-attention mixer."""

    inputs: Weight  # q with its gate, per head | k | v
    query: Tensor  # 1 + q_norm [d]
    key: Tensor  # 1 + k_norm [d]
    out: Weight


@dataclass
class Layer:
    before: Tensor  # 1 + input_layernorm [D]
    mixer: Delta | Attention
    after: Tensor  # 1 + post_attention_layernorm [D]
    up: Weight  # gate and up in turn
    down: Weight


@dataclass
class TextWeights:
    embed: Tensor  # bf16 [V, D]
    layers: list[Layer]
    norm: Tensor  # 1 + the last norm's weight [D]
    head: Weight


@dataclass
class Block:
    """A block of the tower."""

    norm1: tuple[Tensor, Tensor]
    qkv: Dense
    proj: Dense
    norm2: tuple[Tensor, Tensor]
    fc1: Dense
    fc2: Dense


@dataclass
class VisionWeights:
    patch: Dense
    table: Tensor  # float32 [side, side, Dv]
    blocks: list[Block]
    norm: tuple[Tensor, Tensor]
    fc1: Dense
    fc2: Dense
    laid: dict[tuple[int, int], Laid] = field(default_factory=dict)  # of the last frames' sizes (`tower.laid_out`)


class Reader:
    """Takes tensors by name and shape and puts them on the device."""

    def __init__(self, tensors, device: torch.device):
        self.tensors, self.device = tensors, device

    def vector(self, name: str, *shape: int, plus: float = 0.0) -> Tensor:
        return self.tensors.take(name, shape).to(self.device).float() + plus

    def plain(self, name: str, *shape: int) -> Tensor:
        return self.tensors.take(name, shape).to(self.device, torch.bfloat16)

    def weight(self, prefix: str, names: dict[str, int], inputs: int, paired: bool = False) -> Weight:
        """Matrices that share their input, one under another, or (`paired`) their rows in turn. They stay packed where
        all are packed alike."""
        shapes = {f"{prefix}{name}.weight": (rows, inputs) for name, rows in names.items()}
        packed = [self.tensors.affine(name, shape) for name, shape in shapes.items()]
        join = (lambda parts: interleave(*parts)) if paired else torch.cat
        if None not in packed and len({(p.bits, p.group) for p in packed}) == 1:
            q, scales, biases = (joined([getattr(p, part) for p in packed], join) for part in ("q", "scales", "biases"))
            return Affine(q, scales, biases, packed[0].bits, packed[0].group)
        del packed
        return Dense(joined([self.plain(name, *shape) for name, shape in shapes.items()], join))

    def biased(self, prefix: str, rows: int, inputs: int) -> Dense:
        return Dense(self.plain(prefix + ".weight", rows, inputs), self.plain(prefix + ".bias", rows))

    def pair(self, prefix: str, size: int) -> tuple[Tensor, Tensor]:
        return self.vector(f"{prefix}.weight", size), self.vector(f"{prefix}.bias", size)


def joined(parts: list[Tensor], join) -> Tensor:
    """uint32 does not know every operation."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].dtype == torch.uint32:
        return join([part.view(torch.int32) for part in parts]).view(torch.uint32)
    return join(parts)


def read_text(tensors, config: Config, device: torch.device) -> TextWeights:
    """Raises Refusal naming a tensor that is missing or of another shape."""
    t, read = config.text, Reader(tensors, device)
    root = "model.language_model."
    embed = read.plain(root + "embed_tokens.weight", t.vocab, t.hidden)
    layers = [read_layer(read, f"{root}layers.{i}.", t, full) for i, full in enumerate(t.full)]
    norm = read.vector(root + "norm.weight", t.hidden, plus=1.0)
    if not config.tied:
        head = read.weight("", {"lm_head": t.vocab}, t.hidden)
    elif tensors.form(root + "embed_tokens.weight") is None:
        head = Dense(embed)
    else:
        head = read.weight(root, {"embed_tokens": t.vocab}, t.hidden)
    return TextWeights(embed, layers, norm, head)


def read_layer(read: Reader, prefix: str, t: Text, full: bool) -> Layer:
    return Layer(
        before=read.vector(prefix + "input_layernorm.weight", t.hidden, plus=1.0),
        mixer=(read_attention if full else read_delta)(read, prefix, t),
        after=read.vector(prefix + "post_attention_layernorm.weight", t.hidden, plus=1.0),
        up=read.weight(prefix + "mlp.", dict.fromkeys(("gate_proj", "up_proj"), t.intermediate), t.hidden, paired=True),
        down=read.weight(prefix + "mlp.", {"down_proj": t.hidden}, t.intermediate),
    )


def read_attention(read: Reader, prefix: str, t: Text) -> Attention:
    prefix, keys = prefix + "self_attn.", t.kv_heads * t.head_dim
    sizes = {"q_proj": 2 * t.heads * t.head_dim, "k_proj": keys, "v_proj": keys}
    return Attention(
        inputs=read.weight(prefix, sizes, t.hidden),
        query=read.vector(prefix + "q_norm.weight", t.head_dim, plus=1.0),
        key=read.vector(prefix + "k_norm.weight", t.head_dim, plus=1.0),
        out=read.weight(prefix, {"o_proj": t.hidden}, t.heads * t.head_dim),
    )


def read_delta(read: Reader, prefix: str, t: Text) -> Delta:
    prefix, values = prefix + "linear_attn.", t.value_heads * t.value_dim
    sizes = {"in_proj_qkv": t.channels, "in_proj_z": values, "in_proj_b": t.value_heads, "in_proj_a": t.value_heads}
    return Delta(
        inputs=read.weight(prefix, sizes, t.hidden),
        conv=conv.Weights(
            read.plain(prefix + "conv1d.weight", t.channels, 1, t.conv)[:, 0].t().contiguous(),
            read.vector(prefix + "A_log", t.value_heads),
            read.vector(prefix + "dt_bias", t.value_heads),
        ),
        norm=read.vector(prefix + "norm.weight", t.value_dim),
        out=read.weight(prefix, {"out_proj": t.hidden}, values),
    )


def read_vision(tensors, config: Config, device: torch.device) -> VisionWeights:
    """Raises Refusal naming a tensor that is missing or of another shape."""
    v, read, root = config.vision, Reader(tensors, device), "model.visual."
    shape = (v.hidden, v.channels, v.temporal, v.patch, v.patch)
    wide = v.hidden * v.merge**2
    patch = read.plain(root + "patch_embed.proj.weight", *shape).flatten(1)
    return VisionWeights(
        patch=Dense(patch, read.plain(root + "patch_embed.proj.bias", v.hidden)),
        table=read.vector(root + "pos_embed.weight", v.side**2, v.hidden).view(v.side, v.side, v.hidden),
        blocks=[read_block(read, f"{root}blocks.{i}.", v) for i in range(v.depth)],
        norm=read.pair(root + "merger.norm", v.hidden),
        fc1=read.biased(root + "merger.linear_fc1", wide, wide),
        fc2=read.biased(root + "merger.linear_fc2", v.out, wide),
    )


def read_block(read: Reader, prefix: str, v) -> Block:
    return Block(
        norm1=read.pair(prefix + "norm1", v.hidden),
        qkv=read.biased(prefix + "attn.qkv", 3 * v.hidden, v.hidden),
        proj=read.biased(prefix + "attn.proj", v.hidden, v.hidden),
        norm2=read.pair(prefix + "norm2", v.hidden),
        fc1=read.biased(prefix + "mlp.linear_fc1", v.intermediate, v.hidden),
        fc2=read.biased(prefix + "mlp.linear_fc2", v.hidden, v.intermediate),
    )


def size(*held) -> int:
    """Bytes of the tensors within, each once."""
    found: dict[int, int] = {}

    def look(x) -> None:
        if isinstance(x, Tensor):
            found[x.data_ptr()] = x.nbytes
        elif isinstance(x, list | tuple):
            for part in x:
                look(part)
        elif hasattr(x, "__dict__"):
            for part in vars(x).values():
                look(part)

    look(held)
    return sum(found.values())
