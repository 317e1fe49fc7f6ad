"""What a sequence leaves behind, layer by layer, and its form as named tensors.

A full-attention layer keeps every row's key and value; a Gated DeltaNet layer keeps one matrix a head and the last rows
of its convolution's input. The recurrent part exists only after the row it was taken at.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from .config import Text

STEP = 256
"""Rows by which a sequence's key storage grows at least; it doubles up to there."""


class Keys:
    """Keys and values of one full-attention layer: k, v float64 [KV, room, d] and scale [KV, room], with fp8 [KV, room,
    2] (see `kernels.attention`)."""

    def __init__(self, t: Text, device: torch.device, fp8: bool = False):
        self.fp8 = fp8
        self.k = torch.zeros(t.kv_heads, 0, t.head_dim, dtype=torch.float64, device=device)
        self.v, self.scale = self.k.clone(), (self.k[..., :2] if fp8 else self.k[..., 0]).clone()

    def write(self, start: int, k: Tensor, v: Tensor, scale: Tensor) -> None:
        """Rows start, start + 1, ... as `attention.prepare` gave them; what stood there is overwritten."""
        end = start + k.shape[1]
        if end > self.k.shape[1]:
            room = max(end + STEP, 2 * start)
            self.k, self.v, self.scale = (grown(x, room) for x in (self.k, self.v, self.scale))
        self.k[:, start:end], self.v[:, start:end], self.scale[:, start:end] = k, v, scale

    def gather(self, start: int, path: list[int]) -> None:
        """Of the rows behind `start`, those of `path` in its order; it is ascending."""
        rows, end = [start + row for row in path], start + len(path)
        for x in (self.k, self.v, self.scale):
            x[:, start:end] = x[:, rows]

    def fork(self) -> Keys:
        other = copy(self)
        other.k, other.v, other.scale = self.k.clone(), self.v.clone(), self.scale.clone()
        return other

    def seen(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.k[:, :rows], self.v[:, :rows], self.scale[:, :rows]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """What holds the parts of `seen` without loss, by name: float16 has every e4m3 number."""
        narrow = torch.float16 if self.fp8 else torch.float32
        return {"k": narrow, "v": narrow, "v_scale": torch.float32}


class Recurrence:
    """One Gated DeltaNet layer: S float32 [heads, dk, dv]; conv float32 [K - 1, C], the last rows of its input.

    Both are replaced, never written in place: a kept state or a fork may share them.
    """

    def __init__(self, t: Text, device: torch.device):
        self.S = torch.zeros(t.value_heads, t.key_dim, t.value_dim, device=device)
        self.conv = torch.zeros(t.conv - 1, t.channels, device=device)

    def fork(self) -> Recurrence:
        return copy(self)


class State:
    """One sequence after its first `rows` rows."""

    def __init__(self, t: Text, device: torch.device, fp8: bool = False):
        self.rows = 0
        self.shift = 0  # added to a generated row's place to give its position (rope_delta)
        self.layers = [Keys(t, device, fp8) if full else Recurrence(t, device) for full in t.full]

    def fork(self) -> State:
        """An independent sequence with the same past."""
        other = copy(self)
        other.layers = [layer.fork() for layer in self.layers]
        return other

    def at(self, rows: int) -> State:
        """This sequence after its first `rows` rows: shares the keys; its recurrences are to be filled in."""
        other = copy(self)
        other.rows = rows
        other.layers = [layer if isinstance(layer, Keys) else copy(layer) for layer in self.layers]
        return other

    def named(self) -> dict[str, Tensor]:
        """The whole state by name, copied to host memory: in dtypes that hold the grids of keys and values exactly."""
        tensors = {}
        for i, layer in enumerate(self.layers):
            if isinstance(layer, Keys):
                parts = zip(layer.dtypes.items(), layer.seen(self.rows), strict=True)
                tensors |= {f"{i}.{name}": x.to("cpu", dtype, copy=True) for (name, dtype), x in parts}
            else:
                tensors |= {f"{i}.S": layer.S.to("cpu", copy=True), f"{i}.conv": layer.conv.to("cpu", copy=True)}
        return tensors


def room(rows: int, t: Text) -> int:
    """Bytes that a sequence of so many rows takes at most: its keys' storage may be twice what they need."""
    full, storage = sum(t.full), 2 * rows + STEP
    keys = full * t.kv_heads * (2 * t.head_dim + 2) * 8 * storage
    recurrence = t.value_heads * t.key_dim * t.value_dim + (t.conv - 1) * t.channels
    return keys + (len(t.full) - full) * recurrence * 4


def grown(x: Tensor, room: int) -> Tensor:
    """x [KV, n, ...] with its second dimension enlarged to `room`, zeros behind."""
    larger = x.new_zeros(x.shape[0], room, *x.shape[2:])
    larger[:, : x.shape[1]] = x
    return larger


def restore(tensors: dict[str, Tensor], rows: int, t: Text, device: torch.device, fp8: bool = False) -> State:
    """The state that `named` described. Raises ValueError when a tensor is missing, strange or of another shape."""
    state = State(t, device, fp8)
    state.rows = rows
    expected = set()
    for i, layer in enumerate(state.layers):
        if isinstance(layer, Keys):
            parts = zip(layer.dtypes.items(), (layer.k, layer.v, layer.scale))
            kept = {f"{i}.{name}": ((len(x), rows, *x.shape[2:]), dtype) for (name, dtype), x in parts}
            layer.write(0, *(taken(tensors, name, *kind).to(device) for name, kind in kept.items()))
            expected |= kept.keys()
        else:
            layer.S = taken(tensors, f"{i}.S", layer.S.shape).to(device).clone()
            layer.conv = taken(tensors, f"{i}.conv", layer.conv.shape).to(device).clone()
            expected |= {f"{i}.S", f"{i}.conv"}
    if extra := set(tensors) - expected:
        raise ValueError(f"the kept state holds tensors of no layer: {sorted(extra)[:3]}")
    return state


def taken(tensors: dict[str, Tensor], name: str, shape, dtype: torch.dtype = torch.float32) -> Tensor:
    x = tensors.get(name)
    if x is None or tuple(x.shape) != tuple(shape) or x.dtype != dtype:
        found = "missing" if x is None else f"{x.dtype} {list(x.shape)}"
        raise ValueError(f"the kept tensor {name} is {found}, expected {dtype} {list(shape)}")
    return x
