"""Attention of rows over keys, exact in its sums: no chunk size, window or neighbour can move a row's bits.

Keys are stored on their row's grid, values as units and a scale a row (`Keys`). A row's scores are exact dot products;
its maximum needs no order; its weights exp(s - max) come one by one; their sum and their mix of the values are exact
again. Keys past a row's own place, or off its path in a tree, get weight zero and drop out without a trace.

With fp8 a key and a value are rounded to e4m3, one scale a row and head, before anything attends them. An e4m3 number
is a multiple of 2^-9 below 2^9, so it lies on a grid of 18 bits, and every sum stays exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import exact

SINGLE = 24
"""Bits that float32 holds: what is stored can be kept as float32 without loss."""
AT_ONCE = 1 << 19
"""Scores held at once, about: more would leave a CPU's cache."""


E4M3_BITS = 18
HIGHEST = 448.0
"""The largest e4m3 number."""


class Bits:
    """Grid widths for one attention shape: head dimension `dim`, at most `keys` keys; `fp8`: the keys are e4m3."""

    def __init__(self, dim: int, keys: int, fp8: bool = False):
        self.fp8 = fp8
        self.query, key = exact.split(dim)
        self.weight, value = exact.split(keys)
        if fp8:
            self.weight -= max(0, E4M3_BITS - value)
        self.key, self.value = min(key, SINGLE), min(value, SINGLE)


def prepare(k: Tensor, v: Tensor, bits: Bits) -> tuple[Tensor, Tensor, Tensor]:
    """New keys and values [L, KV, d] float32 -> what is stored: k, v float64 [KV, L, d], v_scale float64 [KV, L]; with
    fp8 k and v are e4m3 numbers, v's divided by 512, and the scales [KV, L, 2] are v's and k's."""
    if bits.fp8:
        (k, k_scale), (v, v_scale) = e4m3(k.transpose(0, 1)), e4m3(v.transpose(0, 1))
        return k, v / 512, torch.stack([v_scale * 512, k_scale], -1)
    units, scale = exact.units(v.transpose(0, 1), bits.value)
    return exact.on_grid(k.transpose(0, 1), bits.key), units, scale


def attend(
    q: Tensor, k: Tensor, v: Tensor, v_scale: Tensor, start: int | None, bits: Bits, sees: Tensor | None = None
) -> Tensor:
    """Softmax attention with scale d^-0.5.

    q [L, H, d] float32; k, v, v_scale as stored, n keys. Row i sits at place `start` + i and sees the keys up to its
    own; `start` None: every row sees every key. `sees` bool [L, L]: row i sees the keys before `start` and, of the L
    behind them, those it says instead. Query head h uses kv head h // (H / KV). Returns float32 [L, H · d].
    """
    if sees is not None:
        return block(q, k, v, v_scale, start, bits, sees)
    rows, heads, _ = q.shape
    step = max(AT_ONCE // (heads * k.shape[1]), 16)
    outs = []
    for first in range(0, rows, step):
        last = min(first + step, rows)
        if start is None:
            outs.append(block(q[first:last], k, v, v_scale, None, bits))
        else:
            n = start + last
            outs.append(block(q[first:last], k[:, :n], v[:, :n], v_scale[:, :n], start + first, bits))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def block(
    q: Tensor, k: Tensor, v: Tensor, v_scale: Tensor, start: int | None, bits: Bits, sees: Tensor | None = None
) -> Tensor:
    """`attend` for rows whose scores are held at once."""
    rows, heads, d = q.shape
    groups, n = k.shape[0], k.shape[1]
    grouped = exact.on_grid(q, bits.query).view(rows, groups, -1, d).transpose(0, 1).reshape(groups, -1, d)
    scores = grouped @ k.transpose(1, 2)
    if bits.fp8:
        v_scale, k_scale = v_scale.unbind(-1)
        scores *= k_scale[:, None]
    scores = scores.float() * d**-0.5
    if sees is not None:
        scores[..., start:].masked_fill_(~sees.repeat_interleave(heads // groups, 0), float("-inf"))
    elif start is not None and rows > 1:
        place = torch.arange(start, start + rows, device=q.device).repeat_interleave(heads // groups)
        scores.masked_fill_(torch.arange(n, device=q.device) > place[:, None], float("-inf"))
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = exact.fixed(weights).sum(-1, keepdim=True)
    mixed = exact.mix(weights, v, v_scale, bits.weight) / total
    return mixed.float().view(groups, rows, -1, d).transpose(0, 1).reshape(rows, heads * d)


def e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] float32 as e4m3 numbers [..., d] and scales [...], both float64; a scale is a float32, a row's largest
    magnitude / 448 (1 for a row of zeros)."""
    scale = x.abs().amax(-1) / HIGHEST
    scale = torch.where(scale > 0, scale, 1.0)
    rounded = (x / scale[..., None]).clamp_(-HIGHEST, HIGHEST).to(torch.float8_e4m3fn)
    return rounded.double(), scale.double()


def attend_twin(q: Tensor, k: Tensor, v: Tensor, start: int | None) -> Tensor:
    """Plain float64 softmax attention over k, v [n, KV, d] as projected."""
    rows, heads, d = q.shape
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("lhd,nhd->hln", q.double(), k) * d**-0.5
    if start is not None:
        place = torch.arange(start, start + rows, device=q.device)
        scores = scores.masked_fill(torch.arange(len(k), device=q.device) > place[:, None], float("-inf"))
    return torch.einsum("hln,nhd->lhd", scores.softmax(-1), v).reshape(rows, -1).float()
