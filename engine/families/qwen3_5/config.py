"""What a Qwen3.5 checkpoint's config.json must say, read once and refused by name where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfmagic.errors import Refusal

OTHER = "Use a Qwen3.5, 3.6 or 3.8 dense checkpoint."


@dataclass(frozen=True)
class Text:
    vocab: int
    hidden: int
    intermediate: int
    full: tuple[bool, ...]
    """One flag a layer: full attention (True) or Gated DeltaNet."""
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    conv: int
    """Taps of the short convolution."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    """Per head of the Gated DeltaNet."""
    theta: float
    rotary: int
    """Rotated dimensions of a head."""
    section: tuple[int, int, int]
    positions: int
    """The longest sequence the checkpoint was made for."""

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class Vision:
    depth: int
    hidden: int
    heads: int
    intermediate: int
    out: int
    patch: int
    temporal: int
    merge: int
    channels: int
    side: int
    """Rows and columns of the table of position embeddings."""


@dataclass(frozen=True)
class Config:
    text: Text
    vision: Vision | None
    tied: bool
    image_token_id: int | None


def read(config: dict[str, Any], tied: bool) -> Config:
    """Raises Refusal naming the key that is missing or out of range."""
    text = config.get("text_config", config)
    vision = config.get("vision_config")
    try:
        parsed = Config(
            text=read_text(text),
            vision=read_vision(vision) if vision else None,
            tied=tied,
            image_token_id=config.get("image_token_id"),
        )
    except KeyError as error:
        raise Refusal(f"config.json lacks {error.args[0]}.", OTHER) from None
    except (TypeError, ValueError) as error:
        raise Refusal(f"config.json has a value that cannot be read: {error}.", OTHER) from None
    check(parsed)
    return parsed


def read_text(c: dict[str, Any]) -> Text:
    layers, every = int(c["num_hidden_layers"]), int(c.get("full_attention_interval", 4))
    kinds = c.get("layer_types")
    if not kinds:
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if unknown := set(kinds) - {"full_attention", "linear_attention"}:
        raise Refusal(f"config.json has layers of an unknown type: {', '.join(sorted(unknown))}.", OTHER)
    if len(kinds) != layers:
        raise Refusal(f"config.json lists {len(kinds)} layer_types for {layers} layers.", OTHER)
    rope = c.get("rope_parameters") or {"rope_theta": c["rope_theta"], **(c.get("rope_scaling") or {})}
    if rope.get("rope_type", "default") != "default":
        raise Refusal(f"config.json asks for rope_type {rope['rope_type']!r}, which is not known here.", OTHER)
    if c.get("attention_bias"):
        raise Refusal("config.json asks for attention biases, which this family does not have.", OTHER)
    dim = int(c["head_dim"])
    part = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 0.25))
    return Text(
        vocab=int(c["vocab_size"]),
        hidden=int(c["hidden_size"]),
        intermediate=int(c["intermediate_size"]),
        full=tuple(kind == "full_attention" for kind in kinds),
        heads=int(c["num_attention_heads"]),
        kv_heads=int(c["num_key_value_heads"]),
        head_dim=dim,
        eps=float(c["rms_norm_eps"]),
        conv=int(c["linear_conv_kernel_dim"]),
        key_heads=int(c["linear_num_key_heads"]),
        value_heads=int(c["linear_num_value_heads"]),
        key_dim=int(c["linear_key_head_dim"]),
        value_dim=int(c["linear_value_head_dim"]),
        theta=float(rope["rope_theta"]),
        rotary=int(dim * part),
        section=tuple(rope.get("mrope_section", (11, 11, 10))),
        positions=int(c["max_position_embeddings"]),
    )


def read_vision(c: dict[str, Any]) -> Vision:
    if c.get("deepstack_visual_indexes"):
        raise Refusal("config.json asks for deepstack features, which this family does not have.", OTHER)
    return Vision(
        depth=int(c["depth"]),
        hidden=int(c["hidden_size"]),
        heads=int(c["num_heads"]),
        intermediate=int(c["intermediate_size"]),
        out=int(c["out_hidden_size"]),
        patch=int(c["patch_size"]),
        temporal=int(c["temporal_patch_size"]),
        merge=int(c["spatial_merge_size"]),
        channels=int(c["in_channels"]),
        side=round(int(c["num_position_embeddings"]) ** 0.5),
    )


def check(c: Config) -> None:
    t, v = c.text, c.vision
    for whole, part, names in (
        (t.heads, t.kv_heads, "num_attention_heads, num_key_value_heads"),
        (t.value_heads, t.key_heads, "linear_num_value_heads, linear_num_key_heads"),
    ):
        if part < 1 or whole % part:
            raise Refusal(f"config.json: {names} are {whole} and {part}; the first must be a multiple.", OTHER)
    if v and v.out != t.hidden:
        raise Refusal(f"config.json: the tower gives {v.out} features a row and the text takes {t.hidden}.", OTHER)
    if t.rotary % 2 or t.positions < 1:
        raise Refusal("config.json: the rotary dimension must be even and max_position_embeddings positive.", OTHER)
