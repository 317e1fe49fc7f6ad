"""Gated DeltaNet, first half: the short convolution with SiLU, the unit keys and queries, and the gates, in one pass.

c[t] = silu(Σ_j taps[j] · m[t - (K - 1) + j]), summed in float32 from the oldest row on and rounded to bf16 before SiLU
and after. Channels are all queries, all keys, all values. Then q / |q| · dk^-0.5 and k / |k| (1e-6 under the root),
g = -exp(A_log) · softplus(a + dt_bias) and β = sigmoid(b), as transformers' modeling_qwen3_5 has them.

A prompt row's earlier rows are those of its prompt; a window row's are its ancestors. Before either comes the state:
the last K - 1 rows committed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .common import EARLY, cdiv, fetch, jit, launchable, let_next_start, power_of_two, tl, wait_for_last
from .packing import CHUNK, ROWS, STREAMS, Prompts, Windows, locate

EPS = 1e-6
BLOCK = 32
"""Prompt rows of a program."""


class Heads(NamedTuple):
    """Heads of a Gated DeltaNet layer; value head h reads key head h // (values / keys)."""

    keys: int
    values: int
    dk: int
    dv: int

    @property
    def channels(self) -> int:
        return 2 * self.keys * self.dk + self.values * self.dv


class Weights(NamedTuple):
    taps: Tensor
    """bf16 [K, C], the last the current row's."""
    A_log: Tensor
    dt_bias: Tensor
    """float32 [Hv]"""


class Inputs(NamedTuple):
    """What the delta rule takes of rows [...]."""

    q: Tensor
    k: Tensor
    """bf16 [..., Hk, dk], unit length, q times dk^-0.5."""
    v: Tensor
    """bf16 [..., Hv, dv]"""
    decay: Tensor
    """float32 [..., Hv]: g of prompt rows, e^g of window rows."""
    beta: Tensor
    """float32 [..., Hv]"""


def inputs(shape: tuple[int, ...], heads: Heads, device: torch.device | str) -> Inputs:
    """Room for the inputs of rows of this shape."""
    return Inputs(
        *(torch.empty(*shape, heads.keys, heads.dk, dtype=torch.bfloat16, device=device) for _ in range(2)),
        torch.empty(*shape, heads.values, heads.dv, dtype=torch.bfloat16, device=device),
        *(torch.empty(*shape, heads.values, device=device) for _ in range(2)),
    )


def convolve(m: Tensor, a: Tensor, b: Tensor, conv: Tensor, weights: Weights, heads: Heads, prompts: Prompts) -> Inputs:
    """Packed prompt rows.

    m bf16 [L, C], a, b bf16 [L, Hv]: the layer's projections, rows of any stride; conv bf16 [slots, K - 1, C]: each
    sequence's last rows, the newest last, not read by a sequence that starts at row 0. `advance` moves it.
    """
    made = inputs((len(m),), heads, m.device)
    if not launchable(m):
        return convolve_twin(m, a, b, conv, weights, heads, prompts, made)
    check(m, weights, heads)
    grid = (cdiv(len(m), BLOCK) + prompts.sequences - 1, 2 * heads.keys + heads.values + 1)
    _convolve[grid](
        m, a, b, conv, weights.taps, weights.A_log, weights.dt_bias, *made,
        prompts.slots, prompts.starts, prompts.lengths, prompts.sequences, row_stride(m), row_stride(a), row_stride(b),
        *heads, power_of_two(heads.values), len(weights.taps), BLOCK, STREAMS, EPS, num_warps=4,
    )  # fmt: skip
    return made


def advance(m: Tensor, conv: Tensor, prompts: Prompts) -> Tensor:
    """Move each sequence's convolution state, in place, over its rows of a prompt pass. Returns the states to be kept,
    bf16 [kept, K - 1, C] (see `Prompts.keep`)."""
    kept = conv.new_empty(prompts.kept, *conv.shape[1:])
    back = conv.shape[1]
    if not launchable(m):
        ends = iter(prompts.keep.tolist())
        for slot, start, rows in prompts.parts():
            past = conv[slot] if start else torch.zeros_like(conv[slot])
            both = torch.cat([past, m[rows]])
            for end, place in zip(range(CHUNK, rows.stop - rows.start + CHUNK, CHUNK), ends):
                if place >= 0:
                    kept[place] = both[end : end + back]
            conv[slot] = both[len(both) - back :]
        return kept
    C = conv.shape[2]
    _advance[(prompts.chunks, cdiv(C, 1024))](
        m, conv, kept, prompts.slots, prompts.starts, prompts.lengths, prompts.keep, prompts.sequences, row_stride(m),
        C, back, CHUNK, STREAMS, num_warps=4,
    )  # fmt: skip
    return kept


def convolve_tree(
    m: Tensor,
    a: Tensor,
    b: Tensor,
    conv: Tensor,
    slots: Tensor,
    weights: Weights,
    heads: Heads,
    windows: Windows,
    out: Inputs | None = None,
) -> Inputs:
    """Rows of windows: m bf16 [S, R, C], a, b bf16 [S, R, Hv], of any stride a row; conv bf16 [slots, K - 1, C] is not
    moved; slots int32 [S], which no kernel of the round writes. The inputs' `decay` is e^g. `out`: where to put them,
    contiguous."""
    made = inputs(m.shape[:2], heads, m.device) if out is None else out
    if not launchable(m):
        return convolve_tree_twin(m, a, b, conv, slots, weights, heads, windows, made)
    check(m, weights, heads)
    S, R, _ = m.shape
    _convolve_tree[(S * R, 2 * heads.keys + heads.values + 1)](
        m, a, b, conv, weights.taps, weights.A_log, weights.dt_bias, *made, slots, windows.depths, windows.ancestors,
        R, row_stride(m), row_stride(a), row_stride(b),
        *heads, power_of_two(heads.values), len(weights.taps), ROWS, EPS, EARLY, num_warps=1, launch_pdl=EARLY,
    )  # fmt: skip
    return made


def conv_commit(m: Tensor, conv: Tensor, slots: Tensor, path: Tensor, steps: Tensor) -> None:
    """Move N layers' convolution states over the walked paths, in place.

    m bf16 [N, S, R, C]; conv bf16 [N, slots, K - 1, C]; slots int32 [S]; path int32 [S, R]: the rows walked, in order;
    steps int32 [S]: how many.
    """
    N, S, R, C = m.shape
    back = conv.shape[2]
    if not launchable(m):
        for s, (slot, n) in enumerate(zip(slots.tolist(), steps.tolist())):
            both = torch.cat([conv[:, slot], m[:, s, path[s, :n].long()]], 1)
            conv[:, slot] = both[:, n:]
        return
    _commit[(N * S, cdiv(C, 1024))](
        m, conv, slots, path, steps, S, R, conv.shape[1], m.stride(0), m.stride(1), m.stride(2), C, back, num_warps=4
    )


def row_stride(x: Tensor) -> int:
    """Elements from one row of x [L, ...] or [S, R, ...] to the next. A lone row's is 0, whatever the tensor says of
    it: a kernel is compiled anew for strides that are no multiple of 16, and its sums may then have another order."""
    lead = x.shape[:-1]
    strides = [(n, x.stride(i)) for i, n in enumerate(lead) if n > 1]
    if len(strides) == 2 and strides[0][1] != strides[1][0] * strides[1][1]:
        raise ValueError("the rows of windows must lie at one stride")
    return strides[-1][1] if strides else 0


def check(m: Tensor, weights: Weights, heads: Heads) -> None:
    """Raises ValueError for what the kernels do not take: m [..., C] of other channels, heads of other dimensions."""
    if m.shape[-1] != heads.channels or weights.taps.shape[1] != heads.channels:
        raise ValueError(f"{heads} takes {heads.channels} channels, not {m.shape[-1]} and {weights.taps.shape[1]}")
    if any(d < 16 or d & (d - 1) for d in (heads.dk, heads.dv)):
        raise ValueError(f"the kernels take heads of a power of two of dimensions, 16 at least, not {heads}")
    # A kernel is compiled for the alignment it meets, and sums may be ordered by it: it must always be the same.
    if m.data_ptr() % 16 or row_stride(m) % 8:
        raise ValueError("the convolution takes rows that start at multiples of 16 bytes")


def convolve_twin(m, a, b, conv, weights, heads, prompts, made):
    for slot, start, rows in prompts.parts():
        past = conv[slot] if start else torch.zeros_like(conv[slot])
        back = torch.cat([past, m[rows]]).unfold(0, len(weights.taps), 1).transpose(1, 2)
        for to, x in zip(made, _mixed(back, a[rows], b[rows], weights, heads)):
            to[rows] = x
    return made


def convolve_tree_twin(m, a, b, conv, slots, weights, heads, windows, made):
    taps = len(weights.taps)
    for s, (slot, paths) in enumerate(zip(slots.tolist(), windows.ancestors.tolist())):
        for r in range(m.shape[1]):
            path = [x for x in paths[r] if x >= 0][::-1]
            back = torch.cat([conv[slot], m[s, path]])[-taps:]
            x = _mixed(back[None], a[s, r : r + 1], b[s, r : r + 1], weights, heads)
            for to, y in zip(made, x):
                to[s, r] = y[0]
            made.decay[s, r] = torch.exp(x.decay[0])
    return made


def _mixed(back: Tensor, a: Tensor, b: Tensor, weights: Weights, heads: Heads) -> Inputs:
    """Of rows with the K rows up to each: back bf16 [n, K, C]."""
    y = torch.zeros(back.shape[0], back.shape[2])
    for j, tap in enumerate(weights.taps.float()):
        y = y + back[:, j].float() * tap
    y = y.bfloat16().float()
    y = (y * torch.sigmoid(y)).bfloat16().float()
    split = heads.keys * heads.dk
    q, k = (y[:, i * split : (i + 1) * split].reshape(len(y), heads.keys, heads.dk) for i in range(2))
    q, k = (x * torch.rsqrt(_sum_squares(x) + EPS) for x in (q, k))
    v = y[:, 2 * split :].reshape(len(y), heads.values, heads.dv)
    x = a.float() + weights.dt_bias.float()
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    g = -torch.exp(weights.A_log.float()) * softplus
    beta = torch.sigmoid(b.float()).bfloat16().float()
    return Inputs((q * heads.dk**-0.5).bfloat16(), k.bfloat16(), v.bfloat16(), g, beta)


def _sum_squares(x: Tensor) -> Tensor:
    """[..., d] -> [..., 1], the same order of addition for any number of rows."""
    x = x.double().square()
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        tail = torch.nn.functional.pad(x[..., half:], (0, 2 * half - x.shape[-1]))
        x = x[..., :half] + tail
    return x.float()


@jit
def silu(y):
    """float32 rows of the convolution: rounded to bf16, SiLU, rounded again, wide."""
    y = y.to(tl.bfloat16).to(tl.float32)
    return (y * tl.sigmoid(y)).to(tl.bfloat16).to(tl.float32)


@jit
def unit(y, EPS: tl.constexpr):
    """float32 y [d] at length one."""
    return y * tl.rsqrt(tl.sum(y * y, 0) + EPS)


@jit
def gates(a, b, A_log, dt_bias, h, heads):
    """g and β of gate inputs a, b [..., Hv]; h: which head each is."""
    x = a.to(tl.float32) + tl.load(dt_bias + h, mask=h < heads, other=0.0)
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(0.0 - tl.abs(x)))
    g = 0.0 - tl.exp(tl.load(A_log + h, mask=h < heads, other=0.0)) * softplus
    return g, tl.sigmoid(b.to(tl.float32)).to(tl.bfloat16).to(tl.float32)


@jit
def _prompt_rows(m, conv, taps, row, local, there, past, m_stride, C, c, K: tl.constexpr):
    """The convolution's sums [rows, channels] at channels c. past: the sequence's state, rows local < 0, or none."""
    y = tl.zeros([local.shape[0], c.shape[0]], tl.float32)
    for j in tl.static_range(K):
        source = local - (K - 1 - j)
        here = (there & (source >= 0))[:, None]
        x = tl.load(m + (row + source).to(tl.int64)[:, None] * m_stride + c[None, :], mask=here, other=0.0)
        before = (there & (source < 0) & past)[:, None]
        z = tl.load(conv + (K - 1 + source)[:, None] * C + c[None, :], mask=before, other=0.0)
        x = tl.where(here, x, z).to(tl.float32)
        y = tl.fma(x, tl.load(taps + j * C + c).to(tl.float32)[None, :], y)
    return silu(y)


@jit(do_not_specialize=["n"])
def _convolve(
    m, a, b, conv, taps, A_log, dt_bias, q, k, v, decay, beta, slots, starts, lengths, n, m_stride, a_stride, b_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GATES: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, MOST: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """A program a tile of rows and a head: a query, key or value head or, last, all gates."""
    C: tl.constexpr = 2 * HK * DK + HV * DV
    column = tl.program_id(1)
    sequence, row, own, tile = locate(lengths, n, tl.program_id(0), BLOCK, MOST)
    if sequence < n:
        local = tile * BLOCK + tl.arange(0, BLOCK)
        there = local < own
        spot = (row + local).to(tl.int64)[:, None]
        past = tl.load(starts + sequence) > 0
        conv += tl.load(slots + sequence).to(tl.int64) * (K - 1) * C
        if column < 2 * HK:
            d = tl.arange(0, DK)
            y = _prompt_rows(m, conv, taps, row, local, there, past, m_stride, C, column * DK + d, K)
            y = y * tl.rsqrt(tl.sum(y * y, 1) + EPS)[:, None]
            if column < HK:
                y = y * DK**-0.5
                tl.store(q + (spot * HK + column) * DK + d[None, :], y.to(tl.bfloat16), mask=there[:, None])
            else:
                tl.store(k + (spot * HK + column - HK) * DK + d[None, :], y.to(tl.bfloat16), mask=there[:, None])
        elif column < 2 * HK + HV:
            d = tl.arange(0, DV)
            head = column - 2 * HK
            y = _prompt_rows(m, conv, taps, row, local, there, past, m_stride, C, 2 * HK * DK + head * DV + d, K)
            tl.store(v + (spot * HV + head) * DV + d[None, :], y.to(tl.bfloat16), mask=there[:, None])
        else:
            h = tl.arange(0, GATES)[None, :]
            mask = there[:, None] & (h < HV)
            g, strength = gates(
                tl.load(a + spot * a_stride + h, mask=mask, other=0.0),
                tl.load(b + spot * b_stride + h, mask=mask, other=0.0),
                A_log, dt_bias, h, HV,
            )  # fmt: skip
            tl.store(decay + spot * HV + h, g, mask=mask)
            tl.store(beta + spot * HV + h, strength, mask=mask)


@jit(do_not_specialize=["n"])
def _advance(
    m, conv, kept, slots, starts, lengths, keep, n, m_stride,
    C: tl.constexpr, BACK: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A program a 64-row chunk and 1024 channels: the last BACK rows up to the chunk's end, where they are wanted."""
    chunk = tl.program_id(0)
    sequence, row, own, tile = locate(lengths, n, chunk, CHUNK, MOST)
    place = tl.load(keep + chunk)
    last = (tile + 1) * CHUNK >= own
    if (sequence < n) & ((place >= 0) | last):
        c = tl.program_id(1) * 1024 + tl.arange(0, 1024)
        state = conv + tl.load(slots + sequence).to(tl.int64) * BACK * C
        past = tl.load(starts + sequence) > 0
        end = tl.minimum((tile + 1) * CHUNK, own)
        # A sequence of fewer rows than BACK moves its own state: row j is read, row j - own < j written, so upwards.
        for j in tl.static_range(BACK):
            source = end - BACK + j
            x = tl.load(m + (row + source).to(tl.int64) * m_stride + c, mask=(c < C) & (source >= 0), other=0.0)
            z = tl.load(state + (BACK + source) * C + c, mask=(c < C) & (source < 0) & past, other=0.0)
            x = tl.where(source >= 0, x, z)
            if place >= 0:
                tl.store(kept + (place * BACK + j) * C + c, x, mask=c < C)
            if last:
                tl.store(state + j * C + c, x, mask=c < C)


@jit
def _window_rows(m, conv, taps, s, r, R, depth, path, m_stride, C, c, K: tl.constexpr):
    """The convolution's sum of one window row at channels c; path: its ancestors; conv: the stream's state."""
    y = tl.zeros([c.shape[0]], tl.float32)
    for j in tl.static_range(K):
        up = K - 1 - j
        row = tl.load(path + up)
        x = tl.load(m + (s * R + row).to(tl.int64) * m_stride + c, mask=(c >= 0) & (row >= 0), other=0.0)
        z = tl.load(conv + (K - 1 + depth - up) * C + c, mask=(c >= 0) & (row < 0), other=0.0)
        x = tl.where(row >= 0, x, z).to(tl.float32)
        y = tl.fma(x, tl.load(taps + j * C + c).to(tl.float32), y)
    return silu(y)


@jit
def _fetch_channels(taps, conv, first, WIDTH: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """Asks for what is read of `WIDTH` channels and written by no kernel that may still run: taps, and the state."""
    j = tl.arange(0, 4 if K <= 4 else 8)[:, None]
    c = first + tl.minimum(tl.arange(0, 4) * 64, WIDTH - 1)[None, :]  # a line holds 64
    fetch(taps + tl.minimum(j, K - 1) * C + c)
    fetch(conv + tl.minimum(j, K - 2) * C + c)


@jit(do_not_specialize=["R"])
def _convolve_tree(
    m, a, b, conv, taps, A_log, dt_bias, q, k, v, decay, beta, slots, depths, ancestors, R,
    m_stride, a_stride, b_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GATES: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, EPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program a row and a head, as in `_convolve`."""
    C: tl.constexpr = 2 * HK * DK + HV * DV
    spot, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, r = tl.program_id(0) // R, tl.program_id(0) % R
    let_next_start(EARLY)
    conv += tl.load(slots + s).to(tl.int64) * (K - 1) * C
    if EARLY:
        if column < 2 * HK:
            _fetch_channels(taps, conv, column * DK, DK, C, K)
        elif column < 2 * HK + HV:
            _fetch_channels(taps, conv, 2 * HK * DK + (column - 2 * HK) * DV, DV, C, K)
    wait_for_last(EARLY)
    depth = tl.load(depths + spot)
    path = ancestors + spot * ROWS
    if column < 2 * HK:
        d = tl.arange(0, DK)
        y = _window_rows(m, conv, taps, s, r, R, depth, path, m_stride, C, column * DK + d, K)
        y = unit(y, EPS)
        if column < HK:
            tl.store(q + (spot * HK + column) * DK + d, (y * DK**-0.5).to(tl.bfloat16))
        else:
            tl.store(k + (spot * HK + column - HK) * DK + d, y.to(tl.bfloat16))
    elif column < 2 * HK + HV:
        d = tl.arange(0, DV)
        head = column - 2 * HK
        y = _window_rows(m, conv, taps, s, r, R, depth, path, m_stride, C, 2 * HK * DK + head * DV + d, K)
        tl.store(v + (spot * HV + head) * DV + d, y.to(tl.bfloat16))
    else:
        h = tl.arange(0, GATES)
        g, strength = gates(
            tl.load(a + spot * a_stride + h, mask=h < HV, other=0.0),
            tl.load(b + spot * b_stride + h, mask=h < HV, other=0.0),
            A_log, dt_bias, h, HV,
        )  # fmt: skip
        tl.store(decay + spot * HV + h, tl.exp(g), mask=h < HV)
        tl.store(beta + spot * HV + h, strength, mask=h < HV)


@jit(do_not_specialize=["S", "R", "count"])
def _commit(
    m, conv, slots, path, steps, S, R, count, m_layer, m_stream, m_row, C: tl.constexpr, BACK: tl.constexpr
):  # fmt: skip
    """A program a layer, stream and 1024 channels; in place as in `_advance`: upwards."""
    layer, s = tl.program_id(0) // S, tl.program_id(0) % S
    n = tl.load(steps + s)
    if n > 0:
        c = tl.program_id(1) * 1024 + tl.arange(0, 1024)
        state = conv + (layer.to(tl.int64) * count + tl.load(slots + s)) * BACK * C
        rows = m + layer.to(tl.int64) * m_layer + s.to(tl.int64) * m_stream
        for j in tl.static_range(BACK):
            step = n - BACK + j
            row = tl.load(path + s * R + step, mask=step >= 0, other=0)
            x = tl.load(rows + row.to(tl.int64) * m_row + c, mask=(c < C) & (step >= 0), other=0.0)
            z = tl.load(state + (BACK + step) * C + c, mask=(c < C) & (step < 0), other=0.0)
            tl.store(state + j * C + c, tl.where(step >= 0, x, z), mask=c < C)
