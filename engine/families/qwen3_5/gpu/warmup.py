"""Warm-up: every kernel that a model launches is compiled before its first request, many at once.

The passes are gone through with nothing running, over one layer of each structure: which kernels are launched, and
compiled anew for which arguments, depends on neither the layer nor the rows' contents.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tfmagic.kernels.gpu.compiling import compiled_only
from tfmagic.kernels.gpu.packing import prompts

from .forward import Forward
from .rounds import BUCKETS, Bucket, Round
from .short import BUCKETS as SHORT
from .short import Pass

if TYPE_CHECKING:
    from .model import Model

LENGTHS = ((700,), (1500,), (4096,), (64, 70, 300))
"""Prompts of a pass: between them, every tile of a product of more than a few rows."""
TOKENS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Rows of a picture, likewise."""


def warm_up(model: Model, size: int) -> None:
    """`size`: ids at or beyond it are never drawn."""
    few = copy(model)
    few.text = text = one_of_each(model.text)
    with compiled_only():  # what takes longest comes first
        for lengths in LENGTHS:
            states, marks = [model.new_state() for _ in lengths], [[64] for _ in lengths]
            packed = prompts([one.slot.index for one in states], [0] * len(lengths), lengths, marks, "cpu")
            at = [torch.arange(n).expand(3, -1) for n in lengths]
            few._packed([(one, [0] * n, {}, *more) for one, n, *more in zip(states, lengths, at, marks)], packed)
        for tokens in TOKENS if model.eyes else ():
            p, merge = model.preprocessor, model.config.vision.merge
            model.tower(torch.zeros(tokens * merge**2, 3 * p.frames * p.patch**2), (1, merge, tokens * merge))
        for rows in SHORT:
            Pass(rows, text, model.graphs)
        for streams in BUCKETS:
            for rows in BUCKETS:
                Round(Bucket(streams, rows, size, True), text, model.graphs, None)
        Round(Bucket(1, 1, size, False, logprobs=True), text, model.graphs, None)  # draws are the same for all shapes


def one_of_each(forward: Forward) -> Forward:
    """The same passes over the first layer of each structure; nothing is tapped, since a tap is a copy."""
    few = copy(forward)
    layers = {structure(layer): layer for layer in reversed(forward.w.layers)}
    few.w, few.taps = replace(forward.w, layers=list(layers.values())), []
    return few


def structure(x: Any) -> Any:
    """Types, dtypes and shapes of weights, hashable: equal ones launch the same kernels."""
    if isinstance(x, Tensor):
        return x.dtype, tuple(x.shape)
    parts = vars(x).values() if hasattr(x, "__dict__") else x if isinstance(x, tuple) else ()
    return (type(x), *map(structure, parts)) if parts else x
