"""From the fused projection of an attention layer to normed, rotated queries and stored keys and values.

What is stored for a round's window is rounded as what is stored in pages, so a row that a round has attended to is bit
for bit the row that its commit stores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import EARLY, cdiv, jit, launchable, on_fp8_grid, power_of_two, take_turn, tl
from .norm import rms_twin
from .pages import PAGE, Rows, quantise_twin


def tables(positions: Tensor, inverse: Tensor, axis: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of a pass's rows, once for all layers: positions int32 [3, rows], or [rows] where the three are one;
    inverse float32 [r / 2], axis int64 [r / 2] (`kernels.rotary`) -> two float32 [rows, r / 2]."""
    rows = positions.float()
    angles = rows[:, None] * inverse if positions.dim() == 1 else (rows[axis] * inverse[:, None]).t().contiguous()
    return torch.cos(angles), torch.sin(angles)


def norm_rope_write(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    into: Rows,
    table: Tensor | None = None,
    slots: Tensor | None = None,
    places: Tensor | None = None,
    q: Tensor | None = None,
) -> Tensor:
    """One attention layer's rows: norms of q and k over d, rotation of their first r dims by halves, keys and values
    stored as bf16 or fp8 (as `pages.stored` does, from the bf16 row). Float32 from the projection to the rounding.

    qkv bf16 [L, heads · 2d + 2 · KV · d]: of each head the query and its gate, then the keys, then the values (rows may
    be strided); q_norm, k_norm [d] float32 (1 + w); cos, sin float32 [L, r / 2] (`tables`). With a `table` (int32
    [slots, most pages]) `into` is one layer's pages, and row i goes to place `places[i]` of the sequence in slot
    `slots[i]` (int32 [L]); without, it is the rows of a round's windows, [L, KV, d], and row i goes to row i.

    Returns q bf16 [L, heads, d].
    """
    L, d = len(qkv), into.k.shape[-1]
    kv = into.k.shape[1]
    if qkv.shape[1] != 2 * (heads + kv) * d:
        raise ValueError(f"rows of {qkv.shape[1]} for {heads} gated heads and {kv} keys and values of {d}")
    q = qkv.new_empty(L, heads, d) if q is None else q
    if not launchable(qkv):
        return norm_rope_write_twin(qkv, q_norm, k_norm, eps, cos, sin, heads, into, table, slots, places, q)
    if L:
        paged = table is not None
        where = (table, slots, places) if paged else (qkv, qkv, qkv)
        scales = (into.k_scale, into.v_scale) if into.fp8 else (into.k, into.v)
        first = [x.stride(0) for x in (into.k, scales[0])]
        _norm_rope_write[(L, heads + kv)](
            qkv, q_norm, k_norm, cos, sin, q, into.k, into.v, *scales, *where,
            qkv.stride(0), q.stride(0), *first, table.stride(0) if paged else 0, eps, heads, kv, d, cos.shape[-1],
            PAGE, power_of_two(d), into.fp8, paged, EARLY, num_warps=1 if d <= 128 else 2, launch_pdl=EARLY,
        )  # fmt: skip
    return q


def gated(o: Tensor, qkv: Tensor, out: Tensor | None = None) -> Tensor:
    """An attention layer's rows times the sigmoid of their gates, rounded once: o bf16 [rows, heads, d], the gates from
    the projection qkv that `norm_rope_write` took -> bf16 [rows, heads · d]."""
    rows, heads, d = o.shape
    out = o.new_empty(rows, heads * d) if out is None else out
    if not launchable(o):
        gate = qkv[:, : 2 * heads * d].reshape(rows, heads, 2 * d)[..., d:].double()
        return out.copy_((o.double() * torch.sigmoid(gate)).flatten(1))
    if rows:
        together = max(1, min(power_of_two(heads), 2048 // power_of_two(d)))
        strides = o.stride(0), o.stride(1), qkv.stride(0), out.stride(0)
        grid, width = (rows, cdiv(heads, together)), power_of_two(d)
        _gated[grid](o, qkv, out, *strides, heads, d, together, width, EARLY, num_warps=4, launch_pdl=EARLY)
    return out


@jit
def _norm_rope_write(
    qkv, q_norm, k_norm, cos, sin, q, k_out, v_out, k_scale, v_scale, table, slots, places,
    s_in, s_q, s_first, s_scale, s_table, eps,
    heads: tl.constexpr, kv: tl.constexpr, d: tl.constexpr, half: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, FP8: tl.constexpr, PAGED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program a row and query head, or pair of key and value heads."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    there = i < d
    base, angles = qkv + row * s_in, row * half
    if head < heads:
        turned = _normed_rotated(base + head * 2 * d, q_norm, cos + angles, sin + angles, eps, d, half, BLOCK)
        tl.store(q + row * s_q + head * d + i, turned.to(tl.bfloat16), mask=there)
    else:
        h = head - heads
        keys = base + (2 * heads + h) * d
        k = _normed_rotated(keys, k_norm, cos + angles, sin + angles, eps, d, half, BLOCK).to(tl.bfloat16)
        v = tl.load(keys + kv * d + i, mask=there, other=0.0)
        first, inside = row, h.to(tl.int64)
        if PAGED:
            place = tl.load(places + row)
            first = tl.load(table + tl.load(slots + row).to(tl.int64) * s_table + place // PAGE).to(tl.int64)
            inside = h.to(tl.int64) * PAGE + place % PAGE
        to = first * s_first + inside * d + i
        if FP8:
            scale_to = first * s_scale + inside
            _store_fp8(k.to(tl.float32), k_out + to, k_scale + scale_to, there)
            _store_fp8(v.to(tl.float32), v_out + to, v_scale + scale_to, there)
        else:
            tl.store(k_out + to, k, mask=there)
            tl.store(v_out + to, v, mask=there)


@jit
def _normed_rotated(x, w, cos, sin, eps, d: tl.constexpr, half: tl.constexpr, BLOCK: tl.constexpr):
    """A head's d values normed, the first 2 · half rotated; float32 [BLOCK]."""
    i = tl.arange(0, BLOCK)
    there = i < d
    a = tl.load(x + i, mask=there, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(a * a, 0) / d + eps)
    a = a * root * tl.load(w + i, mask=there, other=0.0)
    # The other half's value, read again: registers do not shift.
    turns = i < 2 * half
    j = tl.where(i < half, i + half, i - half)
    other = tl.load(x + j, mask=turns, other=0.0).to(tl.float32) * root * tl.load(w + j, mask=turns, other=0.0)
    angle = tl.where(i < half, i, i - half)
    c = tl.load(cos + angle, mask=turns, other=1.0)
    s = tl.load(sin + angle, mask=turns, other=0.0)
    return tl.fma(a, c, tl.where(i < half, -other, other) * s)


@jit
def _store_fp8(x, to, scale_to, there):
    """A row as e4m3 with its scale."""
    largest = tl.max(tl.abs(x), 0)
    scale = tl.where(largest > 0, tl.div_rn(largest, 448.0), 1.0)
    tl.store(scale_to, scale)
    tl.store(to, on_fp8_grid(tl.div_rn(x, scale)).to(tl.float8e4nv), mask=there)


@jit
def _gated(
    o, qkv, out, so, sh, sg, sy, heads: tl.constexpr, d: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    there = (head < heads) & (i < d)
    a = tl.load(o + row * so + head * sh + i, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(qkv + row * sg + head * 2 * d + d + i, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * sy + head * d + i, (a / (1.0 + tl.exp(-gate))).to(tl.bfloat16), mask=there)


def norm_rope_write_twin(qkv, q_norm, k_norm, eps, cos, sin, heads, into, table, slots, places, q) -> Tensor:
    """`norm_rope_write` in float64."""
    L, kv, d = len(qkv), into.k.shape[1], into.k.shape[-1]
    queries, k, v = qkv.split([2 * heads * d, kv * d, kv * d], -1)
    q.copy_(rotated_twin(rms_twin(queries.reshape(L, heads, 2 * d)[..., :d], q_norm, eps), cos, sin))
    k = rotated_twin(rms_twin(k.reshape(L, kv, d), k_norm, eps), cos, sin).bfloat16()
    parts = [(k, into.k, into.k_scale), (v.reshape(L, kv, d), into.v, into.v_scale)]
    for x, to, scale_to in parts:
        x, scale = quantise_twin(x) if into.fp8 else (x, None)
        for source, target in ((raw(x), raw(to)), (scale, scale_to)):
            if source is None:
                continue
            if table is None:
                target[:L] = source
            else:
                target[table[slots.long(), places.long() // PAGE].long(), :, places.long() % PAGE] = source
    return q


def raw(x: Tensor) -> Tensor:
    """fp8 as bytes, which every copy knows."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def rotated_twin(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, d] float64, its first 2 · half dims rotated by tables [rows, half]."""
    half = cos.shape[-1]
    c, s = cos[:, None].double(), sin[:, None].double()
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)
