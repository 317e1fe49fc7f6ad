"""The tensors' names: every exporter's spelling put into one, Hugging Face's."""

from __future__ import annotations

import re

TEXT = "model.language_model."
VISUAL = "model.visual."
PREFIXES = (
    (TEXT, TEXT), ("language_model.model.", TEXT), ("language_model.lm_head.", "lm_head."),
    (VISUAL, VISUAL), ("visual.", VISUAL), ("vision_tower.", VISUAL),
    *((p, p) for p in ("model.vision_tower.", "model.embed_vision.", "model.vision_embedder.")),
    *((p, p) for p in ("model.audio_tower.", "model.embed_audio.")),
    ("backbone.", TEXT), ("model.", TEXT),
)  # fmt: skip
"""Stored prefix → ours; the first that fits wins. Other names (`lm_head.`, `mtp.`) stay."""

BUFFERS = ("*.rotary_emb.inv_freq",)
"""Never weights: computed from the config."""

ORDER = (TEXT + "embed", TEXT + "layers.", TEXT, "lm_head.", VISUAL)
"""Prefixes in the order in which a family asks for what begins with them."""


def normalised(name: str) -> str:
    for prefix, ours in PREFIXES:
        if name.startswith(prefix):
            return ours + name[len(prefix) :]
    return name


def place(name: str) -> tuple[int, list[int | str]] | None:
    """Sorts names about as a family asks for them: layer 2 before layer 10. None: a name it may never ask for."""
    rank = next((rank for rank, prefix in enumerate(ORDER) if name.startswith(prefix)), None)
    if rank is None:
        return None
    return rank, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
