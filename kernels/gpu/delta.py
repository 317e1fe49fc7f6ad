"""Gated DeltaNet, second half: the delta rule over float32 states S [dk, dv] a value head.

One row: S ← e^g S; u = β (v - Sᵀk); S ← S + k ⊗ u; o = Sᵀq.

Prompt rows come in 64-row chunks anchored at row 0 of their sequence, so a prompt may be cut at any multiple of 64.
With G the running sum of g in the chunk and D_ij = e^(G_i - G_j) for j <= i:

    T = (I + strictly lower part of (β_i k_i · k_j D_ij))⁻¹
    U = T (β v),  W = T (β e^G k)
    V = U - W S,  o = e^G (q S) + (q kᵀ ⊙ D) V,  S ← e^(G_last) S + kᵀ (e^(G_last - G) V)

Window rows come one step each, from the state of the row they follow. Only u is written down: the state after any path
is the start state with the path's updates applied again, by the very same operations (`after_row`), so a restart at a
branch and the commit give the bits of a chain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import EARLY, INTERPRETED, dot, jit, launchable, let_next_start, tl, wait_for_last
from .conv import Inputs
from .packing import CHUNK, ROWS, STREAMS, Prompts, Windows, locate

PART = 16
"""Rows of a diagonal block of T."""
LANES = 8
"""Threads among which `delta_tree` divides a column's keys. The order of a step's sums follows from it."""
STEP_COLUMNS = 16
"""Value columns of a program of `delta_tree`, which is one warp. They change no bit."""


def delta_chunks(x: Inputs, states: Tensor, prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Packed prompt rows.

    x: of rows [L], decay = g; states float32 [slots, Hv, dk, dv], moved in place and not read by a sequence that
    starts at row 0. Returns (o bf16 [L, Hv, dv], the states to be kept float32 [kept, Hv, dk, dv], see `Prompts.keep`).
    """
    o, kept = torch.empty_like(x.v), states.new_empty(prompts.kept, *states.shape[1:])
    if launchable(x.q):
        return _launch_chunks(x, states, prompts, o, kept)
    return delta_chunks_twin(x, states, prompts, o, kept)


def delta_tree(
    x: Inputs,
    states: Tensor,
    slots: Tensor,
    windows: Windows,
    out: tuple[Tensor, Tensor] | None = None,
    moves: bool = False,
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows of windows. x: of rows [S, R], decay = e^g, contiguous; states float32 [slots, Hv, dk, dv]; slots int32 [S].

    `moves`: for windows of one row, which are walked whatever is drawn: states move at once, as `delta_commit` would
    move them but without reading them again. Else they stay. `settled`: no kernel that may still run writes states,
    slots or counts, which are then read before the last kernel is done.

    Returns (o bf16 [S, R, Hv, dv], zeros for rows not in use; u float32 [S, R, Hv, dv], for `delta_commit`);
    `out`: where to put them.
    """
    o, u = (torch.empty_like(x.v), torch.empty_like(x.v, dtype=torch.float32)) if out is None else out
    if launchable(x.q):
        return _launch_tree(x, states, slots, windows, o, u, moves, settled)
    return delta_tree_twin(x, states, slots, windows, o, u, moves)


def delta_commit(
    states: Tensor, k: Tensor, decay: Tensor, u: Tensor, slots: Tensor, path: Tensor, steps: Tensor
) -> None:
    """Move the states of N layers over the walked paths, in place.

    states float32 [N, slots, Hv, dk, dv]; k bf16 [N, S, R, Hk, dk], decay float32 [N, S, R, Hv] and u float32
    [N, S, R, Hv, dv]: what `delta_tree` took and gave; slots int32 [S]; path int32 [S, R]: the rows walked, in order;
    steps int32 [S]: how many.
    """
    if launchable(u):
        _launch_commit(states, k, decay, u, slots, path, steps)
        return
    repeat = states.shape[2] // k.shape[3]
    for s, (slot, rows, n) in enumerate(zip(slots.tolist(), path.tolist(), steps.tolist())):
        for r in rows[:n]:
            key = k[:, s, r].float().repeat_interleave(repeat, 1)
            states[:, slot] = states[:, slot] * decay[:, s, r, :, None, None] + key[..., None] * u[:, s, r, :, None, :]


def delta_tree_twin(x, states, slots, windows, o, u, moves):
    repeat = states.shape[1] // x.k.shape[-2]
    q, k = (y.float().repeat_interleave(repeat, -2) for y in (x.q, x.k))
    o.zero_(), u.zero_()
    for s, (slot, count) in enumerate(zip(slots.tolist(), windows.counts.tolist())):
        after: dict[int, Tensor] = {-1: states[slot]}
        for r in range(count):
            S = after[int(windows.ancestors[s, r, 1])] * x.decay[s, r, :, None, None]
            seen = torch.einsum("hkv,hk->hv", S.double(), k[s, r].double()).float()
            u[s, r] = (x.v[s, r].float() - seen) * x.beta[s, r, :, None]
            after[r] = S + k[s, r, :, :, None] * u[s, r, :, None, :]
            o[s, r] = torch.einsum("hkv,hk->hv", after[r].double(), q[s, r].double()).to(o.dtype)
        if moves and count:
            states[slot] = after[0]
    return o, u


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


@jit
def after_row(S, k, u, decay):
    """S after a row of key k and update u, which come in S's dimensions: one rounded product, one fused multiply-add an
    element. Every way to a state goes through here."""
    return tl.fma(tl.broadcast_to(k, S.shape), tl.broadcast_to(u, S.shape), S * decay)


def _launch_tree(
    x: Inputs, states: Tensor, slots: Tensor, windows: Windows, o: Tensor, u: Tensor, moves: bool, settled: bool
) -> tuple[Tensor, Tensor]:
    S, R, hk, dk = x.k.shape
    _, hv, _, dv = states.shape
    check_aligned(*x[:3], states, o, u)
    columns = min(STEP_COLUMNS, dv)
    _tree[(dv // columns, hv, S)](
        *x, states, o, u, slots, *windows, R, int(moves), hk, hv, dk, dv, columns, LANES, ROWS, settled,
        EARLY, num_warps=1, launch_pdl=EARLY,
    )  # fmt: skip
    return o, u


@jit
def _pairs(k, row, key_head, HK: tl.constexpr, DK: tl.constexpr, LANES: tl.constexpr):
    """A row's key or query as int32 pairs of bf16 [32 / LANES, LANES, DK / LANES / 2]: once for every thread that needs
    it, so that each reads its own part from memory, 16 bytes at a time."""
    PAIRS: tl.constexpr = DK // LANES // 2
    RUN: tl.constexpr = min(PAIRS, 4)
    run, i = tl.arange(0, PAIRS // RUN)[None, :, None] * RUN, tl.arange(0, RUN)[None, None, :]
    at = tl.arange(0, LANES)[:, None, None] * PAIRS + run + i
    at = tl.broadcast_to(at[None, :, :, :], [32 // LANES, LANES, PAIRS // RUN, RUN])
    pairs = tl.load(k.to(tl.pointer_type(tl.int32)) + (row * HK + key_head) * (DK // 2) + at)
    return tl.reshape(pairs, [32 // LANES, LANES, PAIRS])


@jit
def _widened(pairs):
    """The float32 numbers [..., 2 n] of n pairs of bf16."""
    low, high = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), [pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]])


@jit
def _row(q, k, v, decay, beta, ancestors, row, key_head, head, e, own, HK: tl.constexpr, HV: tl.constexpr,
         DK: tl.constexpr, DV: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """A row's query and key in pairs, values at columns e, decay, β, and the row that it follows."""
    return (
        _pairs(q, row, key_head, HK, DK, LANES),
        _pairs(k, row, key_head, HK, DK, LANES),
        tl.load(v + (row * HV + head) * DV + e),
        tl.load(decay + row * HV + own),
        tl.load(beta + row * HV + own),
        tl.load(ancestors + row * ROWS + 1),
    )


@jit
def _touch_updates(u, ancestors, line, r, head, column, HV: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
                   ROWS: tl.constexpr):  # fmt: skip
    """Reads a word of every 32 bytes of the updates on the path to row r, all at once: one after another they are then
    found in the first-level cache."""
    i = tl.arange(0, ROWS)
    row = tl.load(ancestors + (line + r) * ROWS + i)
    at = ((line + row) * HV + head)[:, None] * DV + column + tl.arange(0, COLUMNS // 8)[None, :] * 8
    there = (i > 0) & (row >= 0)
    _need(tl.max(tl.load(u.to(tl.pointer_type(tl.int32)) + at, mask=there[:, None], other=0), 1))


@jit
def _need(x):
    """Makes nothing of x [n]: but what nothing depends on is not read."""
    if tl.max(x, 0) == 1:
        tl.debug_barrier()


@jit
def put(to, x, row, head, e, HV: tl.constexpr, DV: tl.constexpr, LANES: tl.constexpr):
    """x [32 / LANES, columns] to a row's columns e. LANES threads have each number; the first stores it."""
    at = ((row * HV + head) * DV + e)[:, None, :]
    shape: tl.constexpr = [x.shape[0], LANES, x.shape[1]]
    first = tl.broadcast_to(tl.arange(0, LANES)[None, :, None] == 0, shape)
    tl.store(to + tl.broadcast_to(at, shape), tl.broadcast_to(x[:, None, :], shape), mask=first)


@jit(do_not_specialize=["R", "moves"])
def _tree(
    q, k, v, decay, beta, states, o, u, slots, counts, depths, ancestors, order, R, moves,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, SETTLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program of one warp a stream, value head and block of columns; how many rows there are does not change its
    form. Rows come depth first; one that does not follow the row before it starts from the start state and its path's
    updates.

    A window takes as long as one warp takes for its steps, one after another. So S [32 / LANES, LANES, keys, columns]
    lies as it is multiplied: a thread has DK / LANES neighbouring keys of a few columns, reads just those of each row
    and passes nothing on through memory. The next row's inputs are under way before a row is done.
    """
    let_next_start(EARLY)
    if not SETTLED:
        wait_for_last(EARLY)
    KEYS: tl.constexpr = DK // LANES
    GROUPS: tl.constexpr = 32 // LANES
    WIDE: tl.constexpr = COLUMNS // GROUPS
    head, s = tl.program_id(1), tl.program_id(2)
    key_head, line = head // (HV // HK), s * R
    column, group = tl.program_id(0) * COLUMNS, tl.arange(0, GROUPS)
    d = tl.arange(0, LANES)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    e = column + group[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    own = head + (column + group) // DV  # head, and a thread's own: one number for all would have to be waited for
    at = states + (tl.load(slots + s).to(tl.int64) * HV + head) * DK * DV
    at += d[None, :, :, None] * DV + e[:, None, None, :]
    count = tl.load(counts + s)
    S = tl.load(at, mask=count > 0, other=0.0)
    if SETTLED:
        wait_for_last(EARLY)
    for r in range(count, R):
        put(o, tl.zeros([GROUPS, WIDE], tl.bfloat16), line + r, head, e, HV, DV, LANES)
        put(u, tl.zeros([GROUPS, WIDE], tl.float32), line + r, head, e, HV, DV, LANES)
    if count > 0:
        previous = -1
        r = tl.load(order + line)
        following = tl.load(order + line + tl.minimum(1, count - 1))
        query, key, value, fade, strength, parent = _row(
            q, k, v, decay, beta, ancestors, line + r, key_head, head, e, own, HK, HV, DK, DV, LANES, ROWS
        )
        for i in range(0, count):
            if parent != previous:
                S = tl.load(at)
                tl.debug_barrier()  # the updates read here were stored by other threads
                _touch_updates(u, ancestors, line, r, head, column, HV, DV, COLUMNS, ROWS)
                depth = tl.load(depths + line + r)
                for step in range(0, depth):
                    past = line + tl.load(ancestors + (line + r) * ROWS + depth - step)
                    S = after_row(
                        S,
                        _widened(_pairs(k, past, key_head, HK, DK, LANES))[:, :, :, None],
                        tl.load(u + (past * HV + head) * DV + e)[:, None, None, :],
                        tl.load(decay + past * HV + own)[:, None, None, None],
                    )
            K, Q, faded = _widened(key), _widened(query), fade[:, None]
            seen = tl.sum(tl.sum(S * K[:, :, :, None], 2), 1)
            told = tl.sum(tl.sum(S * Q[:, :, :, None], 2), 1)
            update = tl.fma(seen, tl.broadcast_to(0.0 - faded, seen.shape), value.to(tl.float32)) * strength[:, None]
            overlap = tl.broadcast_to(tl.sum(tl.sum(K * Q, 2), 1)[:, None], seen.shape)
            put(u, update, line + r, head, e, HV, DV, LANES)
            put(o, tl.fma(update, overlap, told * faded).to(tl.bfloat16), line + r, head, e, HV, DV, LANES)
            S = after_row(S, K[:, :, :, None], update[:, None, None, :], faded[:, :, None, None])
            query, key, value, fade, strength, parent = _row(
                q, k, v, decay, beta, ancestors, line + following, key_head, head, e, own, HK, HV, DK, DV, LANES, ROWS
            )
            previous, r = r, following
            following = tl.load(order + line + tl.minimum(i + 2, count - 1))
        if moves:
            tl.store(at, S)


def _launch_commit(
    states: Tensor, k: Tensor, decay: Tensor, u: Tensor, slots: Tensor, path: Tensor, steps: Tensor
) -> None:
    N, S, R, hk, dk = k.shape
    _, count, hv, _, dv = states.shape
    check_aligned(states, k, u)
    columns = min(32, dv)
    _commit[(dv // columns, hv, N * S)](
        states, k, decay, u, slots, path, steps, S, R, count, hk, hv, dk, dv, columns, num_warps=4
    )


@jit(do_not_specialize=["S", "R", "count"])
def _commit(
    states, k, decay, u, slots, path, steps, S, R, count,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program a layer and stream, value head and block of columns."""
    head, item = tl.program_id(1), tl.program_id(2)
    s = item % S
    n = tl.load(steps + s)
    if n > 0:
        d, e = tl.arange(0, DK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        slot = (item // S).to(tl.int64) * count + tl.load(slots + s)
        at = states + (slot * HV + head) * DK * DV + d[:, None] * DV + e[None, :]
        state = tl.load(at)
        for step in range(0, n):
            spot = item.to(tl.int64) * R + tl.load(path + s * R + step)
            state = after_row(
                state,
                tl.load(k + (spot * HK + head // (HV // HK)) * DK + d).to(tl.float32)[:, None],
                tl.load(u + (spot * HV + head) * DV + e)[None, :],
                tl.load(decay + spot * HV + head),
            )
        tl.store(at, state)
