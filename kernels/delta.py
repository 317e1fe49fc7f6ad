"""The gated delta rule: 64-row chunks for prompt rows, single steps for generated rows, and the short convolution.

State S [heads, dk, dv] a sequence, float32. One row: S ← e^g S; u = β (v - Sᵀk); S ← S + k ⊗ u; o = Sᵀq. The rows
of a round may be trees: a row then starts from its parent's state, in the same arithmetic.
The chunk form computes the same in another order, so its bits differ from the steps': a row must always come by the
same form. Chunks are anchored at row 0 of the sequence and always full (zero rows behind the last, k = 0, β = 0, g = 0,
change nothing). All contractions are exact (`exact.matmul`, `exact.mix`) or fixed trees of additions; the rest is
elementwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import exact
from .activation import silu

CHUNK = 64
FAINT = -87.0
"""Decays below e^-87, the least normal float32, are taken as that: past it exp is ten times slower."""


class Journal(NamedTuple):
    """What the rows of a round did to the states: enough to replay any path of them, bit for bit."""

    decay: Tensor  # [N, heads, 1, 1], e^g
    k: Tensor  # [N, heads, dk, 1]
    u: Tensor  # [N, heads, 1, dv]


class Level(NamedTuple):
    """Rows of one depth, over all windows that step together."""

    low: int
    high: int
    """They stand at low ... high - 1 of the order by depth."""
    grown: Tensor | None
    """int64: which rows of the level before have children here; None: all."""
    up: Tensor | None
    """int64 [high - low]: of each row, the place of its parent among those; None: each its own."""


class Steps(NamedTuple):
    """The order in which the rows of several windows step: by depth, so that rows that do not follow one another step
    together. A row starts from the state that its parent leaves."""

    order: Tensor | None
    """int64 [N]: the windows' rows by depth; None: as they stand."""
    levels: list[Level]


def convolve(m: Tensor, taps: Tensor) -> Tensor:
    """Depthwise causal convolution, then SiLU.

    m [..., K - 1 + L, C] with the earlier rows in front; taps [K, C], the last the current row's; float32 [..., L, C].
    """
    rows = m.shape[-2] - len(taps) + 1
    y = m[..., :rows, :] * taps[0]
    for j in range(1, len(taps)):
        y = y + m[..., j : j + rows, :] * taps[j]
    return silu(y)


def plan(windows: list[list[int]], device: torch.device | str = "cpu") -> Steps:
    """The steps of windows, each given by its rows' parents (-1 for its row 0), which come before their children; the
    rows of all windows are counted on from one to the next."""
    parents, depths = [], []
    for window in windows:
        first = len(parents)
        for parent in window:
            depths.append(0 if parent < 0 else depths[first + parent] + 1)
            parents.append(-1 if parent < 0 else first + parent)
    order = sorted(range(len(parents)), key=depths.__getitem__)
    levels, before, low = [], [], 0
    for depth in range(max(depths) + 1):
        here = [row for row in order if depths[row] == depth]
        grown = sorted({parents[row] for row in here}, key=before.index) if depth else []
        up = [grown.index(parents[row]) for row in here] if depth else []
        levels.append(
            Level(
                low,
                low + len(here),
                None if grown == before else torch.tensor([before.index(row) for row in grown], device=device),
                None if up == list(range(len(up))) else torch.tensor(up, device=device),
            )
        )
        before, low = here, low + len(here)
    straight = order == list(range(len(order)))
    return Steps(None if straight else torch.tensor(order, device=device), levels)


def steps(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: Steps
) -> tuple[Tensor, Journal]:
    """The rows of B windows, each a tree that starts from its sequence's state.

    S [B, H, dk, dv]; q, k [N, H, dk]; v [N, H, dv]; g, beta [N, H], one window's rows after another's.
    Returns (o [N, H, dv], the journal). S is not changed.
    """
    decay, column, pair = torch.exp(g)[..., None, None], k[..., None], torch.stack([k, q], -2)[..., None]
    rows = [decay, column, pair, exact.tree_sum(k * q, -1)[..., None], v, beta[..., None]]
    fade, write, pair, overlap, v, beta = rows if plan.order is None else [x[plan.order] for x in rows]
    outs, updates, before = [], [], slice(0)
    for level in plan.levels:
        at = slice(level.low, level.high)
        if outs:
            S = advance(S, fade[before], write[before], updates[-1], level.grown)
            S = S if level.up is None else S[level.up]
        seen = exact.tree_sum(S[:, :, None] * pair[at], -2) * fade[at]
        updates.append((v[at] - seen[:, :, 0]) * beta[at])
        outs.append(seen[:, :, 1] + overlap[at] * updates[-1])
        before = at
    o, u = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in (outs, updates))
    if plan.order is not None:
        o, u = (torch.empty_like(x).index_copy_(0, plan.order, x) for x in (o, u))
    return o, Journal(decay, column, u[:, :, None])


def advance(S: Tensor, decay: Tensor, k: Tensor, u: Tensor, some: Tensor | None) -> Tensor:
    """The states after one row each; only of those places, where `some` says which."""
    if some is not None:
        S, decay, k, u = S[some], decay[some], k[some], u[some]
    return S * decay + k * u[:, :, None]


def replay(S: Tensor, journal: Journal, paths: list[list[int]]) -> Tensor:
    """The states of B sequences after a path of rows each, from their states S [B, H, dk, dv] before them.

    `paths`: the journal's rows from a window's row 0 on, one at least.
    """
    longest_first = sorted(range(len(paths)), key=lambda b: -len(paths[b]))
    straight = longest_first == list(range(len(paths)))
    S = S if straight else S[longest_first]
    for t in range(len(paths[longest_first[0]])):
        rows = [paths[b][t] for b in longest_first if len(paths[b]) > t]
        decay, k, u = (x[rows[0] : rows[0] + 1] if len(rows) == 1 else x[rows] for x in journal)
        moved = S[: len(rows)] * decay + k * u
        if len(rows) == len(S):
            S = moved
        else:
            S[: len(rows)] = moved
    return S if straight else torch.empty_like(S).index_copy_(0, torch.tensor(longest_first, device=S.device), S)


def chunks(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, marks: set[int]
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """L prompt rows of one sequence from a chunk boundary on.

    S [H, dk, dv]; q, k [L, H, dk]; v [L, H, dv]; g, beta [L, H].

    Returns (o [L, H, dv], the state after the last row, {m: the state after the first m rows} for m in `marks`,
    multiples of 64). S is not changed.
    """
    rows = len(q)
    q, k, v, g, beta = (chunked(x) for x in (q, k, v, g[..., None], beta[..., None]))
    total = exact.fixed(g.clamp(min=-(2.0**15))).cumsum(-2)  # [n, H, 64, 1]; exact, so a scan of any shape
    decay = torch.exp((total - total.transpose(-1, -2)).float().clamp_(FAINT, 0)).tril_()
    growth, last = torch.exp(total.float()), total[..., -1:, :]
    kt = k.transpose(-1, -2)
    mixed = exact.matmul(torch.cat([k, q], -2), kt)
    within = mixed[..., CHUNK:, :] * decay
    solved = substitute((beta * mixed[..., :CHUNK, :] * decay), torch.cat([beta * v, beta * growth * k], -1))
    dv = v.shape[-1]
    fresh, read = solved[..., :dv], torch.cat([solved[..., dv:], growth * q], -2)
    write, fade = (k * torch.exp((last - total).float())).transpose(-1, -2), torch.exp(last.float())
    weight, value = exact.split(CHUNK)
    outs, kept = [], {}
    for i in range(len(q)):
        seen = exact.matmul(read[i], S)
        new = fresh[i] - seen[:, :CHUNK]
        outs.append(seen[:, CHUNK:] + exact.mix(within[i], *exact.units(new, value), weight).float())
        S = S * fade[i] + exact.matmul(write[i], new)
        if (i + 1) * CHUNK in marks:
            kept[(i + 1) * CHUNK] = S
    return torch.stack(outs).transpose(1, 2).flatten(0, 1)[:rows], S, kept


def chunked(x: Tensor) -> Tensor:
    """[L, H, d] -> [n, H, 64, d], zero rows at the end."""
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % CHUNK))
    return x.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2)


def substitute(a: Tensor, b: Tensor) -> Tensor:
    """(I + the strictly lower part of a)⁻¹ b, a [..., c, c], b [..., c, m]: forward substitution, elementwise."""
    x = b.clone()
    for j in range(x.shape[-2] - 1):
        x[..., j + 1 :, :] -= a[..., j + 1 :, j : j + 1] * x[..., j : j + 1, :]
    return x


def delta_twin(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as written above, one sequence, float64: (o [L, H, dv], the last state)."""
    S, q, k, v, g, beta = (x.double() for x in (S, q, k, v, g, beta))
    outs = []
    for t in range(len(q)):
        S = S * g[t].exp()[:, None, None]
        u = (v[t] - torch.einsum("hkv,hk->hv", S, k[t])) * beta[t][:, None]
        S = S + k[t][:, :, None] * u[:, None, :]
        outs.append(torch.einsum("hkv,hk->hv", S, q[t]))
    return torch.stack(outs).float(), S.float()
