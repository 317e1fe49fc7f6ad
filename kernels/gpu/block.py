"""What a block drafter does between its products: convolutions along a block, norm and rotation of heads, attention
over a ring of context rows and the block, and the scores of neighbouring candidates.

A *ring* holds the keys and values of a sequence's last rows, [slots, layers, kv heads, W, d] each: row p of the
sequence lies at place p mod W. Blocks are S times R rows, one under another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .common import EARLY, INTERPRETED, cdiv, dot, jit, launchable, power_of_two, take_turn, tl
from .norm import rms_twin
from .rope import _normed_rotated, rotated_twin

TILE = 64
"""Keys folded in at once; W is a multiple of it."""
PIECE = 4096
"""Logits that a program looks through for the largest."""
LARGEST = 1e6
"""No logit or edge is larger, so that a score made of a few of them stays finite."""


class Ring(NamedTuple):
    k: Tensor
    """[slots, layers, kv heads, W, d], rotated."""
    v: Tensor


class Seen(NamedTuple):
    """What each block has before it."""

    slots: Tensor
    """int32 [S]: where its sequence's rows lie."""
    starts: Tensor
    """int32 [S]: the first row that was ever kept."""
    ends: Tensor
    """int32 [S]: the row behind the last."""
    positions: Tensor
    """int32 [S]: the block's first row; `ends` where there is a row."""


# Convolution ------------------------------------------------------------------------------------------


def convolve(u: Tensor, dynamic: Tensor, base: Tensor, side: int, R: int, residual: Tensor | None = None) -> Tensor:
    """out[t] = Σ_o (base[side, o] + dynamic[t, side, o]) · u[t - o] within each block of R rows, plus `residual`.

    u [S · R, D]; base [2, K, groups, group], the groups D together; dynamic [S · R, 2 · K · groups], a number a group.
    Returns [S · R, D]: `residual` itself where it is given, rounded once.
    """
    out = torch.empty_like(u) if residual is None else residual
    if not launchable(u):
        return out.copy_(convolve_twin(u, dynamic, base, side, R, residual))
    (rows, D), (_, K, groups, group) = u.shape, base.shape
    block = min(1024, power_of_two(D))
    _convolve[(rows, cdiv(D, block))](
        u, dynamic, base, out, u.stride(0), dynamic.stride(0), out.stride(0), D, R, K, side, groups, group, block,
        residual is not None, EARLY, num_warps=4, launch_pdl=EARLY,
    )  # fmt: skip
    return out


@jit
def _convolve(
    u, dynamic, base, out, su, sd, so, D, R: tl.constexpr, K: tl.constexpr, SIDE: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < D
    y = tl.zeros([BLOCK], tl.float32)
    if RESIDUAL:
        y += tl.load(out + row * so + i, mask=there, other=0.0).to(tl.float32)
    for o in tl.static_range(K):
        inside = there & (row % R >= o)
        tap = tl.load(base + (SIDE * K + o) * D + i, mask=inside, other=0.0).to(tl.float32)
        more = dynamic + row * sd + (SIDE * K + o) * GROUPS + i // GROUP
        tap += tl.load(more, mask=inside, other=0.0).to(tl.float32)
        y += tap * tl.load(u + (row - o) * su + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * so + i, y.to(out.dtype.element_ty), mask=there)


def convolve_twin(u: Tensor, dynamic: Tensor, base: Tensor, side: int, R: int, residual: Tensor | None) -> Tensor:
    _, K, groups, _ = base.shape
    taps = (dynamic.double().view(-1, R, 2, K, groups, 1) + base.double())[:, :, side].flatten(-2)
    blocks, out = u.double().view(-1, R, u.shape[1]), 0.0
    for o in range(min(K, R)):
        out = out + torch.nn.functional.pad(taps[:, o:, o] * blocks[:, : R - o], (0, 0, o, 0))
    out = out.flatten(0, 1)
    return out if residual is None else out + residual.double()


# Heads ------------------------------------------------------------------------------------------------


def turned(y: Tensor, norms: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """The first heads of a projection's rows, each normed and then rotated by halves: y [rows, >= heads · d], norms
    [heads, d], cos, sin float32 [rows, d / 2] -> [rows, heads, d]."""
    heads, d = norms.shape
    out = y.new_empty(len(y), heads, d)
    if not launchable(y):
        return out.copy_(turned_twin(y[:, : heads * d].unflatten(1, (heads, d)), norms, cos, sin, eps))
    _turned[(len(y), heads)](y, norms, cos, sin, out, y.stride(0), eps, heads, d, power_of_two(d), num_warps=1)
    return out


def turned_twin(x: Tensor, norms: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [rows, heads, d] in float64."""
    return rotated_twin(rms_twin(x, norms, eps), cos, sin)


@jit
def _turned(y, norms, cos, sin, out, sy, eps, heads, d: tl.constexpr, BLOCK: tl.constexpr):
    row, head, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    angles = row * (d // 2)
    x = _normed_rotated(y + row * sy + head * d, norms + head * d, cos + angles, sin + angles, eps, d, d // 2, BLOCK)
    tl.store(out + (row * heads + head) * d + i, x.to(out.dtype.element_ty), mask=i < d)


def keep(
    kv: Tensor, norms: Tensor, cos: Tensor, sin: Tensor, eps: float, ring: Ring, slots: Tensor, places: Tensor
) -> None:
    """Context rows into the ring, keys normed and rotated: kv [n, layers · 2 · kv heads · d], of each layer the keys
    and then the values; norms [layers, d]; cos, sin float32 [n, d / 2]; slots int32 [n], -1: the row is not kept;
    places int32 [n], in the sequence: no two rows of a slot may be W apart."""
    _, layers, heads, W, d = ring.k.shape
    if not launchable(kv):
        live = (slots >= 0).nonzero()[:, 0]
        k, v = kv[live].view(-1, layers, 2, heads, d).unbind(2)
        k = turned_twin(k.flatten(1, 2), norms.repeat_interleave(heads, 0), cos[live], sin[live], eps)
        at = slots[live].long(), slice(None), slice(None), places[live].long() % W
        for into, x in ((ring.k, k), (ring.v, v)):
            into[at] = x.reshape(-1, layers, heads, d).to(into.dtype)
        return
    _keep[(len(kv), layers * heads)](
        kv, norms, cos, sin, ring.k, ring.v, slots, places, kv.stride(0), eps, layers, heads, W, d, power_of_two(d),
        num_warps=1,
    )  # fmt: skip


@jit
def _keep(
    kv, norms, cos, sin, ring_k, ring_v, slots, places, s_kv, eps, layers, heads: tl.constexpr, W: tl.constexpr,
    d: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a row, layer and key head."""
    row, own, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    slot, place = tl.load(slots + row), tl.load(places + row)
    layer, head = own // heads, own % heads
    x, angles = kv + row * s_kv + (layer * 2 * heads + head) * d, row * (d // 2)
    kept = (i < d) & (slot >= 0)
    to = ((slot.to(tl.int64) * layers * heads + own) * W + place % W) * d + i
    k = _normed_rotated(x, norms + layer * d, cos + angles, sin + angles, eps, d, d // 2, BLOCK)
    tl.store(ring_k + to, k.to(ring_k.dtype.element_ty), mask=kept)
    tl.store(ring_v + to, tl.load(x + heads * d + i, mask=kept, other=0.0), mask=kept)


# Attention --------------------------------------------------------------------------------------------


def attend(qk: Tensor, v: Tensor, ring: Ring, layer: int, seen: Seen, window: int | None, causal: bool) -> Tensor:
    """Each block's rows over its sequence's kept rows and its own: softmax(q kᵀ) v, queries scaled before.

    qk [S · R, heads + kv heads, d], queries first; v [S · R, kv heads · d] (rows may be strided). A row sees the kept
    rows and the block's less than `window` away (None: all) and, if `causal`, none of the block's behind it.
    Returns [S · R, heads · d].
    """
    S, rows, (kv, W, d) = len(seen.slots), len(qk), ring.k.shape[2:]
    R, heads = rows // S, qk.shape[1] - kv
    out = qk.new_empty(rows, heads * d)
    if not launchable(qk):
        return out.copy_(attend_twin(qk, v, ring, layer, seen, window, causal))
    share = heads // kv * R
    # More streams fill the device by themselves: each is cut less.
    chunk = 2 * TILE * min(S, 4)
    parts = cdiv(W, chunk) + 1
    mix = torch.empty(S * kv * parts * share, d, device=qk.device)
    stats = torch.empty(2, S * kv * parts * share, device=qk.device)
    width, block = max(16, power_of_two(d)), max(16, power_of_two(share))
    _attend[(S, kv, parts)](
        qk, v, ring.k[:, layer], ring.v[:, layer], *seen, mix, stats, v.stride(0), ring.k.stride(0), stats.stride(0),
        window or 0, heads, kv, R, W, d, causal, chunk, parts, TILE, block, width, max(16, power_of_two(R)),
        INTERPRETED, num_warps=8 if block > 64 else 4, num_stages=2,
    )  # fmt: skip
    most = power_of_two(parts)
    _merge[(rows, heads)](
        mix,
        stats,
        out,
        stats.stride(0),
        heads,
        kv,
        R,
        d,
        parts,
        most,
        power_of_two(d),
        EARLY,
        num_warps=2,
        launch_pdl=EARLY,
    )
    return out


@jit
def _attend(
    qk, v, ring_k, ring_v, slots, starts, ends, positions, mix, stats, s_v, s_slot, s_stats, window,
    heads: tl.constexpr, kv: tl.constexpr, R: tl.constexpr, W: tl.constexpr, d: tl.constexpr, CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    OWN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program a block, key head and part: CHUNK places of the ring or, last, the block itself."""
    s, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    SHARE: tl.constexpr = heads // kv * R
    i, j = tl.arange(0, ROWS), tl.arange(0, D)
    row, there = i % R, i < SHARE
    wide = heads + kv
    place = ((s * R + row) * wide + h * (heads // kv) + i // R) * d
    q = tl.load(qk + place[:, None] + j[None, :], mask=there[:, None] & (j < d)[None, :], other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    if part < PARTS - 1:
        slot, start, end, first = (
            tl.load(slots + s).to(tl.int64), tl.load(starts + s), tl.load(ends + s), tl.load(positions + s),
        )  # fmt: skip
        for at in range(part * CHUNK, tl.minimum(part * CHUNK + CHUNK, W), TILE):
            n = at + tl.arange(0, TILE)
            held = end - 1 - (end - 1 - n + W) % W  # the row that lies at place n
            live = held >= start
            from_ = slot * s_slot + ((h * W + n) * d)[:, None] + j[None, :]
            inside = live[:, None] & (j < d)[None, :]
            keys = tl.load(ring_k + from_, mask=inside, other=0.0)
            values = tl.load(ring_v + from_, mask=inside, other=0.0)
            sees = tl.broadcast_to(live[None, :], [ROWS, TILE])
            if window > 0:
                sees = sees & ((first + row)[:, None] - held[None, :] < window)
            top, total, acc = _fold(q, keys, values, sees, top, total, acc, WIDEN)
    else:
        n = tl.arange(0, OWN)
        inside = (n < R)[:, None] & (j < d)[None, :]
        keys = tl.load(qk + (((s * R + n) * wide + heads + h) * d)[:, None] + j[None, :], mask=inside, other=0.0)
        values = tl.load(v + ((s * R + n) * s_v + h * d)[:, None] + j[None, :], mask=inside, other=0.0)
        away = row[:, None] - n[None, :]
        sees = tl.broadcast_to((n < R)[None, :], [ROWS, OWN])
        if CAUSAL:
            sees = sees & (away >= 0)
        if window > 0:
            sees = sees & (tl.abs(away) < window)
        top, total, acc = _fold(q, keys, values, sees, top, total, acc, WIDEN)
    to = ((s * kv + h) * PARTS + part) * SHARE + i
    tl.store(stats + to, top, mask=there)
    tl.store(stats + s_stats + to, total, mask=there)
    tl.store(mix + (to * d)[:, None] + j[None, :], acc, mask=there[:, None] & (j < d)[None, :])


@jit
def _fold(q, keys, values, sees, top, total, acc, WIDEN: tl.constexpr):
    """More keys into a running softmax."""
    scores = dot(q, tl.trans(keys), tl.zeros([q.shape[0], keys.shape[0]], tl.float32), WIDEN)
    scores = tl.where(sees, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    less = tl.exp(top - base)
    acc = dot(weights.to(values.dtype), values, acc * less[:, None], WIDEN)
    return higher, total * less + tl.sum(weights, 1), acc


@jit
def _merge(
    mix, stats, out, s_stats, heads: tl.constexpr, kv: tl.constexpr, R: tl.constexpr, d: tl.constexpr,
    PARTS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program a row and head. Its parts are one softmax; the last part always has a key."""
    take_turn(EARLY)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, i = tl.arange(0, MOST), tl.arange(0, BLOCK)
    SHARE: tl.constexpr = heads // kv * R
    own = head % (heads // kv) * R + row % R
    at = (((row // R) * kv + head // (heads // kv)) * PARTS + n) * SHARE + own
    top = tl.load(stats + at, mask=n < PARTS, other=float("-inf"))
    weights = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(stats + s_stats + at, mask=n < PARTS, other=0.0) * weights, 0)
    parts = tl.load(mix + (at * d)[:, None] + i[None, :], mask=(n < PARTS)[:, None] & (i < d)[None, :], other=0.0)
    y = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + (row * heads + head) * d + i, y.to(out.dtype.element_ty), mask=i < d)


def attend_twin(qk: Tensor, v: Tensor, ring: Ring, layer: int, seen: Seen, window: int | None, causal: bool) -> Tensor:
    """All blocks as one masked product, float64."""
    S, (kv, W, d) = len(seen.slots), ring.k.shape[2:]
    q, k = qk.double().unflatten(0, (S, -1)).split([qk.shape[1] - kv, kv], 2)
    R, slots = q.shape[1], seen.slots.long()
    q = q.view(S, R, kv, -1, d).permute(0, 2, 3, 1, 4)  # [S, kv, sharing, R, d]
    end, row = seen.ends[:, None] - 1, torch.arange(R, device=qk.device)
    held = end - (end - torch.arange(W, device=qk.device)) % W  # [S, W]
    away = (seen.positions[:, None] + row)[:, :, None] - held[:, None]
    own = (row[:, None] - row).expand(S, R, R)
    sees = [(held >= seen.starts[:, None])[:, None].expand(S, R, W), own >= 0 if causal else own == own]
    if window:
        sees = [sees[0] & (away < window), sees[1] & (own.abs() < window)]
    keys, values = (
        torch.cat([held[slots, layer].double(), rows.double().view(S, R, kv, d).transpose(1, 2)], 2)[:, :, None]
        for held, rows in ((ring.k, k), (ring.v, v))
    )
    scores = (q @ keys.transpose(-1, -2)).masked_fill(~torch.cat(sees, 2)[:, None, None], float("-inf"))
    return (scores.softmax(-1) @ values).permute(0, 3, 1, 2, 4).reshape(S * R, -1)


# Candidates -------------------------------------------------------------------------------------------


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and where they are, the largest first and of equals the first; what is no number
    is the least: float32 [rows, V] (rows may be strided) -> float32, int64 [rows, count]."""
    rows, V = logits.shape
    if not launchable(logits):
        return torch.topk(logits.masked_fill(logits.isnan(), -torch.inf), count)
    pieces = cdiv(V, PIECE)
    best = logits.new_empty(rows, pieces * count)
    ids = torch.empty(rows, pieces * count, dtype=torch.int64, device=logits.device)
    _top[(rows, pieces)](logits, ids, best, ids, logits.stride(0), V, count, PIECE, False, num_warps=4)
    if pieces == 1:
        return best, ids
    among, found = best.new_empty(rows, count), ids.new_empty(rows, count)
    block, n = power_of_two(pieces * count), pieces * count
    _top[(rows, 1)](best, ids, among, found, n, n, count, block, True, num_warps=4)
    return among, found


@jit
def _top(x, names, best, ids, s_x, n, count, PIECE: tl.constexpr, NAMED: tl.constexpr):
    """A program a row and piece of it. NAMED: `names` [rows, n] says what each place stands for; else it is its own."""
    row, piece, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PIECE)
    at = piece * PIECE + i
    left = tl.load(x + row * s_x + at, mask=at < n, other=float("-inf"))
    left = tl.where(left == left, left, float("-inf"))
    to = (row * tl.num_programs(1) + piece) * count
    for k in range(0, count):
        top, place = tl.max(left, 0, return_indices=True)
        name = (piece * PIECE + place).to(tl.int64)
        if NAMED:
            name = tl.load(names + row * n + name)
        tl.store(best + to + k, top)
        tl.store(ids + to + k, name)
        left = tl.where(i == place, float("-inf"), left)


def edges(ids: Tensor, anchors: Tensor, projected: Tensor, before: Tensor, behind: Tensor, out: Tensor) -> Tensor:
    """What candidate j of a place gains behind candidate i of the place before: Σ_r before[i, r] · projected[r] ·
    behind[j, r]. Of the first place, row 0 stands behind the anchor, and the other rows are 0.

    ids int64 [S, P, K]; anchors int [S]; projected [S · P, rank]; before, behind [vocab, rank]; out float32
    [S, P, K, K], within ±1e6. An anchor without a row of its own leads nowhere in particular: zeros.
    """
    if not launchable(projected):
        return out.copy_(edges_twin(ids, anchors, projected, before, behind))
    S, P, K = ids.shape
    block = max(16, power_of_two(K))
    _edges[(S, P)](
        ids, anchors, projected, before, behind, out, anchors.stride(0), projected.stride(0), len(before), P, K,
        before.shape[1], block, 64, LARGEST, INTERPRETED, num_warps=4 if block <= 64 else 8,
    )  # fmt: skip
    return out


@jit
def _edges(
    ids, anchors, projected, before, behind, out, s_anchor, s_projected, vocab, P, K, rank, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, LARGEST: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program a place."""
    s, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, i = s * P + place, tl.arange(0, BLOCK)
    there = i < K
    mine = tl.load(ids + at * K + i, mask=there, other=0)
    anchor = tl.load(anchors + s * s_anchor).to(tl.int64)
    known = there & ((place > 0) | ((i == 0) & (anchor < vocab)))
    last = tl.load(ids + (at - 1) * K + i, mask=there & (place > 0), other=0)
    last = tl.where(known, tl.where(place > 0, last, anchor), 0)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for r in range(0, rank, DEPTH):
        j = r + tl.arange(0, DEPTH)
        inside = (j < rank)[None, :]
        ahead = tl.load(before + last[:, None] * rank + j[None, :], mask=known[:, None] & inside, other=0.0)
        scale = tl.load(projected + at * s_projected + j, mask=j < rank, other=0.0)
        b = tl.load(behind + mine[:, None] * rank + j[None, :], mask=there[:, None] & inside, other=0.0)
        a = (ahead.to(tl.float32) * scale.to(tl.float32)[None, :]).to(b.dtype)
        acc = dot(a, tl.trans(b), acc, WIDEN)
    acc = tl.where(acc == acc, acc, -LARGEST)
    acc = tl.where(known[:, None], tl.minimum(tl.maximum(acc, -LARGEST), LARGEST), 0.0)
    tl.store(out + (at * K + i[:, None]) * K + i[None, :], acc, mask=there[:, None] & there[None, :])


def edges_twin(ids: Tensor, anchors: Tensor, projected: Tensor, before: Tensor, behind: Tensor) -> Tensor:
    S, P, K = ids.shape
    known = anchors < len(before)
    first = torch.where(known, anchors, 0)[:, None, None].expand(-1, 1, K)
    ahead = before[torch.cat([first, ids[:, :-1]], 1)].double() * projected.double().view(S, P, 1, -1)
    found = bounded(ahead @ behind[ids].double().transpose(2, 3))
    found[:, 0, 1:] = 0.0
    found[:, 0] *= known[:, None, None]
    return found


def bounded(x: Tensor) -> Tensor:
    """x within ±`LARGEST`; what is no number is the least."""
    return torch.nan_to_num(x, nan=-LARGEST).clamp_(-LARGEST, LARGEST)
