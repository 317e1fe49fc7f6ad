"""The block drafter: one pass of a small model guesses the next several tokens of every stream at once.

It sees the target through taps: hidden rows of a few of its layers, which the target's own passes leave behind. A
tapped row becomes one *context row*, and every layer of the drafter keeps that row's key and value. A draft is then a
block of rows, the pending token and a mask for each guess, that attends to the context and to itself; embedding and
head are the target's. The block's own keys are forgotten with the draft: what is true of it comes back as taps.

A DFlash2 drafter also mixes neighbouring rows of the block by convolutions, and scores pairs of neighbouring
candidates. Formulas: z-lab's DFlash and DFlash2 models.

Nothing here decides a token: every guess is verified. So this runs in the device's plain arithmetic, and a stream's
drafts may differ in their last bits with the company they are made in. `static` is the same drafter for a GPU.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tfmagic.kernels.gpu.block import bounded

from .dflash import config, weights
from .dflash.weights import Convolution, Layer, Product
from .draft import Lattice

TOGETHER = 64
"""Tapped rows of one stream that wait to be projected together with the other streams'."""


class Ask(NamedTuple):
    """One stream's wish for guesses."""

    context: Context
    anchor: int
    """The pending token."""
    position: int
    """Its place in the sequence, which is the number of rows before it."""
    places: int
    """Places to guess, at least 1; of more than `Drafter.block` - 1, so many are given."""


class Keys:
    """One layer's context: keys (rotated) and values of the last rows, and room for a block behind them."""

    def __init__(self, kv_heads: int, head_dim: int, keep: int | None, block: int, like: Tensor):
        self.keep, self.block = keep, block
        self.low = self.high = 0
        self.kv = like.new_empty(2, kv_heads, 0, head_dim)

    def append(self, kv: Tensor) -> None:
        """The next rows: kv [2, kv heads, n, d]."""
        if self.keep is not None:
            kv = kv[:, :, -self.keep :]
            self.low = max(self.low, self.high + kv.shape[2] - self.keep)
        self._write(kv)
        self.high += kv.shape[2]

    def with_block(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [kv heads, context + block, d], the block's written behind the context's and not kept."""
        self._write(kv)
        seen = self.kv[:, :, self.low : self.high + kv.shape[2]]
        return seen[0], seen[1]

    def _write(self, kv: Tensor) -> None:
        """Write rows behind the last one; where they and a block do not fit, the live rows move to a larger place."""
        end = self.high + kv.shape[2]
        if end + self.block > self.kv.shape[2]:
            rows = self.high - self.low
            room = 2 * (rows + kv.shape[2] + self.block)
            moved = self.kv.new_empty(*self.kv.shape[:2], room, self.kv.shape[3])
            moved[:, :, :rows] = self.kv[:, :, self.low : self.high]
            self.kv, self.low, self.high, end = moved, 0, rows, rows + kv.shape[2]
        self.kv[:, :, self.high : end] = kv

    def fork(self) -> Keys:
        other = copy(self)
        other.kv, other.low, other.high = self.kv[:, :, self.low : self.high].clone(), 0, self.high - self.low
        return other


class Context:
    """What a drafter knows of one sequence: rows `start` to `end` - 1, of which each layer keeps what it can see."""

    def __init__(self, drafter: Drafter):
        self._drafter = drafter
        self.start = self.end = 0
        self.restart(0)

    def restart(self, start: int) -> None:
        """Forget everything; the next row is row `start`."""
        self.start = self.end = start
        self.waiting: list[Tensor] = []
        """Tapped rows not yet projected, the last before `end`."""
        self.layers = self._drafter.new_layers()

    def fork(self) -> Context:
        """An independent context of the same rows."""
        self._drafter.project([self])
        other = copy(self)
        other.waiting, other.layers = [], [layer.fork() for layer in self.layers]
        return other


class Loaded:
    """A drafter as both of its forms hold it. Reading it raises Refusal naming what does not fit.

    checkpoint: the drafter's folder, an `engine.checkpoint.Checkpoint`. model: the target's, which gives `embedding()`,
    a Tensor [V, D], `head(ids)`, the product with its head's first rows, and `depth`, the number of its layers. size:
    ids from there on are never guessed; None: all may be. bits: 16, or 4 to round the drafter's matrices to. dtype: of
    its rows; None: bfloat16 on a GPU and float32 elsewhere.
    """

    within_rounds = False
    """Whether a round may begin with its pass."""

    def __init__(
        self,
        checkpoint: Any,
        model: Any,
        device: torch.device | str = "cpu",
        size: int | None = None,
        bits: int = 16,
        dtype: torch.dtype | None = None,
    ):
        self.device = torch.device(device)
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        embedding = model.embedding()
        vocab, hidden = embedding.shape
        target = config.Target(hidden, model.depth, vocab, vocab if size is None else min(size, vocab))
        self.config = c = config.read(checkpoint.config, target)
        self.weights = weights.read(checkpoint.tensors(self.device), c, self.device, self.dtype, bits)
        self.embedding = embedding.to(self.device)
        self.head: Product = model.head(c.guessed)
        self.layers: list[int] = list(c.taps)
        """The target's layers that are to be tapped."""
        self.block = c.block
        """Rows of a block: at most `block` - 1 places are guessed."""
        self.name = f"{c.name} of {c.layers} layers, block {c.block}" + (f", {bits} bits" if bits != 16 else "")
        self.inverse = c.theta ** (-torch.arange(0, c.head_dim, 2, device=self.device).float() / c.head_dim)
        """float32 [d / 2], the rotation's angles a row."""

    def check(self, asks: list[Ask]) -> None:
        """Raises ValueError when a context does not end where its pending token stands."""
        for ask in asks:
            if ask.context.end != ask.position and ask.context.end > ask.context.start:
                raise ValueError(f"the context ends at row {ask.context.end}, not at the pending {ask.position}")


class Drafter(Loaded):
    """The form for a CPU: contexts that grow, one attention a stream."""

    def context(self) -> Context:
        """Of a sequence with no rows yet."""
        return Context(self)

    def context_bytes(self, rows: int) -> int:
        """Device memory of one sequence's context of so many rows; an upper bound."""
        c, size = self.config, self.dtype.itemsize
        kept = sum(min(rows, rows if w is None else w) + TOGETHER + c.block for w in c.windows)
        return 4 * kept * c.kv_heads * c.head_dim * size + TOGETHER * len(c.taps) * c.hidden * size

    def new_layers(self) -> list[Keys]:
        c = self.config
        keeps = [None if window is None else window - 1 for window in c.windows]
        return [Keys(c.kv_heads, c.head_dim, keep, c.block, self.weights.norm) for keep in keeps]

    # Context ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def extend(self, context: Context, taps: Tensor, start: int) -> None:
        """The sequence's rows start, start + 1, ...: taps [n, taps · D], the tapped layers' rows side by side.

        Rows that do not follow the context's begin it anew. A few rows wait for the next draft.
        """
        if not len(taps):
            return
        if start != context.end:
            context.restart(start)
        reach = self.config.reach
        seen = taps if reach is None else taps[-reach:]
        context.waiting.append(seen.to(self.device, self.dtype, copy=True))  # a pass may use its buffers again
        context.end = start + len(taps)
        if sum(map(len, context.waiting)) > TOGETHER:
            self.project([context])

    @torch.inference_mode()
    def project(self, contexts: list[Context]) -> None:
        """Turn the rows that wait into keys and values, all contexts' in one product."""
        c, w = self.config, self.weights
        contexts = [context for context in dict.fromkeys(contexts) if context.waiting]
        if not contexts:
            return
        lengths = [sum(map(len, context.waiting)) for context in contexts]
        rows = torch.cat([part for context in contexts for part in context.waiting])
        places = [torch.arange(context.end - n, context.end) for context, n in zip(contexts, lengths)]
        features = norm(w.taps(rows), w.context, c.eps)
        kv = w.keys(features).view(len(rows), c.layers, 2, c.kv_heads, c.head_dim).permute(1, 2, 3, 0, 4)
        k = norm(kv[:, 0], None, c.eps) * w.key_norms
        k = rotate(k, *self.turns(torch.cat(places).to(self.device)))
        kv = torch.stack([k, kv[:, 1]], 1)
        for context, part in zip(contexts, kv.split(lengths, 3)):
            for layer, own in zip(context.layers, part):
                layer.append(own)
            context.waiting = []

    # Drafts ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def lattices(self, asks: list[Ask]) -> list[Lattice]:
        """Every stream's candidates for the places behind its pending token, in one pass.

        Raises ValueError when a context does not end where its pending token stands.
        """
        self.check(asks)
        if not asks:
            return []
        self.project([ask.context for ask in asks])
        places = [min(ask.places, self.block - 1) for ask in asks]
        # Where no row sees those behind it, rows that nobody asks for can be left out.
        rows = 1 + max(places) if all(self.config.causal) else self.block
        h = self.forward(asks, rows)[:, 1 : 1 + max(places)]
        found = self.choose(h, torch.tensor([ask.anchor for ask in asks], device=self.device))
        ids, logits, edges = (x.cpu().numpy() for x in found)
        return [Lattice(*(x[i, :n] for x in (ids, logits, edges))) for i, n in enumerate(places)]

    def forward(self, asks: list[Ask], rows: int) -> Tensor:
        """A block of `rows` rows for each ask: [asks, rows, D] behind the last norm."""
        c, w = self.config, self.weights
        ids = torch.tensor([[ask.anchor] + [c.mask] * (rows - 1) for ask in asks], device=self.device)
        places = torch.tensor([ask.position for ask in asks], device=self.device)[:, None]
        turns = self.turns(places + torch.arange(rows, device=self.device))
        cos, sin = (x[:, :, None] for x in turns)
        x = self.embedding[ids].to(self.dtype) * c.scale
        for i, layer in enumerate(w.layers):
            held = [ask.context.layers[i] for ask in asks]
            a, behind = before(layer.mix, norm(x, layer.before, c.eps))
            x = x + convolve(self.attend(a, layer, held, i, cos, sin), behind)
            a, behind = before(layer.feed, norm(x, layer.after, c.eps))
            x = x + convolve(layer.down(layer.up(a)), behind)
        return norm(x, w.norm, c.eps)

    def attend(self, a: Tensor, layer: Layer, held: list[Keys], i: int, cos: Tensor, sin: Tensor) -> Tensor:
        """a [asks, rows, D]: each block's rows over its own context and the block."""
        c = self.config
        asks, rows, _ = a.shape
        heads = layer.inputs(a).view(asks, rows, c.heads + 2 * c.kv_heads, c.head_dim)
        qk, v = heads.split([c.heads + c.kv_heads, c.kv_heads], 2)
        qk = rotate(norm(qk, None, c.eps) * layer.norms, cos, sin)
        q, k = qk.split([c.heads, c.kv_heads], 2)
        # The query heads that share a key head are rows of one product: [asks, kv heads, sharing · rows, d].
        q = q.view(asks, rows, c.kv_heads, -1, c.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        kv = torch.stack([k, v], 1).transpose(2, 3)
        outs = []
        for own, block, keys in zip(q, kv, held):
            ks, vs = keys.with_block(block)
            scores = own @ ks.transpose(1, 2)
            hidden = unseen(rows, ks.shape[1] - rows, c.windows[i], c.causal[i], self.device)
            if hidden is not None:
                scores.view(-1, rows, ks.shape[1]).masked_fill_(hidden, float("-inf"))
            outs.append(torch.softmax(scores, -1, dtype=torch.float32).to(self.dtype) @ vs)
        out = torch.stack(outs).view(asks, c.heads, rows, c.head_dim).transpose(1, 2)
        return layer.out(out.reshape(asks, rows, -1))

    def choose(self, h: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [asks, places, D] -> the candidates' ids int64 and logits float32 [asks, places, K], the likeliest first,
        and edges float32 [asks, places, K, K]."""
        c, selector = self.config, self.weights.selector
        flat = h.flatten(0, 1)
        logits = self.head(flat).view(*h.shape[:2], -1).float() * c.multiplier
        if c.softcap:
            logits = torch.tanh(logits / c.softcap) * c.softcap
        logits, ids = torch.topk(logits, c.candidates)
        if selector is None:
            edges = logits.new_zeros(*logits.shape, c.candidates)
        else:
            # An id without a row of its own, which only the pending token can be, leads nowhere in particular.
            known = anchors < c.vocab
            first = torch.where(known, anchors, 0)[:, None, None].expand(-1, 1, c.candidates)
            projected = selector.projection(flat).view(*h.shape[:2], -1)
            ahead = selector.before[torch.cat([first, ids[:, :-1]], 1)] * projected[:, :, None]
            edges = (ahead @ selector.behind[ids].transpose(2, 3)).float()
            edges[:, 0, 1:] = 0.0
            edges[:, 0] *= known[:, None, None]
        return ids, bounded(logits), bounded(edges)

    def turns(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., d] of each place [...]."""
        angles = places[..., None].float() * self.inverse
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The two halves of the last dimension as the coordinates of points that are turned."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def before(mix: Convolution | None, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a sub-layer takes of its normed rows y [asks, rows, D], and the kernel that its own rows are convolved with:
    both kernels are a base and a correction predicted from y, row by row and shared by a group of channels."""
    if mix is None:
        return y, None
    _, kernel, groups, _ = mix.base.shape
    first, second = (mix.dynamic(y).view(*y.shape[:2], 2, kernel, groups, 1) + mix.base).unbind(2)
    return convolve(y, first), second


def convolve(u: Tensor, kernel: Tensor | None) -> Tensor:
    """out[t] = Σ_o kernel[t, o] · u[t - o], nothing before the block: u [asks, rows, D], kernel [asks, rows, K, groups,
    group], where the groups are D together. Without a kernel: u."""
    if kernel is None:
        return u
    blocks = u.view(*u.shape[:2], *kernel.shape[3:])
    out = kernel[:, :, 0] * blocks
    for o in range(1, min(kernel.shape[2], u.shape[1])):
        out[:, o:] += kernel[:, o:, o] * blocks[:, :-o]
    return out.view_as(u)


@lru_cache(maxsize=64)
def unseen(rows: int, context: int, window: int | None, causal: bool, device: torch.device) -> Tensor | None:
    """bool [rows, context + rows]: what a block's row does not see of the rows before the block and of the block's.
    None: every row sees all."""
    if not causal and (window is None or context + rows <= window):
        return None
    away = torch.arange(rows, device=device)[:, None] - torch.arange(-context, rows, device=device)
    hidden = away < 0 if causal else torch.zeros_like(away, dtype=torch.bool)
    return hidden if window is None else hidden | (away.abs() >= window)
