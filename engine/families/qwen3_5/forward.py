"""The text model's two passes over rows.

The prompt pass takes rows of one or many sequences in 64-row chunks, the round pass windows of many sequences in
single steps. A row takes the same arithmetic whatever else is in its pass: see `kernels.exact`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfmagic.kernels import attention, delta, norm, rotary
from tfmagic.kernels.activation import sigmoid, silu, softplus
from tfmagic.kernels.linear import linear, rms_linear

from .config import Text
from .state import Keys, Recurrence, State
from .weights import Attention, Delta, Layer, TextWeights

TOGETHER = {"cpu": 8}
"""Sequences that step together at most, by kind of device: on a CPU, as many states as its cache holds."""


class Group(NamedTuple):
    """Windows of one length."""

    members: list[int]
    """Their places among the round's windows."""
    rows: Tensor
    """Their rows in the round, int64 [B · R]."""
    length: int


class Moved(NamedTuple):
    """What a group's windows did to one Gated DeltaNet layer, to be committed in part."""

    conv: Tensor  # [B, K - 1 + R, C], the rows before the window in front
    before: Tensor  # [B, heads, dk, dv]
    after: Tensor
    journal: delta.Journal


Moves = list[tuple[Recurrence, tuple[Tensor, Tensor]]]
"""What a prompt pass did: recurrences and their new (S, conv)."""


class Change(NamedTuple):
    """What a round did: for each Gated DeltaNet layer, one `Moved` a group."""

    groups: list[Group]
    layers: dict[int, list[Moved]]


def grouped(lengths: list[int], device: torch.device) -> list[Group]:
    """Windows of equal length together, so that none waits for another's last step."""
    most = TOGETHER.get(device.type, len(lengths))
    starts, groups = [sum(lengths[:i]) for i in range(len(lengths))], []
    for length in sorted(set(lengths)):
        alike = [i for i, n in enumerate(lengths) if n == length]
        for members in (alike[i : i + most] for i in range(0, len(alike), most)):
            rows = [starts[i] + j for i in members for j in range(length)]
            groups.append(Group(members, torch.tensor(rows, device=device), length))
    return groups


class Forward:
    def __init__(self, t: Text, w: TextWeights, device: torch.device):
        self.t, self.w, self.device = t, w, device
        self.bits = attention.Bits(t.head_dim, t.positions)
        self.inverse = rotary.frequencies(t.theta, t.rotary, device)
        self.axis = rotary.axes(list(t.section), t.rotary // 2, device)
        self._joined: dict[int, list[tuple[list[Tensor], Tensor]]] = {}

    def embed(self, ids: list[int]) -> Tensor:
        """float32 [rows, D]."""
        return self.w.embed[torch.tensor(ids, device=self.device)].float()

    def logits(self, x: Tensor) -> Tensor:
        """float32 [rows, V] of residual rows [rows, D]."""
        return rms_linear(x, self.w.head, self.t.eps)

    def prompt_pass(
        self, states: list[State], lengths: list[int], x: Tensor, positions: Tensor, marks: list[list[int]]
    ) -> tuple[Tensor, list[dict[int, State]], Moves]:
        """The next rows of each prompt, one prompt's after another's: x [L, D], positions [3, L], L = sum(lengths).
        Every state.rows must be a multiple of 64. States are not moved; `move` does that.

        Returns the residual rows [L, D], what `move` needs and, for each prompt's `marks` (multiples of 64 among its
        rows), the state after so many rows: a view, to be copied by `named` before the sequence is run anew.
        """
        starts = [state.rows for state in states]
        if any(start % delta.CHUNK for start in starts):
            raise ValueError(f"a prompt pass starts at a multiple of {delta.CHUNK}, not at rows {starts}")
        cos, sin = rotary.tables(positions, self.inverse, self.axis)
        kept = [{mark: state.at(mark) for mark in wanted} for state, wanted in zip(states, marks)]
        stops = [[mark - start for mark in wanted] for start, wanted in zip(starts, marks)]
        moves: Moves = []
        for i, layer in enumerate(self.w.layers):
            held = [state.layers[i] for state in states]
            if isinstance(layer.mixer, Attention):
                h = self.attend(x, layer.mixer, held, starts, lengths, cos, sin)
            else:
                h, ends, at_marks = self.chunks(x, layer.mixer, held, lengths, stops)
                moves += zip(held, ends)
                for views, wanted, found in zip(kept, marks, at_marks):
                    for mark, moved in zip(wanted, found):
                        views[mark].layers[i].S, views[mark].layers[i].conv = moved
            x = self.feed(x + h, layer)
        return x, kept, moves

    def move(self, states: list[State], lengths: list[int], moves: Moves) -> None:
        """Move each state over its rows of a prompt pass."""
        for recurrence, moved in moves:
            recurrence.S, recurrence.conv = moved
        for state, rows in zip(states, lengths):
            state.rows += rows

    def round_pass(self, states: list[State], windows: list[list[int]]) -> tuple[Tensor, Change]:
        """One window of ids a sequence, each at its state's end. States are not moved; `commit` does that.

        Returns logits float32 [all rows, V] in order, and what `commit` needs.
        """
        lengths = [len(ids) for ids in windows]
        x = self.embed([id for ids in windows for id in ids])
        places = [s.rows + s.shift + j for s, n in zip(states, lengths) for j in range(n)]
        positions = torch.tensor(places, device=self.device).expand(3, -1)
        cos, sin = rotary.tables(positions, self.inverse, self.axis)
        starts, change = [s.rows for s in states], Change(grouped(lengths, self.device), {})
        for i, layer in enumerate(self.w.layers):
            held = [s.layers[i] for s in states]
            if isinstance(layer.mixer, Attention):
                h = self.attend(x, layer.mixer, held, starts, lengths, cos, sin)
            else:
                h, change.layers[i] = self.steps(x, layer.mixer, i, held, change.groups)
            x = self.feed(x + h, layer)
        return self.logits(x), change

    def commit(self, states: list[State], change: Change, rows: list[int]) -> None:
        """Move each state over the first `rows` rows of its window."""
        taps = self.t.conv - 1
        for i, moves in change.layers.items():
            self._joined[i] = []
            for group, moved in zip(change.groups, moves):
                views = list(moved.after.unbind(0))
                for b, member in enumerate(group.members):
                    held, n = states[member].layers[i], rows[member]
                    whole = n == group.length
                    held.S = views[b] if whole else delta.replay(moved.before[b], moved.journal, b, n)
                    held.conv = moved.conv[b, n : n + taps]
                self._joined[i].append((views, moved.after))
        for state, n in zip(states, rows):
            state.rows += n

    def feed(self, x: Tensor, layer: Layer) -> Tensor:
        """x plus the gated MLP of its norm."""
        gate, up = rms_linear(x, layer.up, self.t.eps).chunk(2, -1)
        return x + linear(silu(gate) * up, layer.down)

    def attend(
        self, x: Tensor, w: Attention, held: list[Keys], starts: list[int], lengths: list[int], cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Full attention of each sequence's rows over its own past and the rows themselves, gated."""
        t = self.t
        qg, k, v = rms_linear(x, w.inputs, t.eps).split(w.inputs.sizes, -1)
        q, gate = qg.reshape(len(x), t.heads, 2 * t.head_dim).chunk(2, -1)
        q = rotary.rotate(norm.rms(q, w.query, t.eps), cos, sin)
        k = rotary.rotate(norm.rms(k.reshape(len(x), t.kv_heads, -1), w.key, t.eps), cos, sin)
        k, v, scale = attention.prepare(k, v.reshape(len(x), t.kv_heads, -1), self.bits)
        outs, row = [], 0
        for keys, start, n in zip(held, starts, lengths):
            rows = slice(row, row + n)
            keys.write(start, k[:, rows], v[:, rows], scale[:, rows])
            outs.append(attention.attend(q[rows], *keys.seen(start + n), start, self.bits))
            row += n
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return linear(out * sigmoid(gate.reshape(len(x), -1)), w.out)

    def chunks(
        self, x: Tensor, w: Delta, held: list[Recurrence], lengths: list[int], stops: list[list[int]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]], list[list[tuple[Tensor, Tensor]]]]:
        """Gated DeltaNet over each sequence's prompt rows; moves nothing. Also (S, conv) after a sequence's last row,
        and after the first n rows for each n of its `stops`."""
        m, z, b, a = rms_linear(x, w.inputs, self.t.eps).split(w.inputs.sizes, -1)
        taps = self.t.conv - 1
        fed = [torch.cat([one.conv, rows]) for one, rows in zip(held, m.split(lengths))]
        convolved = torch.cat([delta.convolve(rows, w.taps) for rows in fed])
        gates = [part.split(lengths) for part in self.gates(convolved, b, a, w)]
        outs, ends, at_stops = [], [], []
        for one, rows, wanted, *inputs in zip(held, fed, stops, *gates):
            o, S, at = delta.chunks(one.S, *inputs, set(wanted))
            outs.append(o)
            ends.append((S, rows[len(rows) - taps :]))
            at_stops.append([(at[stop], rows[stop : stop + taps]) for stop in wanted])
        return self.gated(torch.cat(outs), z, w), ends, at_stops

    def steps(
        self, x: Tensor, w: Delta, i: int, held: list[Recurrence], groups: list[Group]
    ) -> tuple[Tensor, list[Moved]]:
        """Gated DeltaNet over the windows of a round; moves nothing."""
        m, z, b, a = rms_linear(x, w.inputs, self.t.eps).split(w.inputs.sizes, -1)
        out, moves = x.new_empty(len(x), self.t.value_heads, self.t.value_dim), []
        for group in groups:
            mg, bg, ag = (part[group.rows].view(-1, group.length, part.shape[-1]) for part in (m, b, a))
            conv = torch.cat([torch.stack([held[n].conv for n in group.members]), mg], 1)
            before = self.joined(i, [held[n].S for n in group.members])
            o, after, journal = delta.steps(before, *self.gates(delta.convolve(conv, w.taps), bg, ag, w))
            out[group.rows] = o.flatten(0, 1)
            moves.append(Moved(conv, before, after, journal))
        return self.gated(out, z, w), moves

    def gates(self, c: Tensor, b: Tensor, a: Tensor, w: Delta) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Convolved rows [..., C] and raw gates [..., heads] -> q, k [..., heads, dk], v [..., heads, dv], g, beta."""
        t = self.t
        qk, v = c.split([2 * t.key_heads * t.key_dim, t.value_heads * t.value_dim], -1)
        qk = norm.unit(qk.reshape(*c.shape[:-1], 2 * t.key_heads, t.key_dim))
        qk = qk.repeat_interleave(t.value_heads // t.key_heads, -2)
        q, k = qk.chunk(2, -2)
        g = w.rate * softplus(a + w.bias)
        return q * t.key_dim**-0.5, k, v.reshape(*c.shape[:-1], t.value_heads, t.value_dim), g, sigmoid(b)

    def gated(self, o: Tensor, z: Tensor, w: Delta) -> Tensor:
        """norm(o) · silu(z), projected; o [rows, heads, dv], z [rows, heads · dv]."""
        return linear(norm.rms(o, w.norm, self.t.eps).flatten(-2) * silu(z), w.out)

    def joined(self, i: int, parts: list[Tensor]) -> Tensor:
        """The states of layer i in one tensor; the last round's own, when they are still its rows."""
        if len(parts) == 1:
            return parts[0][None]
        for views, whole in self._joined.get(i, ()):
            if len(views) == len(parts) and all(a is b for a, b in zip(views, parts)):
                return whole
        return torch.stack(parts)
