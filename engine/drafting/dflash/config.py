"""What a drafter's config.json must say, read once and refused by name where it does not fit its target.

The layouts are those of the published `DFlashDraftModel` (a plain block drafter) and `DFlash2DraftModel` (with dynamic
convolutions and a candidate selector). A drafter that is misread costs no token, only its worth, which nobody would
notice: so a key that is not known here is refused too, unless it says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tfmagic.errors import Refusal

OTHER = "Use a DFlash or DFlash2 drafter that was made for this model, or --drafter none."
ARCHITECTURES = {"DFlashDraftModel": False, "DFlash2DraftModel": True}
"""Name → whether it has convolutions and a selector."""
CANDIDATES = 16
"""Candidates a place of a drafter without a selector."""
LAYERS, TAPS, BLOCK, WIDE, VOCAB, WINDOW = 64, 64, 64, 1 << 17, 1 << 22, 1 << 22
"""The largest that is believed of each; checked before anything is computed."""

OWN = {
    *("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "mask_token_id"),
    *("target_layer_ids", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
}
"""Keys of `dflash_config`; published drafters hold some of them at the top level instead."""
READ = {
    *("architectures", "attention_bias", "dflash_config", "head_dim", "hidden_act", "hidden_size", "intermediate_size"),
    *("is_causal", "layer_types", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("num_target_layers", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window"),
    *("use_sliding_window", "vocab_size"),
}
SILENT = {
    *("_name_or_path", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range"),
    *("max_position_embeddings", "max_window_layers", "model_type", "pad_token_id", "tie_word_embeddings"),
    *("quantization", "quantization_config", "torch_dtype", "transformers_version", "use_cache"),
}
"""Keys that change no result here; of a quantisation `engine.checkpoint` knows whether it can be read."""


class Target(NamedTuple):
    """What must fit of the model that is drafted for."""

    hidden: int
    layers: int
    vocab: int
    drawn: int
    """Ids that it may draw: 0, 1, ... A padded vocabulary has more."""


@dataclass(frozen=True)
class Config:
    second: bool
    """DFlash2: convolutions around attention and MLP, and a selector behind the head."""
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    windows: tuple[int | None, ...]
    """A layer each: a row sees keys less than so many positions away; None: all."""
    causal: tuple[bool, ...]
    """A layer each: whether a block's row sees only the block's earlier rows."""
    block: int
    """Rows of a block: the pending token and block - 1 guesses."""
    mask: int
    """The id that stands for a guess."""
    taps: tuple[int, ...]
    """The target's layers whose rows are read."""
    vocab: int
    """Ids that the codebooks have rows for."""
    guessed: int
    """Ids that are guessed: 0, 1, ..., those of them that the target may draw."""
    candidates: int
    """Guesses kept a place."""
    scale: float
    """Of the embedded rows."""
    multiplier: float
    """Of the logits."""
    softcap: float
    """Logits are squeezed into ±softcap; 0: they are not."""
    kernel: int = 0
    group: int = 0
    rank: int = 0
    """DFlash2: taps of a convolution, channels that share a correction, width of the codebooks."""

    @property
    def name(self) -> str:
        return "DFlash2" if self.second else "DFlash"

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def reach(self) -> int | None:
        """Context rows that any layer can see; None: all."""
        return None if None in self.windows else max(self.windows) - 1


def read(config: dict[str, Any], target: Target) -> Config:
    """Raises Refusal naming the key that is missing, unknown, out of range or of another target."""
    second = architecture(config)
    own = config.get("dflash_config", {})
    if not isinstance(own, dict):
        raise refused("dflash_config is no object")
    known(config, own)
    c = {**config, **own}
    layers, hidden = whole(c, "num_hidden_layers", 1, LAYERS), whole(c, "hidden_size", 1, WIDE)
    if hidden != target.hidden:
        raise refused(f"its rows have {hidden} features (hidden_size) and the model's {target.hidden}")
    kinds = kinds_of(c, layers)
    made = Config(
        second=second,
        hidden=hidden,
        intermediate=whole(c, "intermediate_size", 1, WIDE),
        heads=whole(c, "num_attention_heads", 1, 1024),
        kv_heads=whole(c, "num_key_value_heads", 1, 1024),
        head_dim=whole(c, "head_dim", 2, 1024),
        eps=real(c, "rms_norm_eps", 1e-12, 1.0),
        theta=theta(c),
        windows=windows(c, kinds),
        causal=causal(c, kinds),
        block=whole(c, "block_size", 2, BLOCK),
        mask=whole(c, "mask_token_id", 0, target.vocab - 1),
        taps=taps(c, layers, target),
        vocab=(vocab := whole(c, "vocab_size", 1, VOCAB)),
        guessed=min(vocab, target.drawn),
        candidates=whole(c, "selector_top_k", 1, 256) if second else min(CANDIDATES, target.drawn),
        scale=real(c, "input_embedding_scale", -1e6, 1e6, 1.0),
        multiplier=real(c, "output_multiplier", -1e6, 1e6, 1.0),
        softcap=real(c, "final_logit_softcapping", 0.0, 1e6, 0.0),
        **convolution(c, hidden) if second else {},
    )
    fitting(made, target)
    return made


def architecture(config: dict[str, Any]) -> bool:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise refused(f"architectures names {str(name)[:60]!r}, not {' or '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def known(config: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuses keys of no known meaning, unless their value says nothing."""
    for part, names in ((config, OWN | READ | SILENT), (own, OWN)):
        for key, value in part.items():
            if key not in names and value not in (None, False, [], {}):
                raise refused(f"{key[:60]!r} is not known and may change what it computes")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise refused(f"hidden_act is {str(act)[:40]!r}; only silu is known")
    if config.get("attention_bias"):
        raise refused("attention_bias is set; no published drafter has biases")


def kinds_of(c: Mapping[str, Any], layers: int) -> list[bool]:
    """A layer each: whether its attention slides."""
    kinds = c.get("layer_types")
    if kinds is None:
        if c.get("use_sliding_window"):
            raise refused("use_sliding_window is set without layer_types")
        kinds = ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise refused(f"layer_types must list {layers} layers")
    names = {"full_attention": False, "sliding_attention": True}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in names:
            raise refused(f"layer_types has {str(kind)[:40]!r}; known are {' and '.join(names)}")
    return [names[kind] for kind in kinds]


def windows(c: Mapping[str, Any], sliding: list[bool]) -> tuple[int | None, ...]:
    if not any(sliding):
        return (None,) * len(sliding)
    if c.get("use_sliding_window") is False:
        raise refused("layer_types has sliding layers and use_sliding_window is false")
    window = whole(c, "sliding_window", 2, WINDOW)
    return tuple(window if slides else None for slides in sliding)


def causal(c: Mapping[str, Any], sliding: list[bool]) -> tuple[bool, ...]:
    """Where is_causal does not say, sliding layers are and full layers are not."""
    said = c.get("is_causal")
    if said is not None and not isinstance(said, bool):
        raise refused(f"is_causal is {str(said)[:40]!r}, neither true nor false")
    return tuple(sliding) if said is None else (said,) * len(sliding)


def theta(c: Mapping[str, Any]) -> float:
    """The rotary base; the whole head is rotated."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = c.get(name) or {}
        if not isinstance(part, dict):
            raise refused(f"{name} is no object")
        kind = part.get("rope_type", part.get("type", "default"))
        if kind != "default" or part.get("partial_rotary_factor", 1.0) != 1.0:
            raise refused(f"{name} asks for another rotary embedding ({str(kind)[:40]}) than the plain one")
        if strange := part.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}:
            raise refused(f"{name} has {min(map(str, strange))[:40]!r}, which is not known")
        rope |= part
    return real({"rope_theta": rope.get("rope_theta", c.get("rope_theta"))}, "rope_theta", 1.0, 1e12)


def taps(c: Mapping[str, Any], layers: int, target: Target) -> tuple[int, ...]:
    """The target's layers that are read; where the config does not say, evenly from 1 to the last but two."""
    depth = whole(c, "num_target_layers", 1, 1 << 16, target.layers)
    if depth != target.layers:
        raise refused(f"it was made for a model of {depth} layers (num_target_layers) and this one has {target.layers}")
    ids = c.get("target_layer_ids")
    if ids is None:
        span = max(depth - 4, 0)
        ids = [depth // 2] if layers == 1 else [round(1 + i * span / (layers - 1)) for i in range(layers)]
    if not isinstance(ids, list) or not 1 <= len(ids) <= TAPS or any(type(i) is not int for i in ids):
        raise refused(f"target_layer_ids must list 1 to {TAPS} layer numbers")
    if ids[0] < 0 or sorted(set(ids)) != ids:
        raise refused("target_layer_ids must count up from 0 or more")
    if ids[-1] >= depth:
        raise refused(f"target_layer_ids asks for layer {ids[-1]} and the model's last is {depth - 1}")
    return tuple(ids)


def convolution(c: Mapping[str, Any], hidden: int) -> dict[str, int]:
    """Of the convolutions and the selector."""
    group = whole(c, "conv_group_size", 1, WIDE)
    if hidden % group:
        raise refused(f"conv_group_size {group} does not divide hidden_size {hidden}")
    return {
        "kernel": whole(c, "conv_kernel_size", 1, 16),
        "group": group,
        "rank": whole(c, "selector_rank", 1, 1 << 14),
    }


def fitting(c: Config, target: Target) -> None:
    if c.heads % c.kv_heads:
        raise refused(f"num_attention_heads {c.heads} is no multiple of num_key_value_heads {c.kv_heads}")
    if c.head_dim % 2:
        raise refused(f"head_dim is {c.head_dim}; it must be even")
    if c.vocab > target.vocab:
        raise refused(f"it guesses {c.vocab:,} ids (vocab_size) and the model has {target.vocab:,}")
    if c.candidates > c.guessed:
        raise refused(f"{c.candidates} candidates a place are to be chosen of {c.guessed} ids")


def whole(c: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None) -> int:
    value = c.get(name)
    if value is None:
        if default is None:
            raise refused(f"it lacks {name}")
        return default
    if type(value) is not int or not low <= value <= high:
        raise refused(f"{name} is {str(value)[:40]}; it must be a whole number from {low} to {high}")
    return value


def real(c: Mapping[str, Any], name: str, low: float, high: float, default: float | None = None) -> float:
    value = c.get(name)
    if value is None:
        if default is None:
            raise refused(f"it lacks {name}")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise refused(f"{name} is {str(value)[:40]}; it must be a number from {low:g} to {high:g}")
    return float(value)


def refused(what: str) -> Refusal:
    return Refusal(f"config.json: {what}.", OTHER)
