"""The text model's two passes over rows, in bf16: a fixed sequence of launches over static memory.

Neither pass reads the device or asks it for anything, so both can be captured: lengths, slots, pages and trees are
arrays on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfmagic.kernels import rotary
from tfmagic.kernels.gpu import conv, delta, delta_rounds, pages, step
from tfmagic.kernels.gpu.attention import Partials, partials, prompt_attention, round_attention
from tfmagic.kernels.gpu.linear import gate_up, linear, logits
from tfmagic.kernels.gpu.logprobs import Logprobs, logprobs
from tfmagic.kernels.gpu.norm import gated_rms, rms
from tfmagic.kernels.gpu.packing import Prompts, windows
from tfmagic.kernels.gpu.rope import gated, norm_rope_write, tables
from tfmagic.kernels.gpu.sample import Rules, embed, sample
from tfmagic.kernels.gpu.walk import follow, walk

from ..config import Text
from .pool import Pool
from .weights import Attention, Layer, TextWeights

ROWS = 256
"""Rows of a round at most: 16 windows of 16."""


class Places(NamedTuple):
    """Where the rows of a prompt pass lie."""

    prompts: Prompts
    positions: Tensor  # int32 [3, L]
    slots: Tensor  # int32 [L], of each row's sequence
    rows: Tensor  # int32 [L], each row's place in it


class Kept(NamedTuple):
    """What a prompt pass kept at marks, a tensor a Gated DeltaNet layer."""

    S: list[Tensor]  # [kept, heads, dk, dv]
    conv: list[Tensor]  # [kept, K - 1, C]


class Workspace:
    """What a round leaves until its commit, every layer's, and its logits: enough for `ROWS` rows, shared by rounds of
    every shape."""

    def __init__(self, t: Text, pool: Pool, device: torch.device):
        self.heads = conv.Heads(t.key_heads, t.value_heads, t.key_dim, t.value_dim)
        self.width = t.channels + t.value_heads * t.value_dim + 2 * t.value_heads
        full, recurrent = sum(t.full), len(pool.recurrent)
        self._keys = flat_rows(full * ROWS, t.kv_heads, t.head_dim, pool.keys.fp8, device)
        self._full, self._kv, self._dim = full, t.kv_heads, t.head_dim
        self._recurrent = recurrent
        self._projected = torch.empty(recurrent * ROWS * self.width, dtype=torch.bfloat16, device=device)
        self._inputs = conv.inputs((recurrent * ROWS,), self.heads, device)
        self._u = torch.empty(recurrent * ROWS, t.value_heads, t.value_dim, device=device)
        self.logits = torch.empty(ROWS, t.vocab, device=device)
        self.partials: Partials = partials(16, 16, t.heads, t.head_dim, pool.plan.pages, device)

    @property
    def bytes(self) -> int:
        tensors = (*self._keys, self._projected, *self._inputs, self._u, self.logits, *self.partials[:2])
        return sum(x.nbytes for x in tensors if x is not None)

    def keys(self, S: int, R: int) -> pages.Rows:
        """[A, S, R, KV, d]."""
        n = self._full * S * R
        return pages.Rows(*(None if x is None else x[:n].view(self._full, S, R, *x.shape[1:]) for x in self._keys))

    def projected(self, S: int, R: int) -> Tensor:
        """[G, S · R, width]."""
        n = self._recurrent * S * R * self.width
        return self._projected[:n].view(self._recurrent, S * R, self.width)

    def inputs(self, S: int, R: int) -> conv.Inputs:
        """[G, S, R, ...]."""
        n = self._recurrent * S * R
        return conv.Inputs(*(x[:n].view(self._recurrent, S, R, *x.shape[1:]) for x in self._inputs))

    def u(self, S: int, R: int) -> Tensor:
        """[G, S, R, heads, dv]."""
        return self._u[: self._recurrent * S * R].view(self._recurrent, S, R, *self._u.shape[1:])


def flat_rows(count: int, kv_heads: int, dim: int, fp8: bool, device: torch.device) -> pages.Rows:
    dtype = pages.E4M3 if fp8 else torch.bfloat16
    k, v = (torch.empty(count, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
    scales = [torch.empty(count, kv_heads, device=device) if fp8 else None for _ in range(2)]
    return pages.Rows(k, v, *scales)


class Forward:
    def __init__(self, t: Text, w: TextWeights, pool: Pool, device: torch.device):
        self.t, self.w, self.pool, self.device = t, w, pool, device
        self.space = Workspace(t, pool, device)
        self.inverse = rotary.frequencies(t.theta, t.rotary, device)
        self.axis = rotary.axes(list(t.section), t.rotary // 2, device)
        self.sizes = [t.channels, t.value_heads * t.value_dim, t.value_heads, t.value_heads]
        self.taps: list[int] = []
        """Layers whose residual rows the passes give besides."""

    def prompt(self, x: Tensor, at: Places) -> tuple[Tensor, Kept, Tensor | None]:
        """The next rows of each prompt, whose pages and slots are ready: x bf16 [L, D], overwritten. Slots move.

        Returns the residual rows [L, D], the states at marks, and the tapped rows [L, taps · D].
        """
        pool, t, kept, tapped = self.pool, self.t, Kept([], []), self.new_taps(len(x))
        cos, sin = tables(at.positions, self.inverse, self.axis)
        a = g = 0
        for i, layer in enumerate(self.w.layers):
            y = linear(rms(x, layer.before, t.eps), layer.mixer.inputs)
            if isinstance(layer.mixer, Attention):
                keys, w = pool.keys.layer(a), layer.mixer
                into = keys, pool.table, at.slots, at.rows
                q = norm_rope_write(y, w.query, w.key, t.eps, cos, sin, t.heads, *into)
                o = gated(prompt_attention(q, keys, pool.table, at.prompts), y)
                a += 1
            else:
                m, z, b, alpha = y.split(self.sizes, -1)
                inputs = conv.convolve(m, alpha, b, pool.conv[g], layer.mixer.conv, self.space.heads, at.prompts)
                o, S = delta.delta_chunks(inputs, pool.S[g], at.prompts)
                kept.S.append(S)
                kept.conv.append(conv.advance(m, pool.conv[g], at.prompts))
                o = gated_rms(o, z, layer.mixer.norm, t.eps)
                g += 1
            x = self.feed(linear(o, layer.mixer.out, residual=x, out=x), layer)
            self.tap(tapped, i, x)
        return x, kept, tapped

    def round(self, f: dict[str, Tensor], out: dict[str, Tensor], taps: Tensor | None, size: int, greedy: bool) -> None:
        """A round: f holds its windows and draws (see `rounds.fields`), `out` takes what was walked, and log
        probabilities where it has room for them. States move along their walks, and windows of one row are made ready
        for the next such round. Logits stay in `space.logits`, tapped rows go to `taps` [S · R, taps · D]. `size`: ids
        at or beyond it are never drawn; `greedy`: every temperature is 0."""
        pool, t, space = self.pool, self.t, self.space
        S, R = f["ids"].shape
        trees, slots, rows = windows(f["parents"], f["counts"]), f["slots"], f["rows"]
        x = embed(f["ids"].view(-1), self.w.embed)
        cos, sin = tables(f["positions"].view(-1), self.inverse, self.axis)
        keys, projected, inputs, u = (part(S, R) for part in (space.keys, space.projected, space.inputs, space.u))
        a = g = 0
        for i, layer in enumerate(self.w.layers):
            h, w = rms(x, layer.before, t.eps), layer.mixer
            if isinstance(w, Attention):
                y, own = linear(h, w.inputs), keys.layer(a)
                q = norm_rope_write(y, w.query, w.key, t.eps, cos, sin, t.heads, flat(own))
                q = q.view(S, R, t.heads, t.head_dim)
                paged = pool.keys.layer(a)
                o = round_attention(q, own, paged, pool.table, slots, rows, trees, space.partials)
                o = gated(o.view(S * R, t.heads, t.head_dim), y)
                a += 1
            else:
                y = linear(h, w.inputs, out=projected[g])
                m, z, b, alpha = y.split(self.sizes, -1)
                # A row alone is walked; one that is not finite ends its stream, whose state then matters no more.
                if R == 1 and S <= step.STREAMS:
                    o = step.delta_step(m, alpha, b, pool.conv[g], pool.S[g], slots, f["counts"], w.conv, space.heads)
                else:
                    m, b, alpha = (part.unflatten(0, (S, R)) for part in (m, b, alpha))
                    into = conv.Inputs(*(part[g] for part in inputs))
                    conv.convolve_tree(m, alpha, b, pool.conv[g], slots, w.conv, space.heads, trees, out=into)
                    to = torch.empty_like(into.v), u[g]
                    o, _ = delta_rounds.delta_tree(into, pool.S[g], slots, trees, to, moves=R == 1, settled=True)
                    o = o.flatten(0, 1)
                o = gated_rms(o, z, w.norm, t.eps)
                g += 1
            x = self.feed(linear(o, w.out, residual=x, out=x), layer)
            self.tap(taps, i, x)
        found = logits(rms(x, self.w.norm, t.eps), self.w.head, out=space.logits[: S * R])
        names = "temperature", "top_k", "top_p", "min_p", "seed", "places"
        rules = Rules(*(f[name].view(-1) for name in names), size=size)
        sample(found, rules, out=out["drawn"].view(-1), greedy=greedy)
        walk(f["ids"], f["parents"], out["drawn"], f["counts"], out["path"], out["walked"])
        if "logprobs" in out:
            told = Logprobs(*(out[name] for name in Logprobs._fields))
            logprobs(found, out["drawn"], out["path"], out["walked"], size, told)
        walked = slots, out["path"], out["walked"]
        pages.commit(keys, pool.keys, pool.table, slots, rows, *walked[1:])
        fed = projected.unflatten(1, (S, R))[..., : t.channels]
        conv.conv_commit(fed, pool.conv, *walked)
        if R > 1:
            delta_rounds.delta_commit(pool.S, inputs.k, inputs.decay, u, *walked)
        else:
            follow(*(f[name] for name in ("ids", "positions", "rows", "places")), out["drawn"])

    def feed(self, x: Tensor, layer: Layer) -> Tensor:
        """x plus the gated MLP of its norm, in place."""
        return linear(gate_up(rms(x, layer.after, self.t.eps), layer.up), layer.down, residual=x, out=x)

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        """float32 [n, V] of so many residual rows; rows int32 or int64 [n]."""
        return logits(rms(x.index_select(0, rows), self.w.norm, self.t.eps), self.w.head)

    def new_taps(self, rows: int) -> Tensor | None:
        if not self.taps:
            return None
        return torch.empty(rows, len(self.taps) * self.t.hidden, dtype=torch.bfloat16, device=self.device)

    def tap(self, taps: Tensor | None, i: int, x: Tensor) -> None:
        if taps is not None and i in self.taps:
            at = self.taps.index(i) * self.t.hidden
            taps[:, at : at + self.t.hidden] = x


def flat(own: pages.Rows) -> pages.Rows:
    """A layer's window rows [S, R, KV, d] as [S · R, KV, d]."""
    return pages.Rows(*(None if x is None else x.flatten(0, 1) for x in own))
