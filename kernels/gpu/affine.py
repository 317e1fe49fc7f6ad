"""Products with MLX affine weights: value = scale · q + bias, q of 4 or 8 bits, a scale and a bias a group of inputs.

A weight is never widened in memory, nor is a product of it rounded early: of each group the tensor cores sum x · q over
whole numbers, and float32 does the rest, acc += (x · q) · scale + (sum of x) · bias, group after group. The steps of
every weight are cut into `SLICES` such sums, which are then added up in order.

Packed form, made once at load (`pack`, undone by `unpack`). A step of inputs is as many groups as a 16-bit unit holds
codes, 4 of 4 bits or 2 of 8 bits; unit p of a row holds input p of each of the step's groups, the first group lowest.
One shift and one mask then turn a register of two units into two bf16 codes, and a group's codes come out in the order
of its inputs. Rows lie in blocks of 16: [N / 16, steps, 16, group], so that a program streams through memory; beside
them [N / 16, steps, 16, groups of a step] words of 32 bits, the scale's bf16 bits low, the bias's high.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from tfmagic.errors import Refusal

from . import tiles
from .common import EARLY, INTERPRETED, cdiv, constexpr_function, dot, fetch, jit, let_next_start, tl, wait_for_last
from .epilogue import finish

BLOCK = 16
"""Rows of a weight that are packed together."""
SLICES = 4
"""Of a weight's steps of inputs, each summed by itself and then one after another."""


class Affine:
    """An MLX affine matrix [N, K]: q uint32 [N, K · bits / 32] (codes along K, the first lowest), scales and biases
    bf16 [N, K / group]; `bias` [N] is added to the product. Raises Refusal for a format that is not run here."""

    bias: Tensor | None

    def __init__(self, q: Tensor, scales: Tensor, biases: Tensor, bits: int, group: int, bias: Tensor | None = None):
        self.n, self.k = q.shape[0], q.shape[1] * 32 // bits
        if bits not in (4, 8) or group not in (32, 64, 128):
            fix = "Use a checkpoint of 4 or 8 bits in groups of 32, 64 or 128."
            raise Refusal(f"The weights have {bits} bits in groups of {group}.", fix)
        if scales.shape != (self.n, self.k // group) or biases.shape != scales.shape or self.k % group:
            raise Refusal(
                f"A weight of {self.n} x {self.k} comes with scales {list(scales.shape)}, biases {list(biases.shape)}.",
                f"Both must be [{self.n}, {self.k} / {group}]: check bits and group_size in config.json.",
            )
        self.bits, self.group = bits, group
        self.bias = None if bias is None else bias.to(q.device, torch.bfloat16).contiguous()
        self.units, self.words = pack(codes_of(q, bits), scales.bfloat16(), biases.bfloat16(), bits, group)

    @property
    def steps(self) -> int:
        return self.units.shape[1]

    def first(self, n: int) -> Affine:
        """Its first n rows, in the same memory."""
        part, blocks = copy(self), cdiv(n, BLOCK)
        part.n, part.units, part.words = n, self.units[:blocks], self.words[:blocks]
        part.bias = None if self.bias is None else self.bias[:n]
        return part


def codes_of(q: Tensor, bits: int) -> Tensor:
    """q uint32 [N, words] -> int32 [N, words · 32 / bits]."""
    shifts = torch.arange(0, 32, bits, device=q.device, dtype=torch.int32)
    words = q.view(torch.int32)[..., None]
    return ((words >> shifts) & ((1 << bits) - 1)).flatten(1)


def pack(codes: Tensor, scales: Tensor, biases: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """codes int32 [N, K], scales and biases bf16 [N, K / group] -> units int16 and words int32, as this module's head
    describes. Rows and inputs that fill up are zeros with scale and bias 0."""
    (N, K), planes = codes.shape, 16 // bits
    blocks, steps = cdiv(N, BLOCK), cdiv(K, planes * group)
    pad = torch.nn.functional.pad
    codes = pad(codes, (0, steps * planes * group - K, 0, blocks * BLOCK - N)).view(blocks, BLOCK, steps, planes, group)
    shifts = torch.arange(0, 16, bits, device=codes.device, dtype=torch.int32)
    units = (codes << shifts[:, None]).sum(3, dtype=torch.int32).to(torch.int16)
    fill = (0, steps * planes - K // group, 0, blocks * BLOCK - N)
    low, high = (pad(x, fill).view(torch.int16).int() for x in (scales, biases))
    words = ((high << 16) | (low & 0xFFFF)).view(blocks, BLOCK, steps, planes)
    return units.transpose(1, 2).contiguous(), words.transpose(1, 2).contiguous()


def unpack(units: Tensor, words: Tensor, n: int, k: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack`: codes int32 [n, k], scales and biases bf16 [n, k / group]."""
    shifts = torch.arange(0, 16, bits, device=units.device, dtype=torch.int32)
    codes = (units.transpose(1, 2).int()[:, :, :, None] >> shifts[:, None]) & ((1 << bits) - 1)
    codes = codes.reshape(len(units) * BLOCK, -1)[:n, :k]
    group = units.shape[-1]
    flat = words.transpose(1, 2).reshape(len(units) * BLOCK, -1)[:n, : k // group]
    scales, biases = ((flat << s >> 16).to(torch.int16).view(torch.bfloat16) for s in (16, 0))
    return codes, scales, biases


def affine_twin(x: Tensor, w: Affine) -> Tensor:
    """x · Wᵀ + bias in float64, from the packed form."""
    codes, scales, biases = (part.double() for part in unpack(w.units, w.words, w.n, w.k, w.bits))
    values = codes * scales.repeat_interleave(w.group, 1) + biases.repeat_interleave(w.group, 1)
    y = x.double() @ values.t()
    return y if w.bias is None else y + w.bias.double()


def affine(x: Tensor, w: Affine, what: int, residual: Tensor | None, out: Tensor, tile: tiles.Tile) -> None:
    """Launch a Triton form. Many rows (a `tall` tile) have the sums of their groups made once, before."""
    M, planes = len(x), 16 // w.bits
    bias, add = x if w.bias is None else w.bias, out if residual is None else residual
    sizes = M, w.n, w.k, x.stride(0), out.stride(0), add.stride(0), w.steps, len(w.units)
    facts = what, w.bias is not None, residual is not None
    grid = (cdiv(M, tile.rows) * cdiv(w.n, tile.columns),)
    if tile.form == "tall":
        sums = x.new_empty(w.steps * planes, M, dtype=torch.float32)
        _sums[(cdiv(M, 64), w.steps * planes)](x, sums, M, w.k, x.stride(0), 64, w.group, INTERPRETED, num_warps=4)
        _tall[grid](
            x, w.units, w.words, sums, bias, add, out, *sizes, tile.rows, tile.columns, w.bits, w.group, tile.group,
            *facts, w.k % (planes * w.group) == 0, SLICES, INTERPRETED, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return
    early = tile.early and EARLY
    _stream[grid](
        x, w.units, w.words, bias, add, out, *sizes, tile.rows, tile.columns, w.bits, w.group, *facts,
        w.k % (SLICES * planes * w.group) == 0, SLICES, tiles.AHEAD * early, INTERPRETED,
        num_warps=SLICES, num_stages=tile.stages, launch_pdl=early,
    )  # fmt: skip


@jit(do_not_specialize=["M", "steps", "blocks"])
def _stream(
    x, units, words, bias, residual, out, M, N, K, sx, so, sr, steps, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WHAT: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr, SLICES: tl.constexpr, AHEAD: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """A program an output tile, held transposed, [columns, rows]: weights come from registers and so stand on the left
    of the tensor cores' product. A warp a slice of the inputs: a warp then has the columns to itself, so that rows are
    fetched and summed once for all of them, and a narrow output still keeps all processors busy. Row tiles of the same
    weights run side by side."""
    PLANES: tl.constexpr = 16 // BITS
    tiles_m = tl.cdiv(M, ROWS)
    m = (tl.program_id(0) % tiles_m) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) // tiles_m) * COLUMNS
    n, s, k = first + tl.arange(0, COLUMNS), tl.arange(0, SLICES), tl.arange(0, GROUP)
    span = tl.cdiv(steps, SLICES)
    # Rows of weights past the last block are read from it, and give columns that are not stored.
    row = tl.minimum(n // 16, blocks - 1).to(tl.int64) * steps * 16 + n % 16
    if AHEAD:
        let_next_start(True)
        EACH: tl.constexpr = AHEAD // SLICES
        j = tl.arange(0, AHEAD)
        line = tl.minimum(j // EACH * span + tl.minimum(j % EACH, span - 1), steps - 1) * 16
        fetch(units + (row[:, None] + line[None, :]) * GROUP)
        wait_for_last(True)
    rows = x + m.to(tl.int64)[None, :, None] * sx + k[None, None, :]
    unit = units + row[None, :, None] * GROUP + k[None, None, :]
    word = words + row[None, :] * PLANES
    ones = tl.full([SLICES, 16, GROUP], 1.0, tl.float32).to(tl.bfloat16)
    nothing = tl.zeros([SLICES, 16, ROWS], tl.float32)
    none = tl.zeros([SLICES, COLUMNS, ROWS], tl.float32)
    acc = none
    # Scales are fetched a step ahead by hand: the compiler does so for the product's operands alone.
    now = _words(word + _place(s, 0, span, steps)[:, None] * 16 * PLANES, BITS, WIDEN)
    for step in range(0, span):
        then = _words(word + _place(s, tl.minimum(step + 1, span - 1), span, steps)[:, None] * 16 * PLANES, BITS, WIDEN)
        place = _place(s, step, span, steps)
        packed = tl.load(unit + place[:, None, None] * 16 * GROUP, eviction_policy="evict_first")
        for plane in tl.static_range(PLANES):
            # Of a step past a slice's end the weights are another's, and the inputs zeros.
            at = ((s * span + step) * PLANES + plane) * GROUP
            there = (m < M)[None, :, None]
            if not EVEN:
                there = there & (k[None, None, :] < (K - at)[:, None, None])
            b = tl.permute(tl.load(rows + at[:, None, None], mask=there, other=0.0), [0, 2, 1])
            part = dot(_codes(packed, plane, BITS, WIDEN), b, none, WIDEN)
            # Sixteen equal rows, which is what a tensor core's product has at least.
            total = tl.broadcast_to(dot(ones, b, nothing, WIDEN)[:, None], [SLICES, COLUMNS // 16, 16, ROWS])
            scale, offset = _scale_and_offset(now[plane], BITS)
            acc = _add_group(acc, part, tl.reshape(total, acc.shape), scale[:, :, None], offset[:, :, None])
        now = then
    # The slices' sums, one after another as in `_tall`.
    even, odd = tl.split(tl.reshape(tl.permute(acc, [1, 2, 0]), [COLUMNS, ROWS, 2, 2]))
    one, three = tl.split(even)
    two, four = tl.split(odd)
    y = tl.trans((((tl.zeros([COLUMNS, ROWS], tl.float32) + one) + two) + three) + four)
    _leave(y, bias, residual, out, M, N, so, sr, m, first, n, COLUMNS, WHAT, BIAS, RESIDUAL)


@jit
def _place(s, step, span, steps):
    """The step-th step of each slice; the last for one that has fewer."""
    return tl.minimum(s * span + step, steps - 1)


@jit(do_not_specialize=["M", "steps", "blocks"])
def _tall(
    x, units, words, sums, bias, residual, out, M, N, K, sx, so, sr, steps, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SWEEP: tl.constexpr,
    WHAT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr, SLICES: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """As `_stream`, slice after slice. Tiles go in sweeps of SWEEP along the rows, which share weights in the L2
    cache."""
    PLANES: tl.constexpr = 16 // BITS
    tiles_m, tiles_n = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    sweep = tl.program_id(0) // (SWEEP * tiles_n)
    high = tl.minimum(tiles_m - sweep * SWEEP, SWEEP)
    inside = tl.program_id(0) % (SWEEP * tiles_n)
    first = inside // high * COLUMNS
    m = (sweep * SWEEP + inside % high) * ROWS + tl.arange(0, ROWS)
    n, k = first + tl.arange(0, COLUMNS), tl.arange(0, GROUP)
    span = tl.cdiv(steps, SLICES)
    row = tl.minimum(n // 16, blocks - 1).to(tl.int64) * steps * 16 + n % 16
    unit = units + row[:, None] * GROUP + k[None, :]
    word = words + row * PLANES
    rows = x + m.to(tl.int64)[:, None] * sx + k[None, :]
    none = tl.zeros([COLUMNS, ROWS], tl.float32)
    acc, y = none, none
    now = _words(word, BITS, WIDEN)
    for step in range(0, steps):
        then = _words(word + tl.minimum(step + 1, steps - 1) * 16 * PLANES, BITS, WIDEN)
        packed = tl.load(unit + step * 16 * GROUP)
        for plane in tl.static_range(PLANES):
            at = (step * PLANES + plane) * GROUP
            there = (m < M)[:, None] if EVEN else (m < M)[:, None] & (k < K - at)[None, :]
            b = tl.trans(tl.load(rows + at, mask=there, other=0.0))
            part = dot(_codes(packed, plane, BITS, WIDEN), b, none, WIDEN)
            total = tl.load(sums + (step * PLANES + plane) * M + m, mask=m < M, other=0.0)[None, :]
            scale, offset = _scale_and_offset(now[plane], BITS)
            acc = _add_group(acc, part, total, scale[:, None], offset[:, None])
        now = then
        if ((step + 1) % span == 0) | (step + 1 == steps):
            y += acc
            acc = none
    _leave(tl.trans(y), bias, residual, out, M, N, so, sr, m, first, n, COLUMNS, WHAT, BIAS, RESIDUAL)


@jit
def _add_group(acc, part, total, scale, offset):
    """A group's part of the sums. The order and the fusing are spelled out: all forms must give the same bits."""
    shape: tl.constexpr = acc.shape
    more = tl.fma(tl.broadcast_to(total, shape), tl.broadcast_to(offset, shape), acc)
    return tl.fma(part, tl.broadcast_to(scale, shape), more)


@jit
def _leave(
    y, bias, residual, out, M, N, so, sr, m, first, n, COLUMNS: tl.constexpr, WHAT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What follows the sums y [rows m, columns n], and their way out."""
    if BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y = finish(y, WHAT)
    if WHAT == 1:
        N, n = N // 2, first // 2 + tl.arange(0, COLUMNS // 2)
    there = (m < M)[:, None] & (n < N)[None, :]
    if RESIDUAL:
        y += tl.load(residual + m.to(tl.int64)[:, None] * sr + n[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64)[:, None] * so + n[None, :], y.to(out.dtype.element_ty), mask=there)


@jit
def _words(at, BITS: tl.constexpr, WIDEN: tl.constexpr):
    """The words of a step's groups, at these addresses. By hand, because every thread then loads those of its own
    columns: the compiler's loads go through shared memory to where they are needed."""
    if WIDEN:
        found = (tl.load(at), tl.load(at + 1))
        if BITS == 4:
            found = (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    elif BITS == 4:
        found = tl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [at],
            (tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
        )  # fmt: skip
    else:
        found = tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at], (tl.int32, tl.int32), True, 1
        )
    return found


@constexpr_function
def unpacking(plane: int, bits: int) -> str:
    """PTX from a register of two units ($1) to one of two bf16 codes ($0).

    0x4300 is 128 in bf16, whose last place is then worth 1; 0x4500 is 2048, whose last place is worth 16; and 0xC508 is
    -2176. Every sum here is exact.
    """
    shift = plane * bits
    if bits == 4:
        return f"{{ .reg .b32 t; shr.u32 t, $1, {shift}; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }}"
    return f"""{{
        .reg .b32 t, low, high, less;
        shr.u32 t, $1, {shift};
        lop3.b32 low, t, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 t, t, 4;
        lop3.b32 high, t, 0x000F000F, 0x45004500, 0xEA;
        mov.b32 less, 0xC508C508;
        add.rn.bf16x2 high, high, less;
        add.rn.bf16x2 $0, high, low;
    }}"""


@jit
def _codes(packed, plane: tl.constexpr, BITS: tl.constexpr, WIDEN: tl.constexpr):
    """The codes of one group, bf16, exact: 128 + q of 4 bits, q of 8 bits. Two units a register."""
    if WIDEN:
        q = (packed.to(tl.int32) >> (plane * BITS)) & ((1 << BITS) - 1)
        return (q + (128 if BITS == 4 else 0)).to(tl.float32).to(tl.bfloat16)
    return tl.inline_asm_elementwise(unpacking(plane, BITS), "=r,r", [packed], tl.bfloat16, True, 2)


@jit
def _scale_and_offset(word, BITS: tl.constexpr):
    """Of a group: its scale, and what the sum of its inputs is worth; float32."""
    scale = (word << 16).to(tl.float32, bitcast=True)
    offset = (word & -65536).to(tl.float32, bitcast=True)
    if BITS == 4:
        offset = tl.fma(scale, tl.full(scale.shape, -128.0, tl.float32), offset)
    return scale, offset


@jit(do_not_specialize=["M"])
def _sums(x, sums, M, K, sx, ROWS: tl.constexpr, GROUP: tl.constexpr, WIDEN: tl.constexpr):
    """Each row's sums over groups, [groups, M] float32: by the tensor cores, in the order that `_stream` sums."""
    m, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    there = (m < M)[:, None] & (k < K)[None, :]
    b = tl.trans(tl.load(x + m.to(tl.int64)[:, None] * sx + k[None, :], mask=there, other=0.0))
    ones = tl.full([16, GROUP], 1.0, tl.float32).to(tl.bfloat16)
    same = dot(ones, b, tl.zeros([16, ROWS], tl.float32), WIDEN)
    tl.store(sums + tl.program_id(1).to(tl.int64) * M + m, tl.max(same, 0), mask=m < M)
