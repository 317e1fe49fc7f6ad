"""The block drafter for a GPU: static memory, and one graph launch a draft.

Every context has a slot of a ring that is laid out once (`kernels.gpu.block`), and a few places for tapped rows that
wait to be projected: those of a round come in with the next draft's launch, all streams' in one product. Between one
copy in and one copy out, a launch projects them, runs the block and chooses candidates; it is captured once for each of
1, 2, 4, 8 and 16 streams. A round may begin with such a pass (`families.qwen3_5.gpu.drafted`): tapped rows and last
tokens of the round before are then handed on where they are (`kernels.gpu.relay`), and the host only hears what came of
it. On a CPU the same code runs on twins, which is how it is tested.

A layer sees `KEPT` context rows at most, also where the drafter has no window. What `block` says of tokens and bits
holds here.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfmagic.kernels.gpu import block
from tfmagic.kernels.gpu.block import TILE, Ring, Seen, attend, bounded, convolve, edges, likeliest, turned
from tfmagic.kernels.gpu.compiling import compiled_only
from tfmagic.kernels.gpu.norm import rms
from tfmagic.kernels.gpu.relay import Blocks, relay
from tfmagic.kernels.gpu.rope import tables
from tfmagic.kernels.gpu.sample import embed
from tfmagic.kernels.gpu.tiles import MOST

from ..families.qwen3_5.gpu.drafted import DraftedRound
from ..families.qwen3_5.gpu.fields import Fields
from ..families.qwen3_5.gpu.graphs import Graphs
from ..families.qwen3_5.gpu.rounds import BUCKETS, Bucket
from .block import Ask, Loaded
from .dflash.weights import Convolution, Layer
from .draft import ROWS, Lattice

CONTEXTS = 18
"""Sixteen streams and two to spare. Slot 0 belongs to nobody: blocks that only fill a bucket look there."""
KEPT = 4096
"""Context rows that are kept at most."""
TOGETHER = 128
"""Tapped rows of one stream that wait to be projected together with the other streams'."""


class Context:
    """What a drafter knows of one sequence: rows `start` to `end` - 1, the last of them in its slot."""

    def __init__(self, drafter: StaticDrafter):
        """Raises MemoryError when every slot is taken."""
        self._drafter, self.slot = drafter, drafter.take()
        self.start = self.end = 0
        self.waiting = 0
        """Tapped rows in its places for them, the last before `end`."""
        self.late: list[Tensor] = []
        """Where rows wait for which there is no place: all of them."""
        weakref.finalize(self, drafter.free.append, self.slot)

    def fork(self) -> Context:
        """An independent context of the same rows."""
        self._drafter.catch_up([self])
        other = Context(self._drafter)
        other.start, other.end, other.waiting = self.start, self.end, self.waiting
        self._drafter.copy(self.slot, other.slot)
        return other


class StaticDrafter(Loaded):
    """The form for a GPU. `kept`: context rows that are kept at most; for the rest see `Loaded`."""

    within_rounds = True

    @torch.no_grad()
    def __init__(self, *args: Any, kept: int = KEPT, **more: Any):
        super().__init__(*args, **more)
        c, rows = self.config, min(kept, self.config.reach or kept)
        shape = (CONTEXTS + 1, c.layers, c.kv_heads, -(-rows // TILE) * TILE, c.head_dim)
        with self.current():
            self.ring = Ring(*(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)))
            waiting = (CONTEXTS + 1, c.block, len(c.taps) * c.hidden)
            self.waiting = torch.zeros(waiting, dtype=self.dtype, device=self.device)
        self.free = list(range(CONTEXTS, 0, -1))
        held = self.ring.k.nbytes + self.ring.v.nbytes + self.waiting.nbytes
        self.plan = f"{CONTEXTS} contexts of the drafter {held / 2**30:.2f} GiB"
        """Where its static memory went, in words."""
        with self.current():
            graphs = Graphs(self.device)
            if self.device.type == "cuda":
                self.warm_up(graphs)
            self.batches = {streams: Batch(self, streams, graphs) for streams in BUCKETS}

    @torch.no_grad()
    def warm_up(self, graphs: Graphs) -> None:
        """Compile what will be launched, many kernels at once."""
        with compiled_only():
            for streams in BUCKETS:
                batch = Batch(self, streams, graphs)
            computes_nothing = SimpleNamespace(device=self.device, round=lambda *_: None)
            DraftedRound(Bucket(streams, ROWS, 1, True), computes_nothing, graphs, self.waiting[0], batch=batch)
            for rows in (*MOST[:-1], MOST[-2] + 1):
                taps = torch.empty(rows, self.waiting.shape[2], dtype=self.dtype, device=self.device)
                slots = torch.zeros(rows, dtype=torch.int32, device=self.device)
                self.project(taps, slots, slots, *tables(slots, self.inverse, None))

    def current(self):
        """Its device is the current one within."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    # Contexts --------------------------------------------------------------------------------------

    def context(self) -> Context:
        """Of a sequence with no rows yet. Raises MemoryError when there are `CONTEXTS` already."""
        return Context(self)

    def context_bytes(self, rows: int) -> int:
        """Device memory that one sequence's context takes besides what was set aside for it."""
        return 0

    def take(self) -> int:
        if not self.free:
            gc.collect()  # a stream that failed may hang in its traceback
        if not self.free:
            raise MemoryError(f"all {CONTEXTS} contexts of the drafter are taken")
        return self.free.pop()

    @torch.no_grad()
    def copy(self, source: int, slot: int) -> None:
        with self.current():
            for x in (*self.ring, self.waiting):
                x[slot] = x[source]

    @torch.no_grad()
    def extend(self, context: Context, taps: Tensor, start: int) -> None:
        """As `block.Drafter.extend`: the sequence's rows start, start + 1, ..., taps [n, taps · D]."""
        if not len(taps):
            return
        if start != context.end:
            context.start = context.end = start
            context.waiting, context.late = 0, []
        context.end, places, held = start + len(taps), self.waiting[context.slot], context.waiting
        with self.current():
            if not context.late and held + len(taps) <= self.block:
                places[held : held + len(taps)] = taps
                context.waiting += len(taps)
                return
            fresh = taps.to(self.device, self.dtype, copy=True)  # a pass may use its buffers again
            context.late += [places[:held].clone(), fresh] if held else [fresh]
            context.waiting = 0
        if sum(map(len, context.late)) > TOGETHER:
            self.catch_up([context])

    @torch.no_grad()
    def catch_up(self, contexts: list[Context]) -> None:
        """Project the rows for which there was no place, all contexts' in one product."""
        contexts = [context for context in contexts if context.late]
        if not contexts:
            return
        with self.current():
            rows = [torch.cat(context.late)[-self.ring.k.shape[3] :] for context in contexts]
            slots = np.repeat([context.slot for context in contexts], [*map(len, rows)])
            at = np.concatenate([np.arange(c.end - len(own), c.end) for c, own in zip(contexts, rows)])
            slots, at = (torch.from_numpy(x.astype(np.int32)).to(self.device) for x in (slots, at))
            self.project(torch.cat(rows), slots, at, *tables(at, self.inverse, None))
            for context in contexts:
                context.late = []

    def project(self, taps: Tensor, slots: Tensor, places: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Tapped rows [n, taps · D] into the ring: slots, places int32 [n] and their angles, as `block.keep` has it."""
        c, w = self.config, self.weights
        kv = w.keys(rms(w.taps(taps), w.context, c.eps))
        block.keep(kv, w.key_norms.view(c.layers, -1), cos, sin, c.eps, self.ring, slots, places)

    # Drafts ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def lattices(self, asks: list[Ask]) -> list[Lattice]:
        """As `block.Drafter.lattices`, up to 16 streams in one launch."""
        self.check(asks)
        self.catch_up([ask.context for ask in asks])
        found, most = [], BUCKETS[-1]
        with self.current():
            for batch in (asks[i : i + most] for i in range(0, len(asks), most)):
                found += self.batches[next(n for n in BUCKETS if n >= len(batch))].run(batch)
        return found

    def draft(self, f: dict[str, Tensor], out: dict[str, Tensor]) -> None:
        """What is captured: f holds the streams' contexts and blocks, `out` takes their candidates (see `Batch`)."""
        c, w = self.config, self.weights
        S, R = f["ids"].shape
        cos, sin = tables(f["places"].view(-1), self.inverse, None)
        (cos, past_cos), (sin, past_sin) = cos.split(S * R), sin.split(S * R)
        past = self.waiting.index_select(0, f["slots"]).flatten(0, 1)
        self.project(past, f["owners"].view(-1), f["places"][1].view(-1), past_cos, past_sin)
        seen = Seen(f["slots"], f["starts"], f["ends"], f["positions"])
        x = embed(f["ids"].view(-1), self.embedding).to(self.dtype) * c.scale
        for i, layer in enumerate(w.layers):
            y = rms(x, layer.before, c.eps)
            a, dynamic = before(layer.mix, y, R)
            x = behind(layer.mix, self.attend(a, layer, i, seen, cos, sin), dynamic, R, x)
            y = rms(x, layer.after, c.eps)
            a, dynamic = before(layer.feed, y, R)
            x = behind(layer.feed, layer.down(layer.up(a)), dynamic, R, x)
        guesses = x.view(S, R, -1)[:, 1:].reshape(S * (R - 1), -1)
        self.choose(rms(guesses, w.norm, c.eps), f["ids"][:, 0], out)

    def attend(self, a: Tensor, layer: Layer, i: int, seen: Seen, cos: Tensor, sin: Tensor) -> Tensor:
        """Layer i's attention over its normed and mixed rows a [S · R, D]."""
        c = self.config
        y = layer.inputs(a)
        qk = turned(y, layer.norms, cos, sin, c.eps)
        v = y[:, (c.heads + c.kv_heads) * c.head_dim :]
        return layer.out(attend(qk, v, self.ring, i, seen, c.windows[i], c.causal[i]))

    def choose(self, h: Tensor, anchors: Tensor, out: dict[str, Tensor]) -> None:
        """h [S · places, D] behind the last norm, anchors int32 [S]."""
        c, selector = self.config, self.weights.selector
        logits = self.head(h).float()
        if c.multiplier != 1.0:
            logits = logits * c.multiplier
        logits, ids = likeliest(logits, c.candidates)
        if c.softcap:
            logits = torch.tanh(logits / c.softcap) * c.softcap
        ids = ids.view(len(anchors), -1, c.candidates)
        out["logits"].copy_(bounded(logits).view(ids.shape))
        out["ids"].copy_(ids)
        if selector is not None:
            edges(ids, anchors, selector.projection(h), selector.before, selector.behind, out["edges"])


class Batch:
    """The arrays of so many streams' drafts, and their launch."""

    def __init__(self, drafter: StaticDrafter, streams: int, graphs: Graphs):
        S, R, K, whole = streams, drafter.block, drafter.config.candidates, torch.int32
        self.drafter, self.streams = drafter, streams
        self.rounds: dict[Any, Any] = {}
        """Those that begin with this pass, of `families.qwen3_5.gpu.drafted`."""
        each = whole, (S,)
        self.into = Fields(
            drafter.device,
            ids=(whole, (S, R)), places=(whole, (2, S, R)), owners=(whole, (S, R)),  # `Blocks`
            slots=each, starts=each, ends=each, positions=each,  # `Seen`
            done=(torch.int64, (1,)),
        )  # fmt: skip
        table = torch.float32, (S, R - 1, K)
        self.out = Fields(drafter.device, ids=(whole, table[1]), logits=table, edges=(table[0], (*table[1], K)))
        f = self.into.numpy
        f["ids"][:], f["owners"][:] = drafter.config.mask, -1
        self.into.send()
        self.launch = graphs.captured(self.draft)
        self.out.capture(graphs)

    def draft(self) -> None:
        """What is captured."""
        self.drafter.draft(self.into.device, self.out.device)

    @property
    def blocks(self) -> Blocks:
        return Blocks(*(self.into.device[name] for name in Blocks._fields))

    def run(self, asks: list[Ask]) -> list[Lattice]:
        f, n, contexts = self.into.numpy, len(asks), [ask.context for ask in asks]
        slots, ends = self._fill(contexts)
        f["ids"][:n, 0] = [ask.anchor for ask in asks]
        f["positions"][:n] = positions = np.array([ask.position for ask in asks])
        waiting, order = np.array([context.waiting for context in contexts]), np.arange(f["ids"].shape[1])
        f["places"][0, :n] = positions[:, None] + order
        f["places"][1, :n] = (ends - waiting)[:, None] + order
        f["owners"][:n] = np.where(order < waiting[:, None], slots[:, None], -1)
        self.into.send()
        self.launch()
        self.out.receive()
        for context in contexts:
            context.waiting = 0
        return self._found(asks)

    @staticmethod
    def ready(contexts: list[Context]) -> bool:
        """Whether they may take what a round gives where it is."""
        return all(one.end > one.start and not one.waiting and not one.late for one in contexts)

    def take(self, contexts: list[Context], round: Any) -> None:
        """Take what a round under way is going to give: last tokens, and tapped rows of no more than a block.

        contexts: of all of its streams, in their order, `ready`. round: an `engine.families.qwen3_5.gpu.rounds.Round`.
        """
        self._fill(contexts)
        self.into.send()
        self.relay(round)

    def relay(self, round: Any) -> None:
        """Its walks' rows and last tokens, where they are: the pass begins with them."""
        given = (round.out.device[name] for name in ("drawn", "path", "walked"))
        relay(*given, round.taps, self.drafter.waiting, self.blocks)

    def _fill(self, contexts: list[Context]) -> tuple[np.ndarray, np.ndarray]:
        """What is known of the contexts; their slots and ends."""
        f, n = self.into.numpy, len(contexts)
        self.into.wait()  # what was taken last may not have been waited for
        for name in ("slots", "starts", "ends", "positions"):
            f[name][n:] = 0
        f["owners"][n:] = -1
        f["slots"][:n] = slots = np.array([context.slot for context in contexts])
        f["starts"][:n] = [context.start for context in contexts]
        f["ends"][:n] = ends = np.array([context.end for context in contexts])
        return slots, ends

    def _found(self, asks: list[Ask]) -> list[Lattice]:
        """What the launch gave, of each as much as is asked for."""
        found = self.out.numpy
        ids, logits, table = found["ids"].astype(np.int64), found["logits"].copy(), found["edges"].copy()
        rows = [min(ask.places, ids.shape[1]) for ask in asks]
        return [Lattice(ids[s, :own], logits[s, :own], table[s, :own]) for s, own in enumerate(rows)]


def before(mix: Convolution | None, y: Tensor, R: int) -> tuple[Tensor, Tensor | None]:
    """What a sub-layer takes of its normed rows y [S · R, D], and its convolutions' corrections predicted from them."""
    if mix is None:
        return y, None
    dynamic = mix.dynamic(y)
    return convolve(y, dynamic, mix.base, 0, R), dynamic


def behind(mix: Convolution | None, rows: Tensor, dynamic: Tensor | None, R: int, x: Tensor) -> Tensor:
    """x plus what a sub-layer gave, in place."""
    return x.add_(rows) if mix is None else convolve(rows, dynamic, mix.base, 1, R, residual=x)
