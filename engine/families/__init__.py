"""The architectures: one folder each, one line here each.

A family object gives the engine what it needs of a model: see `qwen3_5.Model`, whose public names are the seam.
"""

from __future__ import annotations

from importlib import import_module

FAMILIES = {"qwen3_5": "tfmagic.engine.families.qwen3_5"}
"""`model_type` of config.json -> the module whose `Model(checkpoint, device, context)` runs it."""


def load(checkpoint, device, context: int | None = None):
    """The model of a checkpoint, weights read and ready. Raises Refusal naming what does not fit."""
    return import_module(checkpoint.choose(FAMILIES)).Model(checkpoint, device, context)
