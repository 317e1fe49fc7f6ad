"""y = x · Wᵀ over bf16 rows, with what follows it done before the result leaves the registers.

Two Triton forms give a row the same bits. `_stream` reads each weight once as fast as memory gives it, for few rows;
`_tall` keeps the tensor cores busy with tiles fetched by the copy engine, for many. Both add a row's products in the
one order that all tile shapes share: K upwards, a tensor-core step after another into one float32 sum. No shape is cut
along K: with a weight's programs all resident at once, enough bytes are in flight without.

`tiles` says which form and tile a weight and a number of rows take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import tiles
from .affine import Affine, affine, affine_twin
from .common import (
    EARLY,
    INTERPRETED,
    cdiv,
    copyable,
    descriptor,
    dot,
    fetch,
    jit,
    launchable,
    let_next_start,
    processors,
    tl,
    wait_for_last,
)
from .epilogue import GATED, GELU, GELU_TANH, PLAIN, TURN, finish, finish_twin

ACTIVATIONS = {None: PLAIN, "gelu": GELU, "gelu_tanh": GELU_TANH}


class Dense:
    """A bf16 matrix [N, K], and a bias [N]."""

    def __init__(self, w: Tensor, bias: Tensor | None = None):
        self.w = w.to(torch.bfloat16).contiguous()
        self.bias = None if bias is None else bias.to(w.device, torch.bfloat16).contiguous()
        self.n, self.k = self.w.shape

    def first(self, n: int) -> Dense:
        """Its first n rows, in the same memory."""
        return Dense(self.w[:n], None if self.bias is None else self.bias[:n])


Weight = Dense | Affine


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """The rows of a gate and an up matrix in turn, 8 of the one and 8 of the other, [2 · I, ...]. `gate_up` takes this
    form: the two parts of an output then meet in one thread, which holds neighbouring outputs. Of an affine matrix,
    interleave `q`, `scales` and `biases` each."""
    return torch.stack([x.unflatten(0, (-1, TURN)) for x in (gate, up)], 1).flatten(0, 2)


def linear(
    x: Tensor, w: Weight, residual: Tensor | None = None, out: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """x [M, K] bf16 (rows may be strided) -> x · Wᵀ + bias, [M, N] bf16, rounded once.

    `activation`: "gelu" or "gelu_tanh" of it. `residual` [M, N] bf16 is added in float32 before rounding, and may be
    `out` itself.
    """
    return product(x, w, ACTIVATIONS[activation], residual, out, torch.bfloat16)


def gate_up(x: Tensor, w: Weight, out: Tensor | None = None) -> Tensor:
    """silu(x · gateᵀ) · (x · upᵀ), rounded once: x [M, K] bf16, w [2 · I, K] interleaved -> [M, I] bf16."""
    return product(x, w, GATED, None, out, torch.bfloat16)


def logits(x: Tensor, w: Weight, rows: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [M, K] bf16 -> the sums, not rounded, float32 [M, V]; of `rows` alone where given (int32 or int64 [R])."""
    return product(x if rows is None else x.index_select(0, rows), w, PLAIN, None, out, torch.float32)


def product(x: Tensor, w: Weight, what: int, residual: Tensor | None, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Any of the above; `what` follows the sums. Raises ValueError for rows that do not fit the weight."""
    if x.dim() != 2 or x.shape[1] != w.k or x.dtype != torch.bfloat16 or x.stride(1) != 1:
        raise ValueError(f"rows {x.dtype} {list(x.shape)} where bfloat16 [M, {w.k}] are expected")
    if out is None:
        out = x.new_empty(len(x), w.n // 2 if what == GATED else w.n, dtype=dtype)
    if not len(x):
        return out
    if not launchable(x):
        twin = linear_twin if isinstance(w, Dense) else affine_twin
        return out.copy_(finish_twin(twin(x, w), what, residual))
    if isinstance(w, Dense):
        dense(x, w, what, residual, out, tiles.dense(w.n, w.k, len(x)))
    else:
        affine(x, w, what, residual, out, tiles.affine(w.n, w.k, w.bits, w.group, len(x)))
    return out


def dense(x: Tensor, w: Dense, what: int, residual: Tensor | None, out: Tensor, tile: tiles.Tile) -> None:
    """Launch a Triton form."""
    (M, K), N = x.shape, w.n
    bias = x if w.bias is None else w.bias
    add = out if residual is None else residual
    facts = what, w.bias is not None, residual is not None
    if tile.form == "tall" and all(copyable(each) for each in (x, w.w, out, add)):
        rows, columns = tile.rows, tile.columns
        tiles_m, tiles_n = cdiv(M, rows), cdiv(N, columns)
        halves = tile.halves or out.dtype == torch.float32
        wide = columns // (2 if what == GATED else 1) // (2 if halves else 1)
        stages = fitting(tile, wide, out.element_size(), residual is not None)
        _tall[(min(tiles_m * tiles_n, processors(x.device)),)](
            descriptor(x, rows, tile.depth), descriptor(w.w, columns, tile.depth), bias, descriptor(add, rows, wide),
            descriptor(out, rows, wide), M, N, K, rows, columns, tile.depth, tile.group, *facts, halves, INTERPRETED,
            num_warps=tile.warps, num_stages=stages,
        )  # fmt: skip
        return
    grid, early = (cdiv(M, tile.rows) * cdiv(N, tile.columns),), tile.early and EARLY
    _stream[grid](
        x, w.w, bias, add, out, M, N, K, x.stride(0), out.stride(0), add.stride(0),
        tile.rows, tile.columns, tile.depth, *facts, K % tile.depth == 0, early, tile.ahead * early, INTERPRETED,
        launch_pdl=early, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def fitting(tile: tiles.Tile, wide: int, size: int, adds: bool) -> int:
    """The stages for which there is shared memory beside a block on its way out, `wide` columns of `size` bytes, and
    one of the residual."""
    left = tiles.SHARED - 1024 - tile.rows * wide * (size + (2 if adds else 0))
    return max(2, min(tile.stages, left // (2 * tile.depth * (tile.rows + tile.columns))))


@jit(do_not_specialize=["M"])
def _stream(
    x, w, bias, residual, out, M, N, K, sx, so, sr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHAT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program an output tile; tiles of the same weights run side by side, so that these are read once."""
    tiles_m = tl.cdiv(M, ROWS)
    m = (tl.program_id(0) % tiles_m) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) // tiles_m) * COLUMNS
    n = first + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    rows = x + m.to(tl.int64)[:, None] * sx + k[None, :]
    # Weight rows past the last give columns that are not stored.
    weights = w + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    let_next_start(EARLY)
    if AHEAD:
        line = tl.minimum(tl.arange(0, AHEAD) * 64, K - 1)
        fetch(w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + line[None, :])
    wait_for_last(EARLY)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, K, DEPTH):
        if EVEN:
            a = tl.load(rows + at, mask=(m < M)[:, None], other=0.0, eviction_policy="evict_last")
            b = tl.load(weights + at, eviction_policy="evict_first")
        else:
            left = k < K - at
            a = tl.load(rows + at, mask=(m < M)[:, None] & left[None, :], other=0.0)
            b = tl.load(weights + at, mask=left[:, None], other=0.0)
        acc = dot(a, b, acc, WIDEN)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y = finish(acc, WHAT)
    if WHAT == 1:
        N, n = N // 2, first // 2 + tl.arange(0, COLUMNS // 2)
    there = (m < M)[:, None] & (n < N)[None, :]
    if RESIDUAL:
        y += tl.load(residual + m.to(tl.int64)[:, None] * sr + n[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64)[:, None] * so + n[None, :], y.to(out.dtype.element_ty), mask=there)


@jit(do_not_specialize=["M"])
def _tall(
    x, w, bias, residual, out, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, WHAT: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, HALVES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program a processor, which takes one output tile after another. Tiles go in groups of GROUP along the rows, so
    that those under way together share rows and weights in the L2 cache. x, w, residual and out are descriptors."""
    tiles_m, tiles_n = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * tiles_n)
        high = tl.minimum(tiles_m - group * GROUP, GROUP)
        inside = tile % (GROUP * tiles_n)
        m, n = (group * GROUP + inside % high) * ROWS, inside // high * COLUMNS
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(0, K, DEPTH):
            acc = dot(x.load([m, at]), w.load([n, at]).T, acc, WIDEN)
        if BIAS:
            i = n + tl.arange(0, COLUMNS)
            acc += tl.load(bias + i, mask=i < N, other=0.0).to(tl.float32)[None, :]
        if HALVES:
            # One half of the columns after the other: less shared memory on the way out.
            left, right = tl.split(tl.permute(tl.reshape(acc, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))
            _put(left, residual, out, m, n, WHAT, RESIDUAL)
            _put(right, residual, out, m, n + COLUMNS // 2, WHAT, RESIDUAL)
        else:
            _put(acc, residual, out, m, n, WHAT, RESIDUAL)


@jit
def _put(acc, residual, out, m, n, WHAT: tl.constexpr, RESIDUAL: tl.constexpr):
    y = finish(acc, WHAT)
    if WHAT == 1:
        n = n // 2
    if RESIDUAL:
        y += residual.load([m, n]).to(tl.float32)
    out.store([m, n], y.to(out.dtype))


def linear_twin(x: Tensor, w: Dense) -> Tensor:
    """x · Wᵀ + bias in float64."""
    y = x.double() @ w.w.double().t()
    return y if w.bias is None else y + w.bias.double()
