"""Products with MLX affine weights: value = scale · q + bias, q of 4 or 8 bits, a scale and a bias a group of inputs.

A value is rounded once, to bf16, as MLX's own dequantised weights are; its products are summed in float32, K upwards,
as `linear` sums those of dense weights. The inputs of a weight with few outputs are cut into `slices` such sums, which
are then added up in order: so a narrow output still keeps all processors busy.

Three forms give a row the same bits. `affine.cu`, in CUDA C++, brings codes straight to registers, for the fewest rows;
`_stream` unpacks in registers too and reads each weight once, for some rows; for many, `_widen` writes bf16 values to
memory, a part of the outputs at a time, and `_tall` multiplies by them.

Packed form, made once at load (`pack`, undone by `unpack`). A step is 128 inputs: 4 runs of 32. Unit u of a row, 16
bits, holds input u of each of 16 / bits runs, the first run lowest; 8 bits have two such halves a step. A mask then
turns a register of two units into two bf16 numbers q · 2^-133 (denormal ones have the value of their bits, and so have
the least normal ones), or 16 times that, and one fused multiplication and addition makes two values of them. For its
sake a scale is stored times 2^117 and a bias times 2^-16, exactly, so that a value comes out times 2^-16, which the
finished sum makes good. The 16 pairs of units of a run lie in the order of `PLACES`: a thread hands pairs t, t + 4,
t + 8 and t + 12 to the tensor cores, and those are 16 bytes then. Rows lie in blocks of 16, so that a program streams
through memory: units int16 [N / 16, steps, 16, 8 · bits], words int32 [N / 16, steps, 16, 128 / group], the scale's
bf16 bits low, the bias's high.
"""

from __future__ import annotations

import ctypes
from copy import copy

import torch
from torch import Tensor

from tfmagic.errors import Refusal

from . import cuda, tiles
from .common import (
    EARLY,
    INTERPRETED,
    cdiv,
    constexpr_function,
    copyable,
    descriptor,
    dot,
    fetch,
    jit,
    let_next_start,
    tl,
    wait_for_last,
)
from .epilogue import GATED, PLAIN, finish

BLOCK = 16
"""Rows of a weight that are packed together."""
STEP, RUN = 128, 32
"""Inputs that are packed together, and those of them that lie side by side."""
PLACES = [4 * (i % 4) + i // 4 for i in range(16)]
"""Which place of a run the i-th pair of units has, and which pair is at the i-th place."""
SCALE, BIAS = 2.0**117, 2.0**-16
"""What scales and biases are multiplied by, exactly: scales are below 2048."""
TURNS = 16
"""Row tiles of a weight whose slices may be added up at one time."""
THREADS = 256, 384, 512, 640, 768, 1024
"""What a program of affine.cu may have: the fewer they are, the more registers has each."""
SCRATCH = 128 << 20
"""Bytes that the bf16 values of a part of a weight take, about."""


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
        self.slices = tiles.slices(self.n)
        self.tickets = torch.zeros(TURNS * len(self.units), dtype=torch.int32, device=q.device)

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
    blocks, steps = cdiv(N, BLOCK), cdiv(K, STEP)
    pad = torch.nn.functional.pad
    codes = pad(codes, (0, steps * STEP - K, 0, blocks * BLOCK - N)).view(blocks, BLOCK, steps, -1, planes, RUN)
    shifts = torch.arange(0, 16, bits, device=codes.device, dtype=torch.int32)
    units = (codes << shifts[:, None]).sum(4, dtype=torch.int32).to(torch.int16)
    units = units.unflatten(4, (16, 2))[..., PLACES, :].flatten(3)
    fill = (0, (steps * STEP - K) // group, 0, blocks * BLOCK - N)
    parts = (scales.float() * SCALE).bfloat16(), (biases.float() * BIAS).bfloat16()
    low, high = (pad(part, fill).view(torch.int16).int() for part in parts)
    words = ((high << 16) | (low & 0xFFFF)).view(blocks, BLOCK, steps, STEP // group)
    return units.transpose(1, 2).contiguous(), words.transpose(1, 2).contiguous()


def unpack(units: Tensor, words: Tensor, n: int, k: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack`: codes int32 [n, k], scales and biases bf16 [n, k / group]."""
    shifts = torch.arange(0, 16, bits, device=units.device, dtype=torch.int32)
    pairs = units.transpose(1, 2).int().unflatten(3, (-1, 1, 16, 2))
    halves = pairs[..., PLACES, :].flatten(5)
    codes = ((halves >> shifts[:, None]) & ((1 << bits) - 1)).reshape(len(units) * BLOCK, -1)[:n, :k]
    flat = words.transpose(1, 2).reshape(len(units) * BLOCK, -1)[:n, : k * words.shape[3] // STEP]
    low, high = ((flat << s >> 16).to(torch.int16).view(torch.bfloat16).float() for s in (16, 0))
    return codes, (low / SCALE).bfloat16(), (high / BIAS).bfloat16()


def values(w: Affine) -> Tensor:
    """bf16 [N, K], from the packed form."""
    codes, scales, biases = (part.double() for part in unpack(w.units, w.words, w.n, w.k, w.bits))
    return (codes * scales.repeat_interleave(w.group, 1) + biases.repeat_interleave(w.group, 1)).bfloat16()


def affine_twin(x: Tensor, w: Affine) -> Tensor:
    """x · Wᵀ + bias in float64."""
    y = x.double() @ values(w).double().t()
    return y if w.bias is None else y + w.bias.double()


def affine(x: Tensor, w: Affine, what: int, residual: Tensor | None, out: Tensor, tile: tiles.Tile) -> None:
    """Launch a form. Triton does what CUDA C++ cannot do here."""
    if tile.form in ("direct", "wide"):
        if what in (PLAIN, GATED) and copyable(x) and cuda.available(x.device):
            for start in range(0, len(x), tile.rows):
                some = slice(start, start + tile.rows)
                _direct(x[some], w, what, None if residual is None else residual[some], out[some], tile)
            return
        tile = tiles.affine_rule(w.n, w.bits, w.group, tile.rows)
    (_many if tile.form == "tall" else _few)(x, w, what, residual, out, tile)


class Params(ctypes.Structure):
    """What affine.cu's kernel takes; its struct of that name gives shapes and dtypes."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "units", "words", "bias", "residual", "out")],
        *[(name, ctypes.c_int) for name in ("M", "N", "K", "sx", "so", "sr", "steps", "blocks", "tiles", "slices")],
        *[(name, ctypes.c_int) for name in ("inner", "stages", "gated", "wide", "early")],
    ]


def _direct(x: Tensor, w: Affine, what: int, residual: Tensor | None, out: Tensor, tile: tiles.Tile) -> None:
    """x [at most tile.rows, K]. Raises ValueError for a tile that has no room."""
    (stages, shared), outputs, inner = tiles.room(tile, w.slices), tile.columns // BLOCK, w.slices // tile.parts
    params = Params(
        *(None if one is None else one.data_ptr() for one in (x, w.units, w.words, w.bias, residual, out)),
        len(x), w.n, w.k, x.stride(0), out.stride(0), 0 if residual is None else residual.stride(0), w.steps,
        len(w.units), outputs, w.slices, inner, stages, what == GATED, out.dtype == torch.float32, tile.early,
    )  # fmt: skip
    threads, programs = 32 * outputs * inner, cdiv(len(w.units), outputs) * tile.parts
    defines = {"BITS": w.bits, "GROUP": w.group, "ROWS": tile.rows, "WIDE": int(tile.form == "wide")}
    defines["THREADS"] = next(most for most in THREADS if most >= threads)
    config = cuda.LaunchConfig(programs, threads, shared, tile.parts, tile.early)
    cuda.launch("affine", x.device, defines, params, config)


def _few(x: Tensor, w: Affine, what: int, residual: Tensor | None, out: Tensor, tile: tiles.Tile) -> None:
    M, rows = len(x), cdiv(len(x), tile.rows)
    if rows > TURNS:
        raise ValueError(f"{rows} row tiles, at most {TURNS}")
    bias, add = x if w.bias is None else w.bias, out if residual is None else residual
    parts = x.new_empty(w.slices, M, w.n, dtype=torch.float32) if w.slices > 1 else out
    early = tile.early and EARLY
    _stream[(rows * cdiv(w.n, tile.columns) * w.slices,)](
        x, w.units, w.words, bias, add, out, parts, w.tickets, M, w.n, w.k, x.stride(0), out.stride(0), add.stride(0),
        w.steps, len(w.units), tile.rows, tile.columns, w.bits, w.group, what, w.bias is not None, residual is not None,
        w.k % STEP == 0, w.slices, early, tile.ahead * early, INTERPRETED,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=early,
    )  # fmt: skip


def _many(x: Tensor, w: Affine, what: int, residual: Tensor | None, out: Tensor, tile: tiles.Tile) -> None:
    x, half = x.contiguous(), 2 if what == GATED else 1
    parts = cdiv(2 * w.n * w.k, SCRATCH)
    rows = cdiv(cdiv(w.n, parts), 256) * 256
    scratch = x.new_empty(min(rows, len(w.units) * BLOCK), w.k)
    for start in range(0, w.n, rows):
        n = min(rows, w.n - start)
        some, columns = slice(start // BLOCK, cdiv(start + n, BLOCK)), slice(start // half, (start + n) // half)
        units, words, y = w.units[some], w.words[some], out[:, columns]
        bias = x if w.bias is None else w.bias[start : start + n]
        add = y if residual is None else residual[:, columns]
        _widen[(cdiv(len(units), 8), w.steps)](
            units, words, scratch, w.k, w.steps, len(units), w.bits, w.group, INTERPRETED, num_warps=4
        )
        _tall[(cdiv(len(x), tile.rows) * cdiv(n, tile.columns),)](
            descriptor(x, tile.rows, tile.depth), descriptor(scratch, tile.columns, tile.depth), bias, add, y, len(x),
            n, w.k, cdiv(w.steps, w.slices) * STEP, y.stride(0), add.stride(0), tile.rows, tile.columns, tile.depth,
            tile.group, what, w.bias is not None, residual is not None, w.slices, INTERPRETED,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


@jit(do_not_specialize=["M", "steps", "blocks"])
def _stream(
    x, units, words, bias, residual, out, parts, tickets, M, N, K, sx, so, sr, steps, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WHAT: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr, SLICES: tl.constexpr, EARLY: tl.constexpr,
    AHEAD: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program a slice of an output tile, held transposed, [columns, rows]: weights come from registers and so stand
    on the left of the tensor cores' product. Row tiles of the same weights run side by side. Each of a tile's programs
    leaves its sums in memory and takes a ticket; the one with the last adds them up."""
    PLANES: tl.constexpr = 16 // BITS
    UNITS: tl.constexpr = 8 * BITS
    GROUPS: tl.constexpr = 128 // GROUP
    tiles_m = tl.cdiv(M, ROWS)
    tile_m, s = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m % SLICES
    tile_n = tl.program_id(0) // (tiles_m * SLICES)
    m, n = tile_m * ROWS + tl.arange(0, ROWS), tile_n * COLUMNS + tl.arange(0, COLUMNS)
    span = tl.cdiv(steps, SLICES)
    begin, end = s * span, tl.minimum((s + 1) * span, steps)
    # Rows of weights past the last block are read from it, and give columns that are not stored.
    block, inner = tl.minimum(n // 16, blocks - 1).to(tl.int64) * steps * 16, n % 16
    let_next_start(EARLY)
    if AHEAD:
        line = begin * (UNITS // 4) + tl.arange(0, AHEAD)[None, :] * 16 + inner[:, None]
        fetch(units + block[:, None] * UNITS + tl.minimum(line, steps * (UNITS // 4) - 1) * 64)
    wait_for_last(EARLY)
    k = tl.arange(0, 32)
    rows = x + m.to(tl.int64)[:, None] * sx + k[None, :]
    unit = units + (block + inner)[:, None] * UNITS + _place(k)[None, :]
    word = words + (block + inner)[:, None] * GROUPS
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(begin, end):
        for run in tl.static_range(4):
            if run % PLANES == 0:
                packed = tl.load(unit + step * 16 * UNITS + run // PLANES * 32, eviction_policy="evict_first")
            if run % (4 // GROUPS) == 0:
                group = tl.load(word + step * 16 * GROUPS + run * GROUPS // 4)
            at = step * 128 + run * 32
            there = (m < M)[:, None] if EVEN else (m < M)[:, None] & (k < K - at)[None, :]
            b = tl.trans(tl.load(rows + at, mask=there, other=0.0))
            acc = dot(_values(packed, group, run % PLANES, BITS, WIDEN), b, acc, WIDEN)
    y = tl.trans(acc)
    if SLICES == 1:
        _leave(y, bias, residual, out, M, N, so, sr, m, n, tile_n * COLUMNS, COLUMNS, WHAT, BIAS, RESIDUAL)
    else:
        there = (m < M)[:, None] & (n < N)[None, :]
        mine = parts + m.to(tl.int64)[:, None] * N + n[None, :]
        slice_size = M.to(tl.int64) * N
        tl.store(mine + s * slice_size, y, mask=there)
        tl.debug_barrier()
        ticket = tickets + tile_n * tiles_m + tile_m
        if tl.atomic_add(ticket, 1) == SLICES - 1:
            tl.store(ticket, 0)
            y = tl.zeros([ROWS, COLUMNS], tl.float32)
            for each in tl.static_range(SLICES):
                y += tl.load(mine + each * slice_size, mask=there, other=0.0, cache_modifier=".cg")
            _leave(y, bias, residual, out, M, N, so, sr, m, n, tile_n * COLUMNS, COLUMNS, WHAT, BIAS, RESIDUAL)


@jit(do_not_specialize=["M"])
def _tall(
    x, w, bias, residual, out, M, N, K, span, so, sr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SWEEP: tl.constexpr, WHAT: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SLICES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program an output tile, slice after slice; x and w [N, K] bf16 are descriptors. Tiles go in sweeps of SWEEP
    along the rows, which share weights in the L2 cache."""
    tiles_m, tiles_n = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    sweep = tl.program_id(0) // (SWEEP * tiles_n)
    high = tl.minimum(tiles_m - sweep * SWEEP, SWEEP)
    inside = tl.program_id(0) % (SWEEP * tiles_n)
    first_m, first_n = (sweep * SWEEP + inside % high) * ROWS, inside // high * COLUMNS
    m, n = first_m + tl.arange(0, ROWS), first_n + tl.arange(0, COLUMNS)
    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    if SLICES == 1:
        for at in range(0, K, DEPTH):
            y = dot(x.load([first_m, at]), w.load([first_n, at]).T, y, WIDEN)
    else:
        for s in range(0, SLICES):
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            for at in range(s * span, tl.minimum((s + 1) * span, K), DEPTH):
                acc = dot(x.load([first_m, at]), w.load([first_n, at]).T, acc, WIDEN)
            y += acc
    _leave(y, bias, residual, out, M, N, so, sr, m, n, first_n, COLUMNS, WHAT, BIAS, RESIDUAL)


@jit
def _leave(
    y, bias, residual, out, M, N, so, sr, m, n, first, COLUMNS: tl.constexpr, WHAT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What follows the sums y [rows m, columns n], which are too small by 2^16, and their way out."""
    y *= 65536.0
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
def _widen(
    units, words, out, K, steps, blocks, BITS: tl.constexpr, GROUP: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    """Values times 2^-16, out bf16 [N, K]: a program a step of 8 blocks."""
    PLANES: tl.constexpr = 16 // BITS
    UNITS: tl.constexpr = 8 * BITS
    GROUPS: tl.constexpr = 128 // GROUP
    n, k = tl.program_id(0) * 128 + tl.arange(0, 128), tl.arange(0, 32)
    step, inside = tl.program_id(1), (n < blocks * 16)[:, None]
    block = (n // 16).to(tl.int64) * steps + step
    for run in tl.static_range(4):
        if run % PLANES == 0:
            place = (block * 16 + n % 16)[:, None] * UNITS + run // PLANES * 32 + _place(k)[None, :]
            packed = tl.load(units + place, mask=inside, other=0)
        if run % (4 // GROUPS) == 0:
            place = (block * 16 + n % 16)[:, None] * GROUPS + run * GROUPS // 4
            group = tl.load(words + place, mask=inside, other=0)
        at = step * 128 + run * 32 + k[None, :]
        found = _values(packed, group, run % PLANES, BITS, WIDEN)
        tl.store(out + n.to(tl.int64)[:, None] * K + at, found, mask=inside & (at < K))


@jit
def _place(k):
    """Where the units of inputs k of a run lie, as PLACES says of pairs."""
    return k // 2 % 4 * 8 + k // 8 * 2 + k % 2


@constexpr_function
def parting(plane: int, bits: int) -> str:
    """PTX from a word ($2) to its scale ($0) and bias ($1), each twice in a register. The second of two codes of 4 bits
    in a byte comes out 16 times too large, which its scale makes good: 0x3D80 is 1 / 16 in bf16, 0x8000 is -0."""
    less = ""
    if bits == 4 and plane % 2:
        less = "mov.b32 a, 0x3D803D80; mov.b32 b, 0x80008000; fma.rn.bf16x2 low, low, a, b;"
    return f"""{{
        .reg .b32 low, a, b;
        prmt.b32 low, $2, $2, 0x1010;
        prmt.b32 $1, $2, $2, 0x3232;
        {less}
        mov.b32 $0, low;
    }}"""


@constexpr_function
def unpacking(plane: int, bits: int) -> str:
    """PTX from a register of two units ($1) to one of two values ($0), by the scale ($2) and the bias ($4)."""
    byte, mask = plane * bits // 8, "0x00FF00FF" if bits == 8 else "0x00F000F0" if plane % 2 else "0x000F000F"
    shifted = "shr.u32 q, $1, 8;" if byte else "mov.b32 q, $1;"
    return f"{{ .reg .b32 q; {shifted} and.b32 q, q, {mask}; fma.rn.bf16x2 $0, q, $2, $4; }}"


@jit
def _values(packed, word, plane: tl.constexpr, BITS: tl.constexpr, WIDEN: tl.constexpr):
    """Of a run: packed int16 [columns, 32] and its group's words [columns, 1] -> values times 2^-16, bf16."""
    if WIDEN:
        q = ((packed.to(tl.int32) >> (plane * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
        scale = (word << 16).to(tl.float32, bitcast=True) * 2.0**-117 * 2.0**-16
        return (q * scale + (word & -65536).to(tl.float32, bitcast=True)).to(tl.bfloat16)
    scale, offset = tl.inline_asm_elementwise(
        parting(plane, BITS), "=r,=r,r", [word], (tl.int32, tl.int32), True, 1
    )  # fmt: skip
    scale, offset = tl.broadcast_to(scale, packed.shape), tl.broadcast_to(offset, packed.shape)
    # Two units a register, but the words of two units in two.
    return tl.inline_asm_elementwise(
        unpacking(plane, BITS), "=r,r,r,r,r,r", [packed, scale, offset], tl.bfloat16, True, 2
    )  # fmt: skip
