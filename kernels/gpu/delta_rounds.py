"""Gated DeltaNet, second half, for rounds: the delta rule (`delta`) a row at a time.

Window rows come one step each, from the state of the row they follow. Only u is written down: the state after any path
is the start state with the path's updates applied again, by the very same operations (`after_row`), so a restart at a
branch and the commit give the bits of a chain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import EARLY, jit, launchable, let_next_start, tl, wait_for_last
from .conv import Inputs
from .delta import check_aligned
from .packing import ROWS, Windows

LANES = 8
"""Threads among which `delta_tree` divides a column's keys. The order of a step's sums follows from it."""
STEP_COLUMNS = 16
"""Value columns of a program of `delta_tree`, which is one warp. They change no bit."""


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
