"""Gated DeltaNet, second half, for prompts: the delta rule over float32 states S [dk, dv] a value head.

One row: S ← e^g S; u = β (v - Sᵀk); S ← S + k ⊗ u; o = Sᵀq.

Prompt rows come in 64-row chunks anchored at row 0 of their sequence, so a prompt may be cut at any multiple of 64.
With G the running sum of g in the chunk and D_ij = e^(G_i - G_j) for j <= i:

    T = (I + strictly lower part of (β_i k_i · k_j D_ij))⁻¹
    U = T (β v),  W = T (β e^G k)
    V = U - W S,  o = e^G (q S) + (q kᵀ ⊙ D) V,  S ← e^(G_last) S + kᵀ (e^(G_last - G) V)

Rows of windows come one step each: see `delta_rounds`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import INTERPRETED, dot, jit, launchable, tl
from .conv import Inputs
from .packing import CHUNK, STREAMS, Prompts, locate

PART = 16
"""Rows of a diagonal block of T."""


def delta_chunks(x: Inputs, states: Tensor, prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Packed prompt rows.

    x: of rows [L], decay = g; states float32 [slots, Hv, dk, dv], moved in place and not read by a sequence that
    starts at row 0. Returns (o bf16 [L, Hv, dv], the states to be kept float32 [kept, Hv, dk, dv], see `Prompts.keep`).
    """
    o, kept = torch.empty_like(x.v), states.new_empty(prompts.kept, *states.shape[1:])
    if launchable(x.q):
        return _launch_chunks(x, states, prompts, o, kept)
    return delta_chunks_twin(x, states, prompts, o, kept)


def delta_chunks_twin(x, states, prompts, o, kept):
    """One chunk after another in float64, rows past the end as rows of zeros."""
    places = iter(prompts.keep.tolist())
    repeat = states.shape[1] // x.k.shape[-2]
    for slot, start, rows in prompts.parts():
        S = states[slot].double() if start else torch.zeros_like(states[slot], dtype=torch.float64)
        for first in range(rows.start, rows.stop, CHUNK):
            own = slice(first, min(first + CHUNK, rows.stop))
            parts = [_padded(y[own].double()) for y in (x.q, x.k, x.v, x.decay[..., None], x.beta[..., None])]
            q, k = (y.repeat_interleave(repeat, 0) for y in parts[:2])
            out, S = _chunk(S, q, k, *parts[2:])
            S = S.float().double()
            o[own] = out.transpose(0, 1)[: own.stop - own.start].to(o.dtype)
            if (place := next(places)) >= 0:
                kept[place] = S
        states[slot] = S
    return o, kept


def _padded(x: Tensor) -> Tensor:
    """[n, H, d] -> [H, 64, d]."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, CHUNK - len(x))).transpose(0, 1)


def _chunk(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The formulas above; [H, 64, d], g and beta [H, 64, 1]."""
    G = g.cumsum(1)
    decay = torch.exp((G - G.transpose(1, 2)).tril()).tril()
    A = (beta * (k @ k.transpose(1, 2)) * decay).tril(-1)
    one = torch.eye(CHUNK, dtype=A.dtype, device=A.device)
    T = torch.linalg.solve_triangular(one + A, one, upper=False, unitriangular=True)
    V = T @ (beta * v) - T @ (beta * torch.exp(G) * k) @ S
    o = torch.exp(G) * (q @ S) + (q @ k.transpose(1, 2) * decay) @ V
    last = G[:, -1:]
    return o, torch.exp(last) * S + k.transpose(1, 2) @ (torch.exp(last - G) * V)


def _launch_chunks(x: Inputs, states: Tensor, prompts: Prompts, o: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    heads = (x.k.shape[-2], *states.shape[1:])
    _, hv, dk, dv = heads
    check_aligned(*x[:3], states, o)
    one = (prompts.chunks, hv, CHUNK)
    new = {"device": x.q.device, "dtype": torch.float32}
    G, T = torch.empty(one, **new), torch.empty(*one, CHUNK, **new)
    new["dtype"] = torch.bfloat16
    U, W, P = (torch.empty(*one, width, **new) for width in (dv, dk, CHUNK))
    where = (prompts.starts, prompts.lengths, prompts.sequences)
    _invert[(prompts.chunks, hv)](
        x.k, x.decay, x.beta, G, T, *where, *heads[:3], CHUNK, PART, STREAMS, INTERPRETED, num_warps=1
    )
    _factor[(prompts.chunks, hv)](
        x.q, x.k, x.v, x.beta, G, T, U, W, P, *where, *heads, CHUNK, STREAMS, INTERPRETED, num_warps=4
    )
    columns = min(dv, CHUNK_COLUMNS if hv < MANY else 2 * CHUNK_COLUMNS)
    _scan[(dv // columns, hv, prompts.sequences)](
        x.q, x.k, G, U, W, P, states, o, kept, prompts.slots, *where, prompts.keep,
        *heads, columns, CHUNK, STREAMS, INTERPRETED, num_warps=4, num_stages=2,
    )  # fmt: skip
    return o, kept


CHUNK_COLUMNS, MANY = 32, 40
"""Value columns of a program of `_scan`; twice as many from so many heads on, when half the programs fill a GPU."""


def check_aligned(*tensors: Tensor) -> None:
    """A kernel is compiled for the alignment it meets, and sums may be ordered by it: it must always be the same."""
    for x in tensors:
        if x.data_ptr() % 16 or not x.is_contiguous():
            raise ValueError("the delta rule takes contiguous tensors that start at multiples of 16 bytes")


@jit
def _outer(a, b, WIDEN: tl.constexpr):
    return dot(a, tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], tl.float32), WIDEN)


@jit
def _times(a, b):
    """A product of float32 blocks to nearly float32."""
    return tl.dot(a, b, input_precision="tf32x3")


@jit
def _invert_rows(X, Y, Z, Q, PART: tl.constexpr):
    """(I + A)⁻¹ of four strictly lower blocks, given -A: row by row, each from the rows above it."""
    row, column = tl.arange(0, PART)[:, None], tl.arange(0, PART)[None, :]
    for i in range(2, PART):
        X = _next_row(X, row == i)
        Y = _next_row(Y, row == i)
        Z = _next_row(Z, row == i)
        Q = _next_row(Q, row == i)
    one = tl.where(row == column, 1.0, 0.0)
    return X + one, Y + one, Z + one, Q + one


@jit
def _next_row(X, here):
    line = tl.sum(tl.where(here, X, 0.0), 0)
    line += tl.sum(line[:, None] * X, 0)
    return tl.where(here, line[None, :], X)


@jit
def _part(k, decay, beta, at, own, first, head, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
          PART: tl.constexpr):  # fmt: skip
    """Rows first .. first + PART of a chunk: keys, and g and β; zeros behind the sequence's end."""
    i = first + tl.arange(0, PART)
    there = i < own
    row = (at + i).to(tl.int64)
    d = tl.arange(0, DK)
    keys = tl.load(k + (row[:, None] * HK + head // (HV // HK)) * DK + d[None, :], mask=there[:, None], other=0.0)
    g = tl.load(decay + row * HV + head, mask=there, other=0.0)
    return keys, g, tl.load(beta + row * HV + head, mask=there, other=0.0)


@jit
def _block(k, G, beta, k2, G2, WIDEN: tl.constexpr):
    """β_i k_i · k_j e^(G_i - G_j) of rows i and earlier rows j."""
    return beta[:, None] * _outer(k, k2, WIDEN) * tl.exp(G[:, None] - G2[None, :])


@jit
def _corner(k, G, beta, WIDEN: tl.constexpr, PART: tl.constexpr):
    """The same of rows i and j of one part, where j < i."""
    row, column = tl.arange(0, PART)[:, None], tl.arange(0, PART)[None, :]
    shift = tl.where(row > column, G[:, None] - G[None, :], -float("inf"))
    return beta[:, None] * _outer(k, k, WIDEN) * tl.exp(shift)


@jit(do_not_specialize=["n"])
def _invert(
    k, decay, beta, G, T, starts, lengths, n,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, MOST: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """A program a chunk and value head: G and T, by 16-row blocks."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    _, row, own, tile = locate(lengths, n, chunk, CHUNK, MOST)
    at, own = row + tile * CHUNK, own - tile * CHUNK
    k0, g0, b0 = _part(k, decay, beta, at, own, 0, head, HK, HV, DK, PART)
    k1, g1, b1 = _part(k, decay, beta, at, own, PART, head, HK, HV, DK, PART)
    k2, g2, b2 = _part(k, decay, beta, at, own, 2 * PART, head, HK, HV, DK, PART)
    k3, g3, b3 = _part(k, decay, beta, at, own, 3 * PART, head, HK, HV, DK, PART)
    G0 = tl.cumsum(g0, 0)
    G1 = tl.cumsum(g1, 0) + tl.sum(g0, 0)
    G2 = tl.cumsum(g2, 0) + (tl.sum(g0, 0) + tl.sum(g1, 0))
    G3 = tl.cumsum(g3, 0) + (tl.sum(g0, 0) + tl.sum(g1, 0) + tl.sum(g2, 0))

    A00, A11 = _corner(k0, G0, b0, WIDEN, PART), _corner(k1, G1, b1, WIDEN, PART)
    A22, A33 = _corner(k2, G2, b2, WIDEN, PART), _corner(k3, G3, b3, WIDEN, PART)
    A10, A21 = _block(k1, G1, b1, k0, G0, WIDEN), _block(k2, G2, b2, k1, G1, WIDEN)
    A32, A20 = _block(k3, G3, b3, k2, G2, WIDEN), _block(k2, G2, b2, k0, G0, WIDEN)
    A31, A30 = _block(k3, G3, b3, k1, G1, WIDEN), _block(k3, G3, b3, k0, G0, WIDEN)
    T0, T1, T2, T3 = _invert_rows(0.0 - A00, 0.0 - A11, 0.0 - A22, 0.0 - A33, PART)
    T10 = 0.0 - _times(T1, _times(A10, T0))
    T21 = 0.0 - _times(T2, _times(A21, T1))
    T32 = 0.0 - _times(T3, _times(A32, T2))
    T20 = 0.0 - _times(T2, _times(A20, T0) + _times(A21, T10))
    T31 = 0.0 - _times(T3, _times(A31, T1) + _times(A32, T21))
    T30 = 0.0 - _times(T3, _times(A30, T0) + _times(A31, T10) + _times(A32, T20))

    i, j = tl.arange(0, PART)[:, None] * CHUNK, tl.arange(0, PART)[None, :]
    item = (chunk * HV + head).to(tl.int64)
    at_G = G + item * CHUNK + tl.arange(0, PART)
    tl.store(at_G, G0)
    tl.store(at_G + PART, G1)
    tl.store(at_G + 2 * PART, G2)
    tl.store(at_G + 3 * PART, G3)
    at_T = T + item * CHUNK * CHUNK + i + j
    none = tl.zeros([PART, PART], tl.float32)
    line = PART * CHUNK
    tl.store(at_T, T0)
    tl.store(at_T + PART, none)
    tl.store(at_T + 2 * PART, none)
    tl.store(at_T + 3 * PART, none)
    tl.store(at_T + line, T10)
    tl.store(at_T + line + PART, T1)
    tl.store(at_T + line + 2 * PART, none)
    tl.store(at_T + line + 3 * PART, none)
    tl.store(at_T + 2 * line, T20)
    tl.store(at_T + 2 * line + PART, T21)
    tl.store(at_T + 2 * line + 2 * PART, T2)
    tl.store(at_T + 2 * line + 3 * PART, none)
    tl.store(at_T + 3 * line, T30)
    tl.store(at_T + 3 * line + PART, T31)
    tl.store(at_T + 3 * line + 2 * PART, T32)
    tl.store(at_T + 3 * line + 3 * PART, T3)


@jit
def _precise(a, b, WIDEN: tl.constexpr):
    """float32 a times bf16 b, a in two bf16 parts."""
    high = a.to(tl.bfloat16)
    low = (a - high.to(tl.float32)).to(tl.bfloat16)
    c = dot(low, b, tl.zeros([a.shape[0], b.shape[1]], tl.float32), WIDEN)
    return dot(high, b, c, WIDEN)


@jit(do_not_specialize=["n"])
def _factor(
    q, k, v, beta, G, T, U, W, P, starts, lengths, n,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """A program a chunk and value head: U, W and P = q kᵀ ⊙ D. β and e^G scale T's columns, so that v and k enter the
    products as they are."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    _, row, own, tile = locate(lengths, n, chunk, CHUNK, MOST)
    i = tl.arange(0, CHUNK)
    there = i < own - tile * CHUNK
    rows = (row + tile * CHUNK + i).to(tl.int64)
    d, e = tl.arange(0, DK), tl.arange(0, DV)
    at_k = (rows[:, None] * HK + head // (HV // HK)) * DK + d[None, :]
    strength = tl.load(beta + rows * HV + head, mask=there, other=0.0)
    item = (chunk * HV + head).to(tl.int64)
    g = tl.load(G + item * CHUNK + i)
    square = item * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
    inverse = tl.load(T + square)
    values = tl.load(v + (rows[:, None] * HV + head) * DV + e[None, :], mask=there[:, None], other=0.0)
    fresh = _precise(inverse * strength[None, :], values, WIDEN)
    tl.store(U + item * CHUNK * DV + i[:, None] * DV + e[None, :], fresh.to(tl.bfloat16))
    keys = tl.load(k + at_k, mask=there[:, None], other=0.0)
    read = _precise(inverse * (strength * tl.exp(g))[None, :], keys, WIDEN)
    tl.store(W + item * CHUNK * DK + i[:, None] * DK + d[None, :], read.to(tl.bfloat16))
    queries = tl.load(q + at_k, mask=there[:, None], other=0.0)
    shift = tl.where(i[:, None] >= i[None, :], g[:, None] - g[None, :], -float("inf"))
    tl.store(P + square, (_outer(queries, keys, WIDEN) * tl.exp(shift)).to(tl.bfloat16))


@jit(do_not_specialize=["n"])
def _scan(
    q, k, G, U, W, P, states, o, kept, slots, starts, lengths, n, keep,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, MOST: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program a sequence, value head and block of columns: chunk after chunk, the state in registers."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    s = tl.arange(0, MOST)
    rows = tl.load(lengths + s, mask=s < n, other=0)
    row = tl.sum(tl.where(s < sequence, rows, 0), 0)
    chunk = tl.sum(tl.where(s < sequence, (rows + CHUNK - 1) // CHUNK, 0), 0)
    own = tl.load(lengths + sequence)
    i, d, e = tl.arange(0, CHUNK), tl.arange(0, DK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = states + (tl.load(slots + sequence).to(tl.int64) * HV + head) * DK * DV + d[:, None] * DV + e[None, :]
    S = tl.load(at, mask=tl.broadcast_to(tl.load(starts + sequence) > 0, [DK, COLUMNS]), other=0.0)
    nothing = tl.zeros([CHUNK, COLUMNS], tl.float32)
    for c in range(0, (own + CHUNK - 1) // CHUNK):
        item = ((chunk + c) * HV + head).to(tl.int64)
        there = c * CHUNK + i < own
        lines = (row + c * CHUNK + i).to(tl.int64)
        at_k = (lines[:, None] * HK + head // (HV // HK)) * DK + d[None, :]
        read = tl.load(W + item * CHUNK * DK + i[:, None] * DK + d[None, :])
        fresh = tl.load(U + item * CHUNK * DV + i[:, None] * DV + e[None, :])
        queries = tl.load(q + at_k, mask=there[:, None], other=0.0)
        keys = tl.load(k + at_k, mask=there[:, None], other=0.0)
        within = tl.load(P + item * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :])
        g = tl.load(G + item * CHUNK + i)
        last = tl.load(G + item * CHUNK + CHUNK - 1)
        held = S.to(tl.bfloat16)
        new = fresh.to(tl.float32) - dot(read, held, nothing, WIDEN)
        out = dot(queries, held, nothing, WIDEN) * tl.exp(g)[:, None]
        out = dot(within, new.to(tl.bfloat16), out, WIDEN)
        faded = (new * tl.exp(last - g)[:, None]).to(tl.bfloat16)
        S = dot(tl.trans(keys), faded, S * tl.exp(last), WIDEN)
        tl.store(o + (lines[:, None] * HV + head) * DV + e[None, :], out.to(tl.bfloat16), mask=there[:, None])
        place = tl.load(keep + chunk + c)
        if place >= 0:
            tl.store(kept + (place.to(tl.int64) * HV + head) * DK * DV + d[:, None] * DV + e[None, :], S)
    tl.store(at, S)
