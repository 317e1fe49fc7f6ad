"""Paged keys and values: PAGE rows of one sequence a page, as bf16, or as e4m3 with a float32 scale a row and head.

A row's stored bits are a function of the row alone: what a window is attended with is what its commit stores. Pages
are made of zeros; rows past a sequence's end may hold anything, they are never read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .common import jit, launchable, on_fp8_grid, power_of_two, tl

PAGE = 512
"""Rows a page; the round pass cuts its keys into chunks of the same."""
E4M3 = torch.float8_e4m3fn
HIGHEST = 448.0
"""The largest e4m3 number."""


class Rows(NamedTuple):
    """Keys and values as they are stored: of rows [..., KV, d], or of a layer's pages [pages, KV, PAGE, d]."""

    k: Tensor
    v: Tensor
    """bf16 or e4m3."""
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    """float32, k's shape without d; None with bf16."""

    @property
    def fp8(self) -> bool:
        return self.k_scale is not None

    def layer(self, i: int) -> Rows:
        """Entry i of a leading dimension."""
        return Rows(*(None if x is None else x[i] for x in self))


def pages(
    count: int, kv_heads: int, dim: int, fp8: bool, device: torch.device | str, layers: int | None = None
) -> Rows:
    """Empty pages of one layer, or of `layers` layers with these in front."""
    shape = (*(() if layers is None else (layers,)), count, kv_heads, PAGE)
    k, v = (torch.zeros(*shape, dim, dtype=E4M3 if fp8 else torch.bfloat16, device=device) for _ in range(2))
    scales = [torch.zeros(shape, device=device) if fp8 else None for _ in range(2)]
    return Rows(k, v, *scales)


def stored(k: Tensor, v: Tensor, fp8: bool) -> Rows:
    """New keys and values bf16 [..., KV, d] as they will be stored.

    e4m3: scale = largest magnitude / 448 of a row and head (1 for a row of zeros), value = x / scale rounded.
    """
    if not fp8:
        return Rows(k, v)
    (k8, k_scale), (v8, v_scale) = quantise(k), quantise(v)
    return Rows(k8, v8, k_scale, v_scale)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 [..., d], contiguous -> (e4m3 [..., d], float32 scales [...])."""
    if not launchable(x):
        return quantise_twin(x)
    values = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    d = x.shape[-1]
    _quantise[(scales.numel(),)](x.contiguous(), values, scales, d, power_of_two(d), HIGHEST, num_warps=1)
    return values, scales


def quantise_twin(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    high = x.abs().amax(-1)
    scales = torch.where(high > 0, high / high.new_tensor(HIGHEST), 1.0)  # by a number, a GPU would multiply
    return (x / scales[..., None]).clamp(-HIGHEST, HIGHEST).to(E4M3), scales


@jit
def _quantise(x, values, scales, D: tl.constexpr, WIDTH: tl.constexpr, HIGHEST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    numbers = tl.load(x + row * D + i, mask=i < D, other=0.0).to(tl.float32)
    high = tl.max(tl.abs(numbers), 0)
    scale = tl.where(high > 0, tl.div_rn(high, HIGHEST), 1.0)
    units = on_fp8_grid(tl.div_rn(numbers, scale))
    tl.store(values + row * D + i, units.to(tl.float8e4nv), mask=i < D)
    tl.store(scales + row, scale)


def write(rows: Rows, into: Rows, table: Tensor, slots: Tensor, places: Tensor) -> None:
    """Put rows [L, KV, d] into one layer's pages: row i at place `places[i]` (int32 [L], absolute) of the sequence in
    slot `slots[i]` (int32 [L]). table int32 [slots, most pages]: each sequence's pages in order."""
    if not launchable(rows.k):
        page = table[slots.long(), (places // PAGE).long()].long()
        for x, y in zip(rows, into):
            if x is not None:
                y[page, :, (places % PAGE).long()] = x
        return
    L, kv, d = rows.k.shape
    for x, scale, y, y_scale in _halves(rows, into):
        _write[(L, kv)](
            x, scale, y, y_scale, table, slots, places, table.shape[1],
            x.stride(0), d, power_of_two(d), PAGE, scale is not None, num_warps=1,
        )  # fmt: skip


def _halves(rows: Rows, into: Rows):
    """Keys, then values: (x, scale, pages, their scales), a byte a number where there are scales."""
    keys = rows.k, rows.k_scale, into.k, into.k_scale
    values = rows.v, rows.v_scale, into.v, into.v_scale
    for x, scale, y, y_scale in (keys, values):
        if scale is not None:
            x, y = x.view(torch.uint8), y.view(torch.uint8)
        yield x, scale, y, y_scale


@jit(do_not_specialize=["most"])
def _write(
    x, scale, pages, page_scales, table, slots, places, most,
    STRIDE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """A program a row and kv head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, place = tl.load(slots + row).to(tl.int64), tl.load(places + row)
    page = tl.load(table + slot * most + place // PAGE).to(tl.int64)
    to = (page * tl.num_programs(1) + head) * PAGE + place % PAGE
    i = tl.arange(0, WIDTH)
    tl.store(pages + to * D + i, tl.load(x + row * STRIDE + head * D + i, mask=i < D), mask=i < D)
    if FP8:
        tl.store(page_scales + to, tl.load(scale + row * tl.num_programs(1) + head))


def commit(window: Rows, into: Rows, table: Tensor, slots: Tensor, rows: Tensor, path: Tensor, steps: Tensor) -> None:
    """Store the walked path of S windows in N layers' pages.

    window [N, S, R, KV, d]; into [N, pages, KV, PAGE, d]; slots, rows int32 [S]: each stream's slot and committed rows
    before this round; path int32 [S, R]: the window's rows walked, in order; steps int32 [S]: how many there are.
    """
    if not launchable(window.k):
        for s, (slot, start, n) in enumerate(zip(slots.tolist(), rows.tolist(), steps.tolist())):
            place = torch.arange(start, start + n)
            page = table[slot, place // PAGE].long()
            for x, y in zip(window, into):
                if x is not None:
                    y[:, page, :, place % PAGE] = x[:, s, path[s, :n].long()].transpose(0, 1)
        return
    N, S, R, kv, d = window.k.shape
    for x, scale, y, y_scale in _halves(window, into):
        _commit[(N * S * R, kv)](
            x, scale, y, y_scale, table, slots, rows, path, steps, S, R, into.k.shape[1], table.shape[1],
            d, power_of_two(d), PAGE, scale is not None, num_warps=1,
        )  # fmt: skip


@jit(do_not_specialize=["S", "R", "count", "most"])
def _commit(
    x, scale, pages, page_scales, table, slots, rows, path, steps, S, R, count, most,
    D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """A program a layer, stream, step of the path and kv head."""
    n, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    layer, s, step = n // (S * R), n // R % S, n % R
    if step < tl.load(steps + s):
        place = tl.load(rows + s) + step
        page = tl.load(table + tl.load(slots + s).to(tl.int64) * most + place // PAGE).to(tl.int64)
        to = ((layer.to(tl.int64) * count + page) * heads + head) * PAGE + place % PAGE
        row = ((layer.to(tl.int64) * S + s) * R + tl.load(path + s * R + step)) * heads + head
        i = tl.arange(0, WIDTH)
        tl.store(pages + to * D + i, tl.load(x + row * D + i, mask=i < D), mask=i < D)
        if FP8:
            tl.store(page_scales + to, tl.load(scale + row))
