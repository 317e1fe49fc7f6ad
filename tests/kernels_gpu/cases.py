"""Random inputs for the attention and Gated DeltaNet kernels, on any device."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tfmagic.kernels.gpu import pages as paged
from tfmagic.kernels.gpu.conv import Heads, Weights
from tfmagic.kernels.gpu.packing import CHUNK, Prompts, Windows, prompts, windows
from tfmagic.kernels.gpu.pages import PAGE, Rows


class Draws:
    """Numbers from one seed, made on the CPU, so that every device gets the same."""

    def __init__(self, seed: int = 0, device: str = "cpu"):
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def __call__(self, *shape: int, size: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (size * torch.randn(*shape, generator=self.generator)).to(dtype).to(self.device)

    def shuffled(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)


def tree(rows: int, seed: int) -> list[int]:
    """Parents of a random tree in no particular order but parents first."""
    pick = random.Random(seed)
    return [-1, *(pick.randrange(max(0, r - pick.choice((1, 1, 3, 9))), r) for r in range(1, rows))]


def chain(rows: int) -> list[int]:
    return list(range(-1, rows - 1))


def path_to(parents: list[int], row: int) -> list[int]:
    """Rows from row 0 to `row`."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def planned(trees: list[list[int]], room: int, device: str = "cpu") -> Windows:
    """Windows of `room` rows, each holding a tree."""
    parents = [t + [-1] * (room - len(t)) for t in trees]
    ints = {"dtype": torch.int32, "device": device}
    return windows(torch.tensor(parents, **ints), torch.tensor([len(t) for t in trees], **ints))


def ints(*numbers: int, device: str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


class Paged:
    """Sequences of keys and values [n, KV, d] laid out in shuffled pages; what nobody may read is NaN."""

    def __init__(self, sequences: list[tuple[Tensor, Tensor]], fp8: bool = False, seed: int = 0):
        k, _ = sequences[0]
        device = str(k.device)
        counts = [-(-(len(k) + PAGE) // PAGE) for k, _ in sequences]
        draws = Draws(seed, device)
        order = (1 + draws.shuffled(sum(counts))).tolist()
        self.pages = paged.pages(sum(counts) + 1, k.shape[1], k.shape[2], fp8, device)
        (self.pages.k_scale if fp8 else self.pages.k).fill_(float("nan"))
        (self.pages.v_scale if fp8 else self.pages.v).fill_(float("nan"))
        self.table = torch.zeros(len(sequences), max(counts), dtype=torch.int32, device=device)
        self.fp8 = fp8
        for slot, (count, (k, v)) in enumerate(zip(counts, sequences)):
            self.table[slot, :count] = ints(*[order.pop() for _ in range(count)], device=device)
            self.write(slot, 0, k, v)

    def write(self, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        n = len(k)
        places = torch.arange(start, start + n, dtype=torch.int32, device=k.device)
        if n:
            paged.write(self.rows(k, v), self.pages, self.table, torch.full_like(places, slot), places)

    def rows(self, k: Tensor, v: Tensor) -> Rows:
        return paged.stored(k.contiguous(), v.contiguous(), self.fp8)


def packed(parts: list[tuple[int, int, int]], marks: list[list[int]] | None = None, device: str = "cpu") -> Prompts:
    """(slot, start, length) of each prompt."""
    slots, starts, lengths = zip(*parts)
    return prompts(slots, starts, lengths, marks or [[] for _ in parts], device)


def mixer(heads: Heads, seed: int = 0, device: str = "cpu", taps: int = 4) -> Weights:
    draws = Draws(seed, device)
    A_log = torch.log(1 + 15 * torch.rand(heads.values, generator=draws.generator)).to(device)
    return Weights(draws(taps, heads.channels, size=0.5), A_log, draws(heads.values, dtype=torch.float32))


def mixer_rows(heads: Heads, *shape: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """m, a, b as slices of one projection."""
    draws = Draws(seed, device)
    width = -(-(heads.channels + 2 * heads.values) // 16) * 16
    x = draws(*shape, width)
    C, hv = heads.channels, heads.values
    return x[..., :C], x[..., C : C + hv] - 2, x[..., C + hv : C + 2 * hv]


def cuts(length: int, seed: int) -> list[int]:
    """Random multiples of 64 inside `length`, ascending, with 0 in front."""
    pick = random.Random(seed)
    inside = range(CHUNK, length, CHUNK)
    return [0, *sorted(pick.sample(inside, min(len(inside), pick.randint(0, 3))))]
