"""The text model's two passes over rows.

The prompt pass takes rows of one or many sequences in 64-row chunks, the round pass windows of many sequences, chains
or trees, in single steps. A row takes the same arithmetic whatever else is in its pass: see `kernels.exact`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfmagic.engine.drafting.draft import Window
from tfmagic.kernels import attention, delta, norm, rotary
from tfmagic.kernels.activation import sigmoid, silu, softplus
from tfmagic.kernels.linear import linear, rms_linear

from .config import Text
from .state import Keys, Recurrence, State
from .weights import Attention, Delta, Layer, TextWeights

TOGETHER = {"cpu": 8}
"""Sequences that step together at most, by kind of device: on a CPU, as many states as its cache holds."""


class Group(NamedTuple):
    """Sequences whose states step together."""

    members: slice
    """Their places among the round's windows."""
    rows: slice
    """Their rows in the round."""
    steps: delta.Steps


class Plan(NamedTuple):
    """A round's rows: the same for every layer."""

    starts: list[int]
    """Of each sequence the rows before its window."""
    firsts: list[int]
    """Of each window its first row in the round; one more for the end."""
    places: list[int]
    """Of each row its position."""
    sees: list[Tensor | None]
    """Of each window bool [R, R], the rows on each row's path; None for a chain, whose rows see all before them."""
    feeds: Tensor
    """int64 [N, K]: the inputs of each row's convolution, among all sequences' last K - 1 and then the round's rows."""
    groups: list[Group]


def planned(states: list[State], windows: list[Window], conv: int, device: torch.device) -> Plan:
    """`conv`: K, the inputs of a convolution."""
    firsts, starts = [0], [state.rows for state in states]
    places, feeds, taps = [], [], conv - 1
    for i, (state, window) in enumerate(zip(states, windows)):
        places += [state.rows + state.shift + depth for depth in window.depths]
        own: list[list[int]] = []
        for row, parent in enumerate(window.parents):
            before = own[parent] if parent >= 0 else [-1, *range(i * taps, (i + 1) * taps)]
            own.append([*before[1:], len(states) * taps + firsts[-1] + row])
        feeds += own
        firsts.append(firsts[-1] + len(window.ids))
    most, groups = TOGETHER.get(device.type, len(states)), []
    for low in range(0, len(states), most):
        members = slice(low, min(low + most, len(states)))
        steps = delta.plan([window.parents for window in windows[members]], device)
        groups.append(Group(members, slice(firsts[members.start], firsts[members.stop]), steps))
    sees = [None if window.chain else paths(window, device) for window in windows]
    return Plan(starts, firsts, places, sees, torch.tensor(feeds, device=device), groups)


def paths(window: Window, device: torch.device) -> Tensor:
    """bool [R, R]: the rows on the path to each row, itself included."""
    seen = torch.eye(len(window.ids), dtype=torch.bool)
    for row, parent in enumerate(window.parents):
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen.to(device)


class Moved(NamedTuple):
    """What a round's windows did to one Gated DeltaNet layer, to be committed along their paths."""

    fed: Tensor  # [B (K - 1) + N, C], the inputs of the convolution that `Plan.feeds` counts
    states: list[tuple[Tensor, delta.Journal]]  # of each group [B, heads, dk, dv] before its windows, and its steps


Moves = list[tuple[Recurrence, tuple[Tensor, Tensor]]]
"""What a prompt pass did: recurrences and their new (S, conv)."""


class Change(NamedTuple):
    """What a round did."""

    plan: Plan
    layers: dict[int, Moved]


class Forward:
    def __init__(self, t: Text, w: TextWeights, device: torch.device, fp8: bool = False):
        self.t, self.w, self.device = t, w, device
        self.bits = attention.Bits(t.head_dim, t.positions, fp8)
        self.inverse = rotary.frequencies(t.theta, t.rotary, device)
        self.axis = rotary.axes(list(t.section), t.rotary // 2, device)
        self.taps: list[int] = []
        """Layers whose residual rows the passes give besides."""
        self._joined: dict[int, list[tuple[list[Tensor], Tensor]]] = {}

    def embed(self, ids: list[int]) -> Tensor:
        """float32 [rows, D]."""
        return self.w.embed[torch.tensor(ids, device=self.device)].float()

    def logits(self, x: Tensor) -> Tensor:
        """float32 [rows, V] of residual rows [rows, D]."""
        return rms_linear(x, self.w.head, self.t.eps)

    def prompt_pass(
        self, states: list[State], lengths: list[int], x: Tensor, positions: Tensor, marks: list[list[int]]
    ) -> tuple[Tensor, list[dict[int, State]], Moves, Tensor | None]:
        """The next rows of each prompt, one prompt's after another's: x [L, D], positions [3, L], L = sum(lengths).
        Every state.rows must be a multiple of 64. States are not moved; `move` does that.

        Returns the residual rows [L, D], for each prompt's `marks` (multiples of 64 among its rows) the state after so
        many rows (a view, to be copied by `named` before the sequence is run anew), what `move` needs, and the tapped
        rows [L, taps · D], None where nothing is tapped.
        """
        starts = [state.rows for state in states]
        if any(start % delta.CHUNK for start in starts):
            raise ValueError(f"a prompt pass starts at a multiple of {delta.CHUNK}, not at rows {starts}")
        cos, sin = rotary.tables(positions, self.inverse, self.axis)
        kept = [{mark: state.at(mark) for mark in wanted} for state, wanted in zip(states, marks)]
        stops = [[mark - start for mark in wanted] for start, wanted in zip(starts, marks)]
        moves: Moves = []
        tapped: list[Tensor] = []
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
            tapped += [x] * (i in self.taps)
        return x, kept, moves, torch.cat(tapped, -1) if tapped else None

    def move(self, states: list[State], lengths: list[int], moves: Moves) -> None:
        """Move each state over its rows of a prompt pass."""
        for recurrence, moved in moves:
            recurrence.S, recurrence.conv = moved
        for state, rows in zip(states, lengths):
            state.rows += rows

    def round_pass(self, states: list[State], windows: list[Window]) -> tuple[Tensor, Tensor | None, Change]:
        """One window a sequence, each at its state's end. States are not moved; `commit` does that.

        Returns logits float32 [all rows, V] in order, the tapped rows [all rows, taps · D] (None where nothing is
        tapped), and what `commit` needs.
        """
        plan = planned(states, windows, self.t.conv, self.device)
        x = self.embed([id for window in windows for id in window.ids])
        positions = torch.tensor(plan.places, device=self.device).expand(3, -1)
        cos, sin = rotary.tables(positions, self.inverse, self.axis)
        lengths, change, tapped = [len(window.ids) for window in windows], Change(plan, {}), []
        for i, layer in enumerate(self.w.layers):
            held = [s.layers[i] for s in states]
            if isinstance(layer.mixer, Attention):
                h = self.attend(x, layer.mixer, held, plan.starts, lengths, cos, sin, plan.sees)
            else:
                h, change.layers[i] = self.steps(x, layer.mixer, i, held, plan)
            x = self.feed(x + h, layer)
            tapped += [x] * (i in self.taps)
        return self.logits(x), torch.cat(tapped, -1) if tapped else None, change

    def commit(self, states: list[State], change: Change, walked: list[list[int]]) -> None:
        """Move each state along the rows of its window that were walked, row 0 first. What fails has moved nothing."""
        plan, moved = change.plan, []
        keys = [i for i, layer in enumerate(states[0].layers) if isinstance(layer, Keys)]
        for i, (fed, groups) in change.layers.items():
            joined = []
            for group, (before, journal) in zip(plan.groups, groups):
                offsets = [first - group.rows.start for first in plan.firsts[group.members]]
                rows = [[first + row for row in path] for first, path in zip(offsets, walked[group.members])]
                whole = delta.replay(before, journal, rows)
                joined.append((list(whole.unbind(0)), whole))
            views = [view for one, _ in joined for view in one]
            last = [plan.firsts[n] + path[-1] for n, path in enumerate(walked)]
            conv = fed[plan.feeds[last, 1:]]
            moved.append((i, joined, views, conv.unbind(0)))
        for i, joined, views, convs in moved:
            self._joined[i] = joined
            for state, S, conv in zip(states, views, convs):
                state.layers[i].S, state.layers[i].conv = S, conv
        for state, start, path in zip(states, plan.starts, walked):
            if path[-1] != len(path) - 1:
                for i in keys:
                    state.layers[i].gather(start, path)
            state.rows += len(path)

    def feed(self, x: Tensor, layer: Layer) -> Tensor:
        """x plus the gated MLP of its norm."""
        gate, up = rms_linear(x, layer.up, self.t.eps).chunk(2, -1)
        return x + linear(silu(gate) * up, layer.down)

    def attend(
        self,
        x: Tensor,
        w: Attention,
        held: list[Keys],
        starts: list[int],
        lengths: list[int],
        cos: Tensor,
        sin: Tensor,
        sees: list[Tensor | None] | None = None,
    ) -> Tensor:
        """Full attention of each sequence's rows over its own past and the rows themselves, gated; `sees` as
        `Plan.sees`."""
        t = self.t
        qg, k, v = rms_linear(x, w.inputs, t.eps).split(w.inputs.sizes, -1)
        q, gate = qg.reshape(len(x), t.heads, 2 * t.head_dim).chunk(2, -1)
        q = rotary.rotate(norm.rms(q, w.query, t.eps), cos, sin)
        k = rotary.rotate(norm.rms(k.reshape(len(x), t.kv_heads, -1), w.key, t.eps), cos, sin)
        k, v, scale = attention.prepare(k, v.reshape(len(x), t.kv_heads, -1), self.bits)
        outs, row = [], 0
        for keys, start, n, seen in zip(held, starts, lengths, sees or [None] * len(held)):
            rows = slice(row, row + n)
            keys.write(start, k[:, rows], v[:, rows], scale[:, rows])
            outs.append(attention.attend(q[rows], *keys.seen(start + n), start, self.bits, seen))
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

    def steps(self, x: Tensor, w: Delta, i: int, held: list[Recurrence], plan: Plan) -> tuple[Tensor, Moved]:
        """Gated DeltaNet over the windows of a round; moves nothing."""
        m, z, b, a = rms_linear(x, w.inputs, self.t.eps).split(w.inputs.sizes, -1)
        fed = torch.cat([*(one.conv for one in held), m])
        inputs = self.gates(delta.convolve(fed[plan.feeds], w.taps)[:, 0], b, a, w)
        outs, states = [], []
        for group in plan.groups:
            before = self.joined(i, [one.S for one in held[group.members]])
            o, journal = delta.steps(before, *(part[group.rows] for part in inputs), group.steps)
            outs.append(o)
            states.append((before, journal))
        return self.gated(outs[0] if len(outs) == 1 else torch.cat(outs), z, w), Moved(fed, states)

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
