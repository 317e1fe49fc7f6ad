"""The gated delta rule: 64-row chunks for prompt rows, single steps for generated rows, and the short convolution.

State S [heads, dk, dv] a sequence, float32. One row: S ← e^g S; u = β (v - Sᵀk); S ← S + k ⊗ u; o = Sᵀq.
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
    """What a window's steps did to the state: enough to replay any prefix of them, bit for bit."""

    decay: Tensor  # [B, R, heads, 1, 1], e^g
    k: Tensor  # [B, R, heads, dk, 1]
    u: Tensor  # [B, R, heads, 1, dv]


def convolve(m: Tensor, taps: Tensor) -> Tensor:
    """Depthwise causal convolution, then SiLU.

    m [..., K - 1 + L, C] with the earlier rows in front; taps [K, C], the last the current row's; float32 [..., L, C].
    """
    rows = m.shape[-2] - len(taps) + 1
    y = m[..., :rows, :] * taps[0]
    for j in range(1, len(taps)):
        y = y + m[..., j : j + rows, :] * taps[j]
    return silu(y)


def steps(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Journal]:
    """R rows of B sequences, one after another.

    S [B, H, dk, dv]; q, k [B, R, H, dk]; v [B, R, H, dv]; g, beta [B, R, H].
    Returns (o [B, R, H, dv], the state after the last row, the journal). S is not changed.
    """
    decay = torch.exp(g)
    overlap = exact.tree_sum(k * q, -1)[..., None]
    pair = torch.stack([k, q], -2)[..., None]
    k, outs, updates = k[..., None], [], []
    for t in range(q.shape[1]):
        seen = exact.tree_sum(S[:, :, None] * pair[:, t], -2) * decay[:, t, :, None, None]
        u = (v[:, t] - seen[:, :, 0]) * beta[:, t, :, None]
        outs.append(seen[:, :, 1] + overlap[:, t] * u)
        updates.append(u)
        S = S * decay[:, t, :, None, None] + k[:, t] * u[:, :, None]
    return torch.stack(outs, 1), S, Journal(decay[..., None, None], k, torch.stack(updates, 1)[..., None, :])


def replay(S: Tensor, journal: Journal, index: int, rows: int) -> Tensor:
    """The state of sequence `index` after its first `rows` rows, from its state S [H, dk, dv] before them."""
    for t in range(rows):
        S = S * journal.decay[index, t] + journal.k[index, t] * journal.u[index, t]
    return S


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
