from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tfmagic.engine import families
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.block import Drafter
from tfmagic.engine.drafting.dflash.config import OWN

GOLDEN = Path(__file__).parent.parent / "golden"
SMALL = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "is_causal": False,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "vocab_size": 80,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 12,
    "dflash_config": {
        "block_size": 6,
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 8,
        "selector_top_k": 16,
        "mask_token_id": 77,
        "target_layer_ids": [1, 4],
    },
}
"""A DFlash2 drafter for `Target`."""


class Target:
    """What a drafter borrows of a model: 6 layers, 80 ids, rows of 32."""

    depth = 6

    def __init__(self, vocab: int = 80, hidden: int = 32):
        g = torch.Generator().manual_seed(5)
        self.matrices = [torch.randn(vocab, hidden, generator=g) * 0.5 for _ in range(2)]

    def embedding(self) -> torch.Tensor:
        return self.matrices[0]

    def head(self, size: int):
        return lambda rows: rows.float() @ self.matrices[1][:size].t()


def shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """The published layout's tensors for this config."""
    own = c["dflash_config"]
    D, inter, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    found = {"fc.weight": (D, len(own["target_layer_ids"]) * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    second = c["architectures"] == ["DFlash2DraftModel"]
    for i in range(c["num_hidden_layers"]):
        part = {
            "input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,),
            "self_attn.q_proj.weight": (q, D), "self_attn.k_proj.weight": (kv, D), "self_attn.v_proj.weight": (kv, D),
            "self_attn.o_proj.weight": (D, q), "self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,),
            "mlp.gate_proj.weight": (inter, D), "mlp.up_proj.weight": (inter, D), "mlp.down_proj.weight": (D, inter),
        }  # fmt: skip
        for name in ("attention_conv", "mlp_conv") if second else ():
            part[f"{name}.base_kernel"] = (2, own["conv_kernel_size"], D)
            part[f"{name}.kernel_projection.weight"] = (2 * own["conv_kernel_size"] * D // own["conv_group_size"], D)
        found |= {f"layers.{i}.{name}": shape for name, shape in part.items()}
    if second:
        book = (c["vocab_size"], own["selector_rank"])
        found |= {f"candidate_selector.{name}_codebook": book for name in ("predecessor", "successor")}
        found["candidate_selector.hidden_projection.weight"] = (own["selector_rank"], D)
    return found


def weights(c: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def fill(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        x = torch.randn(shape, generator=g)
        return 1 + 0.2 * x if "norm" in name else 0.5 * x if "codebook" in name or "kernel" in name else 0.2 * x

    return {name: fill(name, shape) for name, shape in shapes(c).items()}


def changed(**changes) -> dict:
    """`SMALL` with these keys changed, those of dflash_config too; None removes one."""
    own = {**SMALL["dflash_config"], **{k: v for k, v in changes.items() if k in OWN}}
    c = {**SMALL, **{k: v for k, v in changes.items() if k not in own}}
    c, own = ({k: v for k, v in part.items() if v is not None} for part in (c, own))
    return {**c, "dflash_config": own}


FIRST = {
    "architectures": ["DFlashDraftModel"],
    **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")),
}
"""Changes that make a drafter of the first kind."""


@pytest.fixture
def write(tmp_path):
    """Writes a drafter's folder and returns its path."""

    def write(c: dict, tensors: dict | None = None) -> Path:
        folder = tmp_path / f"drafter-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(c))
        save_file(weights(c) if tensors is None else tensors, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture
def opened(write):
    """A drafter of these changes to `SMALL`, for `Target`; its weights as `tensors`, its config as `given`."""

    def opened(bits: int = 16, **changes) -> Drafter:
        c = changed(**changes)
        drafter = Drafter(Checkpoint(write(c)), target := Target(), bits=bits)
        drafter.test = SimpleNamespace(config=c, tensors=weights(c), target=target)
        return drafter

    return opened


def taps(rows: int, seed: int = 0, width: int = 64) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def tiny():
    return families.load(Checkpoint(GOLDEN / "qwen3_5_tiny"), "cpu")


@pytest.fixture(scope="session")
def golden():
    return load_file(GOLDEN / "dflash_tiny" / "golden.safetensors")
