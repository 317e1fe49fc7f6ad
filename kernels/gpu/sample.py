"""Embedding rows, and tokens drawn from rows of logits: a pure function of (row, its rules), whatever is beside it.

A draw is `engine.sampling`'s, on the device: temperature, top-k, top-p, min-p, then the largest sum of a scaled logit
and its Gumbel noise, a hash of (seed, position, token id); ties go to the lower id. Noise and scaled logits are float64
as on the host. The cuts are exact, whatever they leave: a logit's bits are read as a whole number that orders as it
does, and the number at which a cut falls is found 4 bits a pass, by counts (top-k) or by masses (top-p) of what lies
above. Masses are whole numbers, exp(scaled - largest) · 2^44 rounded, so their sums have no order; they part from the
host's float64 sums by some 1e-11 of the largest, the only difference there is. Rows are cut into pieces that many
programs read at once; every program adds up the pieces' findings of the pass before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .common import cdiv, jit, launchable, power_of_two, tl

PIECE = 4096
"""Logits a program reads."""


class Rules(NamedTuple):
    """How each row is drawn; one value a row, on the device."""

    temperature: Tensor
    """float64 [R]; 0: greedy. Else at least 1e-6."""
    top_k: Tensor
    """int32 [R]; 0: no limit."""
    top_p: Tensor
    """float64 [R]; 1: no limit."""
    min_p: Tensor
    """float64 [R]; 0: no limit."""
    seed: Tensor
    """int64 [R]: the bits of a seed below 2^64."""
    position: Tensor
    """int32 [R]: the absolute place of the token drawn."""
    size: int
    """Ids at or beyond it are never drawn."""


def embed(ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of an embedding table: ids int32 or int64 [M], table bf16 [V, D] -> bf16 [M, D]."""
    out = table.new_empty(len(ids), table.shape[1]) if out is None else out
    return torch.index_select(table, 0, ids, out=out)


def scatter_features(x: Tensor, features: Tensor, rows: Tensor) -> Tensor:
    """Put a tower's features over the rows of their placeholders: x bf16 [M, D], features [n, D], rows int64 [n].
    Returns x."""
    return x.index_copy_(0, rows, features.to(x.dtype))


def sample(logits: Tensor, rules: Rules, out: Tensor | None = None, greedy: bool = False) -> Tensor:
    """The token drawn from each row: logits float32 [R, V] -> int32 [R]; -1 where the largest is not finite.

    `greedy`: the caller knows that every temperature is 0, and only the largest is looked for. The ids are the same
    without it.
    """
    R = len(logits)
    out = logits.new_empty(R, dtype=torch.int32) if out is None else out
    if not launchable(logits):
        return out.copy_(sample_twin(logits, rules))
    if not R:
        return out
    size = min(rules.size, logits.shape[1])
    pieces = cdiv(size, PIECE)
    most, grid = power_of_two(pieces), (R, pieces)
    best, best_id = logits.new_empty(R, pieces), out.new_empty(R, pieces)
    _best[grid](logits, best, best_id, logits.stride(0), size, PIECE, num_warps=8)
    noisy, noisy_id = best, best_id
    if not greedy:
        row = logits, best, rules.temperature, rules.top_k, rules.top_p, logits.stride(0), size, pieces
        found = [out.new_empty(2, R, pieces, 16, dtype=torch.int64) for _ in range(2)]
        low = [out.new_empty(9, R, dtype=torch.int64) for _ in range(2)]
        above, ties = out.new_empty(R, pieces, dtype=torch.int64), out.new_empty(R, pieces)
        scratch = *found, *low, above, ties, R
        for step in range(8):
            _narrow[grid](*row, *scratch, step, False, most, PIECE, num_warps=8)
        for step in range(9):
            _narrow[grid](*row, *scratch, step, True, most, PIECE, num_warps=8)
        noisy, noisy_id = logits.new_empty(R, pieces, dtype=torch.float64), out.new_empty(R, pieces)
        more = rules.min_p, rules.seed, rules.position, noisy, noisy_id
        _draw[grid](*row, *scratch, *more, most, PIECE, num_warps=8)
    _choose[(R,)](best, best_id, noisy, noisy_id, rules.temperature, out, pieces, greedy, most, num_warps=1)
    return out


@jit
def _best(logits, best, best_id, s_row, size, PIECE: tl.constexpr):
    """The largest logit of a piece, and the lowest id that has it. NaN counts as infinity: neither is drawn from."""
    r, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + r * s_row + i, mask=i < size, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    largest = tl.max(x, 0)
    to = r * tl.num_programs(1) + piece
    tl.store(best + to, largest)
    tl.store(best_id + to, tl.min(tl.where(x == largest, i, 2147483647), 0))


@jit
def _choose(best, best_id, noisy, noisy_id, temperature, out, pieces, GREEDY: tl.constexpr, MOST: tl.constexpr):
    """The best of a row's pieces."""
    r = tl.program_id(0)
    i = tl.arange(0, MOST)
    x = tl.load(best + r * pieces + i, mask=i < pieces, other=float("-inf"))
    ids = tl.load(best_id + r * pieces + i, mask=i < pieces, other=2147483647)
    largest = tl.max(x, 0)
    id = tl.min(tl.where(x == largest, ids, 2147483647), 0)
    if not GREEDY:  # noqa: SIM102
        if tl.load(temperature + r) > 0:
            y = tl.load(noisy + r * pieces + i, mask=i < pieces, other=float("-inf"))
            ids = tl.load(noisy_id + r * pieces + i, mask=i < pieces, other=2147483647)
            id = tl.min(tl.where(y == tl.max(y, 0), ids, 2147483647), 0)
    tl.store(out + r, tl.where(tl.abs(largest) < float("inf"), id, -1))


@jit
def key_of(x):
    """float32 -> a whole number below 2^32, int64, that orders as x does."""
    bits = (x + 0.0).to(tl.int32, bitcast=True).to(tl.int64)  # -0 becomes 0
    return tl.where(bits < 0, -1 - bits, bits + 2147483648)


@jit
def float_of(key):
    """The float32 that `key_of` made this number of."""
    return tl.where(key < 2147483648, -1 - key, key - 2147483648).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def _mass(x, largest, temperature):
    """exp of what x, scaled, lies below the largest, in units of 2^-44; int64."""
    p = tl.exp(x.to(tl.float64) / temperature - largest.to(tl.float64) / temperature)
    return (p * 17592186044416.0 + 0.5).to(tl.int64)


@jit
def _mass_of_key(key, largest, temperature):
    return _mass(float_of(key), largest, temperature)


@jit
def _digit(found, low, r, R, pieces, step, limit, key, weight, MOST: tl.constexpr):
    """After `step` passes: the prefix of the number at which a cut falls, and what lies above it once step is 8.

    That number is the least that less than `limit` lies above. `found` holds, of the pass before, what lies at or above
    each 16th of the range that it looked at; `weight` more lies at `key`.
    """
    i, d = tl.arange(0, MOST)[:, None], tl.arange(0, 16)
    at = ((((step + 1) % 2) * R + r) * pieces + i) * 16 + d[None, :]
    lies = tl.sum(tl.load(found + at, mask=i < pieces, other=0), 0)
    before = tl.load(low + (step - 1) * R + r)
    width = tl.full([], 1, tl.int64) << (32 - 4 * step)
    lies += tl.where(before + (d + 1) * width <= key, weight, 0)
    digit = tl.sum((lies.to(tl.float64) >= limit).to(tl.int32), 0)
    return before + digit * width, tl.sum(tl.where(d == digit, lies, 0), 0)


@jit
def _first_cut(found, low, top_k, r, R, pieces, size, largest, temperature, MOST: tl.constexpr):
    """Top-k's: (the key at which it falls, how many logits of that key stay, the mass of one)."""
    k = tl.load(top_k + r)
    key, stay, mass = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if (k > 0) & (k < size):
        key, more = _digit(found, low, r, R, pieces, tl.full([], 8, tl.int32), k.to(tl.float64), key, stay, MOST)
        stay = k.to(tl.int64) - more
        mass = _mass_of_key(key, largest, temperature)
    return key, stay, mass


@jit(do_not_specialize=["R", "step"])
def _narrow(
    logits, best, temperature, top_k, top_p, s_row, size, pieces, found_k, found_p, low_k, low_p, above, ties, R, step,
    MASS: tl.constexpr, MOST: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A pass over a piece for top-k, or (MASS) for top-p, whose last counts the logits at which the cut falls."""
    r, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, k, share = tl.load(temperature + r), tl.load(top_k + r), tl.load(top_p + r)
    limited = (k > 0) & (k < size)
    wanted = limited
    if MASS:
        wanted = (share < 1.0) | (limited & (step == 8))
    if (heat > 0) & wanted:
        i = piece * PIECE + tl.arange(0, PIECE)
        there = i < size
        x = tl.load(logits + r * s_row + i, mask=there, other=float("-inf"))
        key = tl.where(there, key_of(x), -1)
        j = tl.arange(0, MOST)
        largest = tl.max(tl.load(best + r * pieces + j, mask=j < pieces, other=float("-inf")), 0)
        prefix = tl.zeros([], tl.int64)
        weight = (key >= 0).to(tl.int64)
        found, low = found_k, low_k
        if MASS:
            found, low = found_p, low_p
            cut, stay, mass = _first_cut(found_k, low_k, top_k, r, R, pieces, size, largest, heat, MOST)
            weight = tl.where(key > cut, _mass(x, largest, heat), 0)
            if step == 0:
                tl.store(above + r * pieces + piece, tl.sum(weight, 0))
            elif share < 1.0:
                limit = _limit(above, share, r, pieces, stay * mass, MOST)
                prefix, _ = _digit(found, low, r, R, pieces, step, limit, cut, stay * mass, MOST)
            else:
                prefix = cut
        elif step > 0:
            prefix, _ = _digit(found, low, r, R, pieces, step, k.to(tl.float64), prefix, prefix, MOST)
        if piece == 0:
            tl.store(low + step * R + r, prefix)
        if step < 8:
            width = tl.full([], 1, tl.int64) << (28 - 4 * step)
            to = found + (((step % 2) * R + r) * pieces + piece) * 16
            for d in range(16):
                tl.store(to + d, tl.sum(tl.where(key >= prefix + (d + 1) * width, weight, 0), 0))
        else:
            tl.store(ties + r * pieces + piece, tl.sum((key == prefix).to(tl.int32), 0))


@jit
def _limit(above, share, r, pieces, more, MOST: tl.constexpr):
    """The mass that top-p keeps."""
    j = tl.arange(0, MOST)
    return share * (tl.sum(tl.load(above + r * pieces + j, mask=j < pieces, other=0), 0) + more).to(tl.float64)


@jit(do_not_specialize=["R"])
def _draw(
    logits, best, temperature, top_k, top_p, s_row, size, pieces, found_k, found_p, low_k, low_p, above, ties, R,
    min_p, seed, position, noisy, noisy_id, MOST: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The largest noisy logit of a piece among those that every cut leaves."""
    r, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + r)
    if heat > 0:
        i = piece * PIECE + tl.arange(0, PIECE)
        there = i < size
        x = tl.load(logits + r * s_row + i, mask=there, other=float("-inf"))
        key = tl.where(there, key_of(x), -1)
        j = tl.arange(0, MOST)
        largest = tl.max(tl.load(best + r * pieces + j, mask=j < pieces, other=float("-inf")), 0)
        share = tl.load(top_p + r)
        cut, stay, mass = _first_cut(found_k, low_k, top_k, r, R, pieces, size, largest, heat, MOST)
        if share < 1.0:
            limit = _limit(above, share, r, pieces, stay * mass, MOST)
            eight = tl.full([], 8, tl.int32)
            lower, more = _digit(found_p, low_p, r, R, pieces, eight, limit, cut, stay * mass, MOST)
            needed = tl.ceil((limit - more.to(tl.float64)) / _mass_of_key(lower, largest, heat).to(tl.float64))
            stay = tl.where(lower == cut, tl.minimum(needed.to(tl.int64), stay), needed.to(tl.int64))
            cut = lower
        tied = key == cut
        earlier = tl.sum(tl.load(ties + r * pieces + j, mask=(j < piece) & (stay > 0), other=0), 0)
        rank = earlier + tl.cumsum(tied.to(tl.int32), 0) - 1
        scaled = x.to(tl.float64) / heat
        likely = tl.exp(scaled - largest.to(tl.float64) / heat) >= tl.load(min_p + r)
        kept = there & likely & ((key > cut) | (tied & (rank < stay)))
        y = scaled + gumbel_of(tl.load(seed + r).to(tl.uint64), tl.load(position + r).to(tl.uint64), i.to(tl.uint64))
        y = tl.where(kept, y, float("-inf"))
        top = tl.max(y, 0)
        tl.store(noisy + r * pieces + piece, top)
        tl.store(noisy_id + r * pieces + piece, tl.min(tl.where(kept & (y == top), i, 2147483647), 0))


@jit
def gumbel_of(seed, position, ids):
    """`engine.sampling.gumbel`: float64 noise of each id."""
    x = _mixed(seed + 0x9E3779B97F4A7C15)
    x = _mixed(x ^ (position * 0xD1342543DE82EF95))
    x = _mixed(x ^ ids)
    u = (x >> 11).to(tl.float64) * 1.1102230246251565e-16 + 5.551115123125783e-17
    return -tl.log(-tl.log(u))


@jit
def _mixed(x):
    """splitmix64's output function."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def sample_twin(logits: Tensor, rules: Rules) -> Tensor:
    """`sample` by the host's rule, row by row, in float64."""
    rows = [part.tolist() for part in rules[:6]]
    logits = logits[:, : rules.size].double().cpu().numpy()
    drawn = [draw_twin(row, *one) for row, *one in zip(logits, *rows)]
    return torch.tensor(drawn, dtype=torch.int32)


def draw_twin(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    best = int(row.argmax())
    if not np.isfinite(row[best]):
        return -1
    if temperature == 0:
        return best
    scaled = row / temperature
    ids = np.lexsort((np.arange(len(row)), -scaled))
    ids = ids[:top_k] if 0 < top_k < len(row) else ids
    p = np.exp(scaled[ids] - scaled[best])
    total = np.cumsum(p)
    kept = (total - p < top_p * total[-1]) & (p >= min_p) if top_p < 1 else p >= min_p
    ids = ids[kept]
    noisy = scaled[ids] + gumbel_twin(seed, position, ids)
    return int(ids[noisy == noisy.max()].min())


def gumbel_twin(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    def mixed(x):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    x = mixed(np.full(len(ids), (seed + 0x9E3779B97F4A7C15) % 2**64, np.uint64))
    x = mixed(x ^ np.uint64(position * 0xD1342543DE82EF95 % 2**64))
    x = mixed(x ^ ids.astype(np.uint64))
    return -np.log(-np.log((x >> np.uint64(11)) * 2.0**-53 + 2.0**-54))
