"""Gated DeltaNet for rounds of a row a stream: the short convolution and the delta rule in one kernel, with the bits of
`conv.convolve_tree` and `delta_rounds.delta_tree`. Two small kernels less a layer are what a round of one stream feels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import EARLY, jit, launchable, let_next_start, tl, wait_for_last
from .conv import EPS, Heads, Weights, check, convolve_tree_twin, gates, inputs, row_stride, silu, unit
from .delta import check_aligned
from .delta_rounds import LANES, STEP_COLUMNS, after_row, delta_tree_twin, put
from .packing import windows_twin

STREAMS = 4
"""So many at most: every program convolves its head's keys and queries anew, which for more takes longer than a kernel
of their own."""


def delta_step(
    m: Tensor, a: Tensor, b: Tensor, conv: Tensor, states: Tensor, slots: Tensor, counts: Tensor, weights: Weights,
    heads: Heads,
) -> Tensor:  # fmt: skip
    """The next row of each of S streams, walked whatever is drawn. m bf16 [S, C], a, b bf16 [S, Hv], of any stride a
    row; conv bf16 [slots, K - 1, C] is not moved; states float32 [slots, Hv, dk, dv] move; slots and counts int32 [S],
    a count of 0: no stream. No kernel that may still run writes conv, states, slots or counts. Returns o bf16 [S, Hv,
    dv], zeros for no stream. Raises ValueError for what `conv` or `delta`, whose formulas these are, do not take."""
    S = len(m)
    o = torch.empty(S, heads.values, heads.dv, dtype=torch.bfloat16, device=m.device)
    if not launchable(m):
        return _twin(m, a, b, conv, states, slots, counts, weights, heads, o)
    check(m, weights, heads)
    check_aligned(states, o)
    columns = min(STEP_COLUMNS, heads.dv)
    _alone[(heads.dv // columns, heads.values, S)](
        m, a, b, conv, weights.taps, weights.A_log, weights.dt_bias, states, o, slots, counts,
        row_stride(m), row_stride(a), row_stride(b), *heads, len(weights.taps), columns, LANES, EPS, EARLY,
        num_warps=1, launch_pdl=EARLY,
    )  # fmt: skip
    return o


def _twin(m, a, b, conv, states, slots, counts, weights, heads, o):
    m, a, b = (x[:, None] for x in (m, a, b))
    windows = windows_twin(torch.full((len(m), 1), -1, dtype=torch.int32), counts)
    x = convolve_tree_twin(m, a, b, conv, slots, weights, heads, windows, inputs(m.shape[:2], heads, m.device))
    delta_tree_twin(x, states, slots, windows, o[:, None], torch.empty_like(x.v, dtype=torch.float32), True)
    return o


@jit
def _past(conv, taps, c, C: tl.constexpr, K: tl.constexpr):
    """The convolution's sum at channels c up to the current row, which is not in it."""
    y = tl.zeros(c.shape, tl.float32)
    for j in tl.static_range(K - 1):
        x = tl.load(conv + j * C + c).to(tl.float32)
        y = tl.fma(x, tl.load(taps + j * C + c).to(tl.float32), y)
    return y, tl.load(taps + (K - 1) * C + c).to(tl.float32)


@jit
def _beside(x, S, EARLY: tl.constexpr):
    """x in S's dimensions, every thread with the elements that it has of S: sums over keys then have the one order."""
    x = tl.broadcast_to(x, S.shape)
    if EARLY:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x, S], tl.float32, True, 1)
    return x


@jit
def _alone(
    m, a, b, conv, taps, A_log, dt_bias, states, o, slots, counts, m_stride, a_stride, b_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
    LANES: tl.constexpr, EPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program of one warp a stream, value head and block of columns; S lies as in `delta_rounds._tree`. What no
    kernel of the round writes is read while the last one ends."""
    let_next_start(EARLY)
    KEYS: tl.constexpr = DK // LANES
    GROUPS: tl.constexpr = 32 // LANES
    WIDE: tl.constexpr = COLUMNS // GROUPS
    C: tl.constexpr = 2 * HK * DK + HV * DV
    head, s = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column, group = tl.program_id(0) * COLUMNS, tl.arange(0, GROUPS)
    d = tl.arange(0, LANES)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    e = column + group[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    slot, count = tl.load(slots + s).to(tl.int64), tl.load(counts + s)
    at = states + (slot * HV + head) * DK * DV
    at += d[None, :, :, None] * DV + e[:, None, None, :]
    S = tl.load(at, mask=count > 0, other=0.0)
    conv += slot * (K - 1) * C
    query_at = head // (HV // HK) * DK + tl.arange(0, DK)
    key_at, value_at = HK * DK + query_at, 2 * HK * DK + head * DV + e
    q, q_tap = _past(conv, taps, query_at, C, K)
    k, k_tap = _past(conv, taps, key_at, C, K)
    v, v_tap = _past(conv, taps, value_at, C, K)
    wait_for_last(EARLY)
    row = m + s * m_stride
    q = unit(silu(tl.fma(tl.load(row + query_at).to(tl.float32), q_tap, q)), EPS)
    k = unit(silu(tl.fma(tl.load(row + key_at).to(tl.float32), k_tap, k)), EPS)
    value = silu(tl.fma(tl.load(row + value_at).to(tl.float32), v_tap, v))
    g, strength = gates(tl.load(a + s * a_stride + head), tl.load(b + s * b_stride + head), A_log, dt_bias, head, HV)
    fade = tl.exp(g)
    Q = tl.reshape((q * DK**-0.5).to(tl.bfloat16).to(tl.float32), [1, LANES, KEYS])
    Key = tl.reshape(k.to(tl.bfloat16).to(tl.float32), [1, LANES, KEYS])
    Q, Key = tl.broadcast_to(Q, [GROUPS, LANES, KEYS]), tl.broadcast_to(Key, [GROUPS, LANES, KEYS])
    seen = tl.sum(tl.sum(S * Key[:, :, :, None], 2), 1)
    told = tl.sum(tl.sum(S * Q[:, :, :, None], 2), 1)
    faded = tl.broadcast_to(fade, seen.shape)
    update = tl.fma(seen, 0.0 - faded, value) * strength
    overlap = tl.sum(tl.sum(_beside(Key[:, :, :, None], S, EARLY) * Q[:, :, :, None], 2), 1)
    found = tl.where(count > 0, tl.fma(update, overlap, told * faded), 0.0)
    put(o, found.to(tl.bfloat16), s, head, e, HV, DV, LANES)
    tl.store(at, after_row(S, Key[:, :, :, None], update[:, None, None, :], fade), mask=count > 0)
