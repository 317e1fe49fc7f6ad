"""Causal attention over paged keys: `prompt_attention` for packed prompts, `round_attention` for windows of streams.

softmax(scale · q kᵀ) v, query head h on kv head h // (H / KV). Keys are walked at absolute positions, so a row's bits
follow from its own position and keys alone.

Prompt rows: 64-key tiles from position 0 on, each folded into a running maximum, sum and mix.

Window rows: a row at position p takes the keys 0 .. p - 16 from the pages in 512-key chunks, eight 64-key tiles each,
and the keys p - 15 .. p in one piece behind them, each from its page or, inside the window, from the row's own
ancestor. The cut follows from p, so a row alone, in a chain and in a tree comes to the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .common import EARLY, INTERPRETED, cdiv, descriptor, dot, jit, launchable, power_of_two, processors, take_turn, tl
from .packing import ROWS, STREAMS, Prompts, Windows, locate
from .pages import PAGE, Rows

TILE = 64
"""Keys folded in at once."""


class Partials(NamedTuple):
    """What `round_attention` holds of each 512-key chunk until its end."""

    mix: Tensor
    """float32 [chunks · R · H, d]: values mixed by exp(score - top)."""
    stats: Tensor
    """float32 [2, chunks · R · H]: the chunk's top score, before scaling, and the sum of the weights."""
    chunks: int


def prompt_attention(
    q: Tensor,
    pages: Rows,
    table: Tensor,
    prompts: Prompts,
    scale: float | None = None,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of packed prompt rows over their sequences' pages, which hold their own keys already.

    q bf16 [L, H, d]; pages of one layer [pages, KV, 512, d]; table int32 [slots, most pages]; scale: d^-0.5 unless
    given; window: a row sees that many keys, itself included (0: all). Returns bf16 [L, H, d].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty_like(q) if out is None else out
    if launchable(q):
        return _launch_prompt(q, pages, table, prompts, scale, window, out)
    return prompt_attention_twin(q, pages, table, prompts, scale, window, out)


def round_attention(
    q: Tensor,
    rows: Rows,
    pages: Rows,
    table: Tensor,
    slots: Tensor,
    committed: Tensor,
    windows: Windows,
    partials: Partials,
    scale: float | None = None,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of the rows of S windows, each over its stream's pages and its own ancestors in the window.

    q bf16 [S, R, H, d]; rows: the windows' keys and values as `pages.stored` gives them [S, R, KV, d]; pages of one
    layer; table int32 [slots, most pages]; slots, committed int32 [S]: each stream's slot and rows before the window;
    window: 0 or at least 16. Returns bf16 [S, R, H, d], zeros for rows not in use.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if 0 < window < ROWS:
        raise ValueError(f"a sliding window of {window} keys is shorter than {ROWS}")
    out = torch.empty_like(q) if out is None else out
    if launchable(q):
        return _launch_round(q, rows, pages, table, slots, committed, windows, partials, scale, window, out)
    return round_attention_twin(q, rows, pages, table, slots, committed, windows, scale, window, out)


def partials(S: int, R: int, heads: int, dim: int, chunks: int, device: torch.device | str) -> Partials:
    """Room for `round_attention` of up to S windows of R rows: `chunks` is the most 512-key chunks that the streams'
    committed rows fill together, a page that streams share counting once for each. One is enough for all layers.
    (On a CPU the twin needs none.)"""
    if not INTERPRETED and torch.device(device).type == "cpu":
        chunks = 0
    room = chunks * R * heads
    return Partials(torch.empty(room, dim, device=device), torch.empty(2, room, device=device), chunks)


def keys_of(pages: Rows, table: Tensor, slot: int, n: int) -> tuple[Tensor, Tensor]:
    """The first n keys and values of a sequence, float64 [KV, n, d]."""
    held = table[slot, : cdiv(n, PAGE)].long()
    wide = []
    for x, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        rows = x[held].to(torch.float64)
        if scale is not None:
            rows = rows * scale[held][..., None]
        wide.append(rows.transpose(0, 1).flatten(1, 2)[:, :n])
    return wide[0], wide[1]


def softmax_mix(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """float64 q [L, H, d] over k, v [KV, n, d]; seen bool [L, n]: [L, H, d]."""
    rows, heads, d = q.shape
    grouped = q.double().view(rows, len(k), -1, d).permute(1, 2, 0, 3)
    scores = (grouped @ k[:, None].transpose(-1, -2) * scale).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v[:, None]).permute(2, 0, 1, 3).reshape(rows, heads, d)


def prompt_attention_twin(
    q: Tensor, pages: Rows, table: Tensor, prompts: Prompts, scale: float, window: int, out: Tensor
) -> Tensor:
    """Full blocks of 64 rows anchored at row 0, so that a product's shape follows from the rows' positions."""
    for slot, start, rows in prompts.parts():
        k, v = keys_of(pages, table, slot, start + cdiv(rows.stop - rows.start, TILE) * TILE)
        for first in range(rows.start, rows.stop, TILE):
            last, place = min(first + TILE, rows.stop), start + first - rows.start
            n = place + TILE
            block = q.new_zeros(TILE, *q.shape[1:])
            block[: last - first] = q[first:last]
            at, key = torch.arange(place, n)[:, None], torch.arange(n)
            seen = (key <= at) & (key > at - (window or n))
            past = key[:, None] < start + rows.stop - rows.start
            mixed = softmax_mix(block, k[:, :n].where(past, 0), v[:, :n].where(past, 0), seen, scale)
            out[first:last] = mixed[: last - first].to(out.dtype)
    return out


def round_attention_twin(
    q: Tensor,
    rows: Rows,
    pages: Rows,
    table: Tensor,
    slots: Tensor,
    committed: Tensor,
    windows: Windows,
    scale: float,
    window: int,
    out: Tensor,
) -> Tensor:
    """Row by row: the stream's committed keys, then the row's own path."""
    out.zero_()
    for s, (slot, start, count) in enumerate(zip(slots.tolist(), committed.tolist(), windows.counts.tolist())):
        k, v = keys_of(pages, table, slot, start)
        own = [x[s].double() if y is None else x[s].double() * y[s][..., None] for x, y in
               ((rows.k, rows.k_scale), (rows.v, rows.v_scale))]  # fmt: skip
        for r in range(count):
            path = [a for a in windows.ancestors[s, r].tolist() if a >= 0][::-1]
            k_all, v_all = (torch.cat([x, y[path].transpose(0, 1)], 1) for x, y in ((k, own[0]), (v, own[1])))
            n = k_all.shape[1]
            seen = torch.arange(n)[None] >= n - (window or n)
            out[s, r] = softmax_mix(q[s, r : r + 1], k_all, v_all, seen, scale)[0].to(out.dtype)
    return out


def _scales(rows: Rows) -> tuple[Tensor, Tensor]:
    """The scales; without fp8 anything that a kernel may take and not read."""
    return (rows.k_scale, rows.v_scale) if rows.fp8 else (rows.k, rows.v)


def _copies(pages: Rows, tile: int) -> list:
    """What the copy engine is told: of keys and of values, `tile` rows at once, and of their scales, None with bf16. It
    has e4m3 numbers two by two, as int16 [rows, d / 2]."""
    copies = []
    for x in (pages.k, pages.v):
        rows = (x.view(torch.int16) if pages.fp8 else x).flatten(0, 2)
        copies.append(descriptor(rows, tile, rows.shape[1]))
    scales = (pages.k_scale, pages.v_scale)
    return copies + [None if x is None else descriptor(x.view(-1, tile), 1, tile) for x in scales]


def _check(q: Tensor, *others: Tensor | None) -> None:
    """A kernel is compiled for the alignment it meets, and sums may be ordered by it: it must always be the same."""
    if q.shape[-1] not in (16, 32, *LAUNCH_PROMPT):
        raise ValueError(f"attention takes heads of 16, 32, 64, 128, 256 or 512 dimensions, not {q.shape[-1]}")
    for x in (q, *others):
        if x is not None and (x.data_ptr() % 16 or not x.is_contiguous()):
            raise ValueError("attention takes contiguous tensors that start at multiples of 16 bytes")


LAUNCH_PROMPT = {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 64, 8, 2), 512: (64, 32, 8, 2)}
"""Head dimension -> query rows of a program, keys of a tile, warps, stages; with fp8 a stage more, or a tile would only
be asked for when the last one is done with. The order of a row's sum of weights follows from the keys, which are not to
be chosen by the call."""
LAUNCH_FEW = {256: (64, 64, 4, 2)}
"""Likewise, where as many programs are few: a warp has 16 rows in both, and does the same with them."""


def _launch_prompt(
    q: Tensor, pages: Rows, table: Tensor, prompts: Prompts, scale: float, window: int, out: Tensor
) -> Tensor:
    L, heads, d = q.shape
    kv = pages.k.shape[1]
    _check(q, *pages, out)
    block, tile, warps, stages = LAUNCH_PROMPT[max(d, 64)]
    if d in LAUNCH_FEW and heads * cdiv(L, LAUNCH_FEW[d][0]) <= processors(q.device):
        block, tile, warps, stages = LAUNCH_FEW[d]
    grid = (heads, cdiv(L, block) + prompts.sequences - 1)
    _prompt[grid](
        q, pages.k, pages.v, *_copies(pages, tile), table, prompts.slots, prompts.starts, prompts.lengths, out,
        scale * math.log2(math.e), prompts.sequences, table.shape[1],
        heads, heads // kv, d, block, tile, PAGE, window, pages.fp8, STREAMS, INTERPRETED,
        num_warps=warps, num_stages=stages + pages.fp8,
    )  # fmt: skip
    return out


@jit
def _wide(x, WIDEN: tl.constexpr):
    """int16, each two e4m3 numbers -> bf16, exactly: (the lower ones, the upper ones).

    The GPU has an instruction for this, which takes four times as long. Here two numbers at once come into the lower
    halves of 16 bits each, behind copies of their signs. Four places further up, exponent and mantissa are where bf16
    has its own, and all but the first copy of the sign is cleared. A product with 2^120 makes good the exponent's bias,
    and is exact: what is subnormal in e4m3 is so in bf16. NaN, which is never written, becomes 480, so a key behind a
    sequence's end counts for nothing under a weight of zero.

    A number for two, of 16 bits as the results are, keeps a product of fewer than 64 rows in the order of one of more:
    of 8 bits, the compiler would have four neighbours in a thread."""
    if WIDEN:
        low = (x & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = ((x >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return low.to(tl.bfloat16), high.to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            prmt.b32 a, $2, 0, 0xa280;
            prmt.b32 b, $2, 0, 0xb391;
            shl.b32 a, a, 4;
            shl.b32 b, b, 4;
            and.b32 a, a, 0x87f087f0;
            and.b32 b, b, 0x87f087f0;
            mov.b32 c, 0x7b807b80;
            mul.rn.bf16x2 $0, a, c;
            mul.rn.bf16x2 $1, b, c;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@jit
def _scores(q, odd_q, keys, FP8: tl.constexpr, APART: tl.constexpr, WIDEN: tl.constexpr):
    """Queries [M, d] by keys [d, n] -> float32 [M, n].

    With FP8, keys are pairs [d / 2, n], and the sum takes all even places of d first, then the odd ones: so pairs come
    apart without a move. q is in that order; or APART, with two products that sum alike, q and odd_q [M, d / 2] are its
    halves."""
    scores = tl.zeros([q.shape[0], keys.shape[1]], tl.float32)
    if APART:
        even, odd = _wide(keys, WIDEN)
        return dot(odd_q, odd, dot(q, even, scores, WIDEN), WIDEN)
    elif FP8:
        even, odd = _wide(keys, WIDEN)
        both = tl.join(even, odd).permute(2, 0, 1).reshape(2 * keys.shape[0], keys.shape[1])
        return dot(q, both, scores, WIDEN)
    else:
        return dot(q, keys, scores, WIDEN)


@jit
def _weigh(scores, scales, see, top, total, scale,
           FP8: tl.constexpr, MASKED: tl.constexpr, BY_DOT: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """Scores of a tile [M, n]: (weights [M, n], what fades the sums so far, top [M], total). A key that a row does not
    see leaves the row's bits alone. Every multiply and add that could be contracted is written as it is to be done, so
    the masked and the plain form agree. `top` is in units of unscaled scores.

    total: [M], or with BY_DOT [M, 16], the sum in each column, taken by a product with ones: that has the same order
    of addition for every M, while the order of `tl.sum` follows from the tile's layout.
    """
    if FP8:
        scores = scores * scales[None, :]
    if MASKED:
        scores = tl.where(see, scores, -float("inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    level = tl.where(new == -float("inf"), 0.0, new) if MASKED else new
    offset = level * scale
    weights = tl.exp2(tl.fma(scores, scale, (0.0 - offset)[:, None]))
    fade = tl.exp2((top - level) * scale)
    if BY_DOT:
        ones = tl.full([scores.shape[1], 16], 1.0, tl.float32).to(tl.bfloat16)
        total = dot(weights.to(tl.bfloat16), ones, total * fade[:, None], WIDEN)
    else:
        total = tl.fma(total, fade, tl.sum(weights, 1))
    return weights, fade, new, total


@jit
def _mix(weights, values, scales, mix, odd_mix, fade, FP8: tl.constexpr, APART: tl.constexpr, WIDEN: tl.constexpr):
    """mix [M, d], faded, and the values [n, d], with FP8 pairs [n, d / 2], by their weights; then mix has the even
    places of d first, or APART, mix and odd_mix [M, d / 2] are its halves."""
    if FP8:
        weights = weights * scales[None, :]
    weights = weights.to(tl.bfloat16)
    if APART:
        even, odd = _wide(values, WIDEN)
        odd_mix = dot(weights, odd, odd_mix * fade[:, None], WIDEN)
        values = even
    elif FP8:
        even, odd = _wide(values, WIDEN)
        values = tl.join(even, odd).permute(0, 2, 1).reshape(values.shape[0], 2 * values.shape[1])
    return dot(weights, values, mix * fade[:, None], WIDEN), odd_mix


@jit
def _order(D: tl.constexpr, FP8: tl.constexpr):
    """The places of d in the order in which a product takes them."""
    i = tl.arange(0, D)
    return i % (D // 2) * 2 + i // (D // 2) if FP8 else i


@jit
def _ordered(mix, FP8: tl.constexpr):
    """mix [M, d] with the places of d where they belong."""
    if FP8:
        mix = mix.reshape(mix.shape[0], 2, mix.shape[1] // 2).permute(0, 2, 1).reshape(mix.shape[0], mix.shape[1])
    return mix


@jit
def _tile(x, copy, copy_scales, page, first, limit, head, heads, d: tl.constexpr, TILE: tl.constexpr,
          PAGE: tl.constexpr, ACROSS: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    """Keys or values of the places first, first + 1, ... of one kv head, which lie in `page`, [n, d], or ACROSS [d, n];
    and their scales. Places from `limit` on read as zero; with FP8 values' scales do, and keys there hold anything."""
    n, i = tl.arange(0, TILE), tl.arange(0, d)
    if FP8:
        tile, scale = _copied(copy, copy_scales, (page * heads + head) * PAGE + first % PAGE, TILE, FP8)
        if ACROSS:
            return tile.T, scale
        else:
            return tile, tl.where(first + n < limit, scale, 0.0)
    else:
        row = (page.to(tl.int64) * heads + head) * PAGE + first % PAGE
        there = first + n < limit
        at = n[None, :] * d + i[:, None] if ACROSS else n[:, None] * d + i[None, :]
        tile = tl.load(x + row * d + at, mask=there[None, :] if ACROSS else there[:, None], other=0.0)
        return tile, tl.zeros([TILE], tl.float32)


@jit
def _copied(copy, copy_scales, row, TILE: tl.constexpr, FP8: tl.constexpr):
    """Keys or values [TILE, d] of the pages' rows from `row` on, by the copy engine; and their scales."""
    tile = copy.load([row, 0])
    scale = tl.zeros([TILE], tl.float32)
    if FP8:
        scale = copy_scales.load([row // TILE, 0]).reshape(TILE)
    return tile, scale


@jit(do_not_specialize=["n", "most"])
def _prompt(
    q, k, v, copy_k, copy_v, copy_ks, copy_vs, table, slots, starts, lengths, out, scale, n, most,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, FP8: tl.constexpr, MOST: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program a head and tile of BLOCK rows, the last tiles, which see the most keys, first. Keys that every row sees
    come by the copy engine; those about the diagonal, and behind them what may be anything, by masked loads."""
    KV: tl.constexpr = HEADS // GROUP
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    kv = head // GROUP
    sequence, row, own, tile = locate(lengths, n, tile, BLOCK, MOST)
    if sequence < n:
        place = tl.load(starts + sequence) + tile * BLOCK
        end = tl.load(starts + sequence) + own
        table += tl.load(slots + sequence).to(tl.int64) * most
        m, i = tl.arange(0, BLOCK), tl.arange(0, D)
        at = place + m
        there = at < end
        first_row = ((row + tile * BLOCK).to(tl.int64) * HEADS + head) * D
        spot = m[:, None] * (HEADS * D)
        queries = tl.load(q + first_row + spot + _order(D, FP8)[None, :], mask=there[:, None], other=0.0)
        mix = tl.zeros([BLOCK, D], tl.float32)
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        low = 0
        whole = (place + 1) // TILE * TILE  # keys that every row sees
        if WINDOW:
            low = tl.maximum(place + 1 - WINDOW, 0) // TILE * TILE
            whole = low
        page = tl.load(table + low // PAGE)
        for first in range(low, whole, TILE):
            # A tile ahead by hand: else the copies would wait for it.
            following = tl.load(table + (first + TILE) // PAGE)
            where = (page * KV + kv) * PAGE + first % PAGE
            keys, ks = _copied(copy_k, copy_ks, where, TILE, FP8)
            scores = _scores(queries, queries, keys.T, FP8, False, WIDEN)
            weights, fade, top, total = _weigh(scores, ks, there, top, total, scale, FP8, False, False, WIDEN)
            values, vs = _copied(copy_v, copy_vs, where, TILE, FP8)
            mix, _ = _mix(weights, values, vs, mix, mix, fade, FP8, False, WIDEN)
            page = following
        # Few and not worth registers that the loop above lacks then; the copy engine takes none.
        STAGES: tl.constexpr = 3 if FP8 else 1 if D <= 256 else 2
        for first in tl.range(whole, tl.minimum(place + BLOCK, end), TILE, num_stages=STAGES):
            page = tl.load(table + first // PAGE)
            keys, ks = _tile(k, copy_k, copy_ks, page, first, end, kv, KV, D, TILE, PAGE, True, FP8)
            scores = _scores(queries, queries, keys, FP8, False, WIDEN)
            key = first + tl.arange(0, TILE)
            see = key[None, :] <= at[:, None]
            if WINDOW:
                see = see & (key[None, :] > at[:, None] - WINDOW)
            weights, fade, top, total = _weigh(scores, ks, see, top, total, scale, FP8, True, False, WIDEN)
            values, vs = _tile(v, copy_v, copy_vs, page, first, end, kv, KV, D, TILE, PAGE, False, FP8)
            mix, _ = _mix(weights, values, vs, mix, mix, fade, FP8, False, WIDEN)
        mix = _ordered((mix / total[:, None]).to(tl.bfloat16), FP8)
        tl.store(out + first_row + spot + i[None, :], mix, mask=there[:, None])


def _launch_round(
    q: Tensor,
    rows: Rows,
    pages: Rows,
    table: Tensor,
    slots: Tensor,
    committed: Tensor,
    windows: Windows,
    partials: Partials,
    scale: float,
    window: int,
    out: Tensor,
) -> Tensor:
    S, R, heads, d = q.shape
    kv = pages.k.shape[1]
    if S > STREAMS:
        raise ValueError(f"a round has {STREAMS} windows at most, not {S}")
    _check(q, *rows, *pages, out)
    block = max(power_of_two(R * heads // kv), 64 if pages.fp8 and d < 32 else 16)  # half of 16 is short for a product
    warps, stages = (LAUNCH_BODY_FP8 if pages.fp8 else LAUNCH_BODY)[min(block, 128)]
    copies = _copies(pages, TILE) if pages.fp8 else [None] * 4
    shared = (scale * math.log2(math.e), S, R, table.shape[1], heads, heads // kv, d, PAGE, window, pages.fp8)
    _body[(PROGRAMS * processors(q.device),)](
        q, pages.k, pages.v, *copies, table, slots, committed, windows.counts, windows.depths, partials.mix,
        partials.stats, partials.chunks * R * heads, *shared, block, TILE, ROWS, STREAMS, EARLY,
        INTERPRETED, num_warps=warps, num_stages=stages, launch_pdl=EARLY,
    )  # fmt: skip
    _finish[(S * R, heads)](
        q, rows.k, rows.v, *_scales(rows), pages.k, pages.v, *_scales(pages), table, slots, committed,
        windows.counts, windows.depths, windows.ancestors, partials.mix, partials.stats, partials.chunks * R * heads,
        out, *shared, ROWS, STREAMS, EARLY, num_warps=4, launch_pdl=EARLY,
    )  # fmt: skip
    return out


PROGRAMS = 2
"""Programs of the body a multiprocessor: each takes chunks until none is left."""
LAUNCH_BODY = {16: (4, 3), 32: (4, 3), 64: (4, 2), 128: (8, 2)}
LAUNCH_BODY_FP8 = {16: (4, 4), 32: (4, 3), 64: (4, 2), 128: (8, 3)}
"""Query rows of a program -> warps, stages; with fp8 as many as leave room for PROGRAMS of up to 64 rows."""


@jit
def _chunks(committed, counts, S, R, WINDOW: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr):
    """Of each stream (its first chunk, how many there are): those that any row of a window of R rows may see."""
    i = tl.arange(0, MOST)
    rows = tl.load(committed + i, mask=i < S, other=0)
    used = tl.load(counts + i, mask=i < S, other=0)
    keys = tl.where(used > 0, tl.maximum(rows + R - ROWS, 0), 0)
    first = tl.zeros([MOST], tl.int32)
    if WINDOW:
        first = tl.maximum(rows + 1 - WINDOW, 0) // PAGE
    return first, tl.maximum((keys + PAGE - 1) // PAGE - first, 0)


@jit(do_not_specialize=["room", "S", "R", "most"])
def _body(
    q, k, v, copy_k, copy_v, copy_ks, copy_vs, table, slots, committed, counts, depths, mixes, stats,
    room, scale, S, R, most,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr,
    EARLY: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Programs take the pairs of chunk and kv head in turn; each gives the chunk's mix, top and total of all R · GROUP
    rows. Lengths are read on the device, so one launch serves any."""
    take_turn(EARLY)
    KV: tl.constexpr = HEADS // GROUP
    i = tl.arange(0, MOST)
    first_chunk, chunks = _chunks(committed, counts, S, R, WINDOW, PAGE, ROWS, MOST)
    upto = tl.cumsum(chunks, 0)
    m, e = tl.arange(0, BLOCK), tl.arange(0, D)
    r, g = m // GROUP, m % GROUP
    # A product of fewer than 64 rows has its operands in registers: what is unpacked there stays there.
    APART: tl.constexpr = FP8 and BLOCK < 64
    for item in range(tl.program_id(0), tl.minimum(tl.sum(chunks, 0) * KV, room // (R * GROUP)), tl.num_programs(0)):
        index, head = item // KV, item % KV
        s = tl.sum((upto <= index).to(tl.int32), 0)
        chunk = index - tl.sum(tl.where(i < s, chunks, 0), 0) + tl.sum(tl.where(i == s, first_chunk, 0), 0)
        rows = tl.load(committed + s)
        own = table + tl.load(slots + s).to(tl.int64) * most
        at = rows + tl.load(depths + s * R + r, mask=r < R, other=0)
        spot = ((s * R + r) * HEADS + head * GROUP + g)[:, None] * D
        if APART:
            spot += 2 * tl.arange(0, D // 2)[None, :]
            odd_queries = tl.load(q + spot + 1, mask=(r < R)[:, None], other=0.0)
        else:
            spot += _order(D, FP8)[None, :]
            odd_queries = 0.0
        queries = tl.load(q + spot, mask=(r < R)[:, None], other=0.0)
        mix = tl.zeros([BLOCK, queries.shape[1]], tl.float32)
        odd_mix = mix
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK, 16], tl.float32)
        page = tl.load(own + chunk)
        end = tl.minimum((chunk + 1) * PAGE, rows + R - ROWS)
        for first in range(chunk * PAGE, end, TILE):
            keys, ks = _tile(k, copy_k, copy_ks, page, first, rows, head, KV, D, TILE, PAGE, True, FP8)
            scores = _scores(queries, odd_queries, keys, FP8, APART, WIDEN)
            key = first + tl.arange(0, TILE)
            see = key[None, :] <= at[:, None] - ROWS
            if WINDOW:
                see = see & (key[None, :] > at[:, None] - WINDOW)
            weights, fade, top, total = _weigh(scores, ks, see, top, total, scale, FP8, True, True, WIDEN)
            values, vs = _tile(v, copy_v, copy_vs, page, first, rows, head, KV, D, TILE, PAGE, False, FP8)
            mix, odd_mix = _mix(weights, values, vs, mix, odd_mix, fade, FP8, APART, WIDEN)
        if APART:
            mix = tl.interleave(mix, odd_mix)
        else:
            mix = _ordered(mix, FP8)
        to = item * (R * GROUP) + m
        tl.store(mixes + to.to(tl.int64)[:, None] * D + e[None, :], mix, mask=(r < R)[:, None])
        tl.store(stats + to, top, mask=r < R)
        tl.store(stats + room + to, tl.max(total, 1), mask=r < R)


@jit(do_not_specialize=["room", "S", "R", "most"])
def _finish(
    q, own_k, own_v, own_k_scale, own_v_scale, k, v, k_scale, v_scale, table, slots, committed,
    counts, depths, ancestors, mixes, stats, room, out, scale, S, R, most,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program a row and head: its chunks' parts, 16 chunks at a time, and its last 16 keys behind them. One compiled
    form serves every S and R, so its sums have one order."""
    take_turn(EARLY)
    KV: tl.constexpr = HEADS // GROUP
    s, r, head = tl.program_id(0) // R, tl.program_id(0) % R, tl.program_id(1)
    kv = head // GROUP
    e, j = tl.arange(0, D), tl.arange(0, ROWS)
    spot = (tl.program_id(0) * HEADS + head) * D + e
    if r >= tl.load(counts + s):
        tl.store(out + spot, tl.zeros([D], tl.bfloat16))
    else:
        rows = tl.load(committed + s)
        at = rows + tl.load(depths + s * R + r)
        query = tl.load(q + spot).to(tl.float32)

        # The tail: places at - 15 .. at, from the window where the row has an ancestor there, else from the pages.
        place = at - (ROWS - 1) + j
        ancestor = tl.load(ancestors + (s * R + r) * ROWS + (ROWS - 1 - j))
        inside = ancestor >= 0
        before = (ancestor < 0) & (place >= 0)
        here = (s * R + ancestor) * KV + kv
        page = tl.load(table + tl.load(slots + s).to(tl.int64) * most + place // PAGE, mask=before, other=0)
        there = (page.to(tl.int64) * KV + kv) * PAGE + place % PAGE
        keys = _either(own_k, k, here, there, inside, before, e, D)
        values = _either(own_v, v, here, there, inside, before, e, D)
        scores = tl.sum(query[None, :] * keys, 1)
        if FP8:
            scores = scores * _either_scale(own_k_scale, k_scale, here, there, inside, before)
        scores = tl.where(inside | before, scores, -float("inf"))

        first_chunk, chunks = _chunks(committed, counts, S, R, WINDOW, PAGE, ROWS, MOST)
        i = tl.arange(0, MOST)
        base = tl.sum(tl.where(i < s, chunks, 0), 0) - tl.sum(tl.where(i == s, first_chunk, 0), 0)
        low = 0
        if WINDOW:
            low = tl.maximum(at + 1 - WINDOW, 0) // PAGE
        high = (tl.maximum(at + 1 - ROWS, 0) + PAGE - 1) // PAGE
        top = tl.max(scores, 0)
        c = tl.arange(0, 128)
        for first in range(low, high, 128):
            to = ((base + first + c) * KV + kv) * (R * GROUP) + r * GROUP + head % GROUP
            tops = tl.load(stats + to, mask=first + c < high, other=-float("inf"))
            top = tl.maximum(top, tl.max(tops, 0))

        mix = tl.zeros([D], tl.float32)
        total = 0.0
        for first in range(low // ROWS * ROWS, high, ROWS):
            valid = (first + j >= low) & (first + j < high)
            to = ((base + first + j) * KV + kv) * (R * GROUP) + r * GROUP + head % GROUP
            tops = tl.load(stats + to, mask=valid, other=-float("inf"))
            sums = tl.load(stats + room + to, mask=valid, other=0.0)
            parts = tl.load(mixes + to.to(tl.int64)[:, None] * D + e[None, :], mask=valid[:, None], other=0.0)
            share = tl.exp2((tops - top) * scale)
            total += tl.sum(share * sums, 0)
            mix += tl.sum(share[:, None] * parts, 0)
        weights = tl.exp2(tl.fma(scores, scale, 0.0 - top * scale))
        total += tl.sum(weights, 0)
        if FP8:
            weights = weights * _either_scale(own_v_scale, v_scale, here, there, inside, before)
        mix += tl.sum(weights[:, None] * values, 0)
        tl.store(out + spot, (mix / total).to(tl.bfloat16))


@jit
def _either(own, pages, here, there, inside, before, e, D: tl.constexpr):
    """Rows of the window at `here` where `inside`, of the pages at `there` where `before`, else zeros; float32."""
    x = tl.load(own + here[:, None] * D + e[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    y = tl.load(pages + there[:, None] * D + e[None, :], mask=before[:, None], other=0.0).to(tl.float32)
    return tl.where(inside[:, None], x, y)


@jit
def _either_scale(own, pages, here, there, inside, before):
    return tl.load(own + here, mask=inside, other=0.0) + tl.load(pages + there, mask=before, other=0.0)
