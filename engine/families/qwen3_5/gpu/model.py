"""The family's face to the engine, in bf16 on a GPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tfmagic.errors import Refusal
from tfmagic.kernels.gpu.linear import logits
from tfmagic.kernels.gpu.packing import Prompts, prompts
from tfmagic.kernels.gpu.sample import embed

from ....drafting.draft import Likely, Outcome, Window
from ....sampling import Draw, Sampling
from .. import config, images, positions
from ..model import lay
from ..weights import UNUSED
from . import state, tower, weights
from .drafted import Drafted
from .fields import Fields
from .forward import Forward, Kept, Places
from .graphs import Graphs
from .pinned import pinned
from .plan import described, plan
from .pool import KV, Plan, Pool, page_bytes, pages_for
from .rounds import BUCKETS, First, Flight, Rounds
from .short import Short
from .state import State, View
from .warmup import warm_up

BESIDE = 1 << 29
"""Bytes pinned beside those of kept states: one is copied before others make room for it, and pieces leave gaps."""
T = TypeVar("T")
Part = tuple[State, list[int], dict[int, Tensor], Tensor, list[int]]
GREEDY = Sampling(
    max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, draft="off", logprobs=0, stop=[],
    stop_ids=frozenset(), size=0,
)  # fmt: skip


def on_device(method):
    """Run a method with its model's device current and without gradients."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        with torch.no_grad():
            if self.device.type != "cuda":
                return method(self, *args, **kwargs)
            with torch.cuda.device(self.device):
                return method(self, *args, **kwargs)

    return run


class Model:
    """A Qwen3.5 checkpoint in bf16 or its own packing, ready to run. Reading it raises Refusal naming what does not
    fit.

    `context`: the longest sequence, rows; None: the checkpoint's own. `kv`: what keys and values are held in, "bf16" or
    "fp8". `planned`: the memory plan; None: made from what the device has free.
    """

    grain = 64
    """A prompt pass may start, and a state be kept, at multiples of it."""
    packed = 4096
    """Rows of a prompt pass, several prompts' together."""
    slices = (4096, 512)
    """Rows of one prompt a step: with nobody decoding, and beside decoding streams, which wait for them."""
    windows = BUCKETS
    """A round computes as many rows of every stream: the first of these numbers that holds its longest window."""
    commit_ms: float | None = None
    """States move within the round's one launch."""

    def __init__(
        self,
        checkpoint,
        device: torch.device | str = "cpu",
        context: int | None = None,
        kv: str = "bf16",
        planned: Plan | None = None,
    ):
        if kv not in KV:
            raise Refusal(f"The KV cache cannot be held in {kv!r}.", "Use bf16 or fp8.")
        self.device, self.kv = torch.device(device), kv
        self.config = config.read(checkpoint.config, checkpoint.tied)
        text, vision = self.config.text, self.config.vision
        self.context = min(context or text.positions, text.positions)
        self.vocab, self.depth = text.vocab, len(text.full)
        self.image_token_id = self.config.image_token_id if vision else None
        seeing = checkpoint.config.get("vision_config") or {}
        self.preprocessor = images.Preprocessor.read(checkpoint.preprocessor, seeing) if vision else None
        self._load(checkpoint, planned)

    @on_device
    def _load(self, checkpoint, planned: Plan | None) -> None:
        text, tensors = self.config.text, checkpoint.tensors(self.device)
        read = weights.read_text(tensors, self.config, self.device)
        self.eyes = weights.read_vision(tensors, self.config, self.device) if self.config.vision else None
        if left := tensors.leftover(UNUSED):
            problem = f"The checkpoint holds {len(left)} tensors of no known layer, {left[0]} first."
            raise Refusal(problem, config.OTHER)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what was fused is not needed any more
        try:
            planned = planned or plan(text, self.device, self.context, self.kv)
        except MemoryError as error:
            fix = "Use a smaller model, --kv-cache fp8, or free the device's memory."
            raise Refusal(f"{checkpoint.name} does not fit: {error}.", fix) from None
        self.pool = Pool(text, planned, self.device)
        self.text = Forward(text, read, self.pool, self.device)
        self.graphs = Graphs(self.device)
        self.rounds, self.short = Rounds(self.text, self.graphs), Short(self.text, self.graphs)
        self.drafted = Drafted(self.rounds)
        self.first = First(text.vocab, self.device, self.graphs)
        self.plan = described(planned, text, weights.size(read, self.eyes), self.text.space.bytes)
        """Where the device's memory went, in words."""
        self.size = self.vocab
        """Ids at or beyond it are not drawn in the rounds that are timed."""

    @on_device
    def warm_up(self, size: int) -> None:
        """Compile what will be launched, before rounds are timed. `size`: ids at or beyond it will never be drawn."""
        self.size = size
        if self.device.type == "cuda":
            warm_up(self, size)
            self.first.greedy(size)  # else the first request would wait for its capture

    def pin(self, size: int) -> None:
        """Make room in host memory, from now on and beside what runs, for kept states of `size` bytes."""
        if self.device.type == "cuda":
            with suppress(OSError):  # what is not pinned ahead is pinned by the turn that needs it
                self.pool.pinned = pinned(size + max(size // 8, BESIDE), self.device)

    def prepare(self, image) -> tuple[Tensor, tuple[int, int, int], int]:
        """An RGB picture's patches, grid and prompt rows."""
        return images.prepare(image, self.preprocessor)

    def positions(self, ids: list[int], pictures: list) -> tuple[Tensor, int]:
        """Positions int64 [3, len(ids)], and what a generated row's index adds to be its position."""
        return positions.positions(ids, pictures, self.image_token_id)

    @property
    def memory(self) -> int:
        """Bytes that running sequences may take together."""
        return (self.pool.plan.pages - 1) * page_bytes(self.config.text, self.kv)

    def state_bytes(self, rows: int) -> int:
        """Of them, what one sequence of so many rows takes: its pages. Its slot was set aside for it."""
        return pages_for(rows) * page_bytes(self.config.text, self.kv)

    @on_device
    def logits(self, rows: Tensor) -> Tensor:
        """float32 [n, V] of the last layer's tapped rows [n, D]."""
        return self.text.logits(rows, torch.arange(len(rows), device=self.device))

    def embedding(self) -> Tensor:
        """The embedding matrix, bf16 [V, D], for a drafter."""
        return self.text.w.embed

    def head(self, size: int) -> Callable[[Tensor], Tensor]:
        """The output head's first `size` ids, for a drafter: rows [n, D], which have had their last norm, -> logits
        float32 [n, size]."""
        w = self.text.w.head.first(min(-(-size // 16) * 16, self.vocab))  # rows of logits start at aligned places
        return lambda rows: logits(rows.bfloat16(), w)[:, :size]

    @on_device
    def new_state(self) -> State:
        """Raises MemoryError when every slot is taken."""
        return State(self.pool)

    @on_device
    def restore(self, tensors: dict[str, Tensor], rows: int) -> State:
        """The state that `State.named` described. Raises ValueError when the tensors are not of this model."""
        return self._done(state.restore(tensors, rows, self.pool))

    @on_device
    def tower(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """One image's feature rows, bf16 [tokens, D]."""
        return self._done(tower.encode([patches], [grid], self.config.vision, self.eyes))[0]

    @on_device
    def towers(self, patches: list[Tensor], grids: list[tuple[int, int, int]]) -> list[Tensor]:
        """Several images' feature rows, each bit for bit what `tower` gives."""
        return self._done(tower.encode(patches, grids, self.config.vision, self.eyes))

    def _done(self, made: T) -> T:
        """What was made, once the device has made it: a caller that looks at its clock then sees what it took."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return made

    @on_device
    def prompt_passes(self, parts: list[Part]) -> list[tuple[Tensor, dict[int, View], Tensor | None]]:
        """The next rows of several prompts, each (state, ids, features, positions int64 [3, rows], marks), in one pass
        that gives each what it gives alone. A pass that fails has moved no state.

        `features`: first row (counted from the prompt's start) -> rows to put there in place of embeddings.
        Returns for each the last row's logits float32 [V], the states at its marks, and the tapped layers' rows bf16
        [rows, taps · D], None where nothing is tapped.
        """
        states, ids, _, _, marks = zip(*parts)
        lengths, slots = [len(rows) for rows in ids], [one.slot.index for one in states]
        packed = prompts(slots, [one.rows for one in states], lengths, marks, "cpu")
        for one, rows in zip(states, lengths):
            one.reserve(one.rows + rows)
        S, conv = self.pool.S, self.pool.conv
        before = [(slot, S[:, slot].clone(), conv[:, slot].clone()) for slot, one in zip(slots, states) if one.rows]
        try:
            if self.short.fits(parts):
                logits, kept, taps = self.short.run(*parts[0])
                logits = logits[None]
            else:
                logits, kept, taps = self._packed(parts, packed)
            views = self._done(self._views(states, marks, kept))
        except Exception:
            for slot, *held in before:
                S[:, slot], conv[:, slot] = held
            raise
        for one, rows in zip(states, lengths):
            one.rows += rows
        return list(zip(logits, views, [None] * len(parts) if taps is None else taps.split(lengths)))

    def _packed(self, parts: list[Part], packed: Prompts) -> tuple[Tensor, Kept, Tensor | None]:
        """The pass itself: last rows' logits, the states kept at marks, tapped rows."""
        lengths, f = [len(ids) for _, ids, *_ in parts], self._sent(parts, packed)
        x = embed(f["ids"], self.text.w.embed)
        for rows, (one, _, laid, *_) in zip(x.split(lengths), parts):
            lay(rows, one.rows, laid)
        packed = Prompts(f["sequences"], f["starts"], f["lengths"], f["keep"], packed.rows, packed.kept)
        x, kept, taps = self.text.prompt(x, Places(packed, f["positions"], f["slots"], f["rows"]))
        return self.text.logits(x, f["ends"]), kept, taps

    def _sent(self, parts: list[Part], packed: Prompts) -> dict[str, Tensor]:
        """The rows' ids, positions, slots and places, and the packing, on the device in one copy. Each array starts at
        a multiple of 16 bytes, however many sequences there are: kernels are compiled anew for another alignment."""
        rows, sequences = (torch.int32, (packed.rows,)), (torch.int32, (len(parts),))
        fields = Fields(
            self.device, ids=rows, positions=(torch.int32, (3, packed.rows)), slots=rows, rows=rows,
            sequences=sequences, starts=sequences, lengths=sequences, ends=sequences,
            keep=(torch.int32, (packed.chunks,)),
        )  # fmt: skip
        to, row = fields.numpy, 0
        for i, (one, ids, _, at, _) in enumerate(parts):
            here = slice(row, row + len(ids))
            to["ids"][here], to["positions"][:, here] = ids, at.numpy()
            to["slots"][here], to["rows"][here] = one.slot.index, np.arange(one.rows, one.rows + len(ids))
            row = here.stop
            to["ends"][i] = row - 1
        for name, x in zip(("sequences", "starts", "lengths", "keep"), packed):
            to[name][:] = x.numpy()
        fields.send()
        return fields.device

    def _views(self, states, marks: tuple[list[int], ...], kept) -> list[dict[int, View]]:
        """The states at each prompt's marks; their order in `kept` is that of the prompts and marks."""
        place, views = 0, []
        for one, wanted in zip(states, marks):
            views.append({})
            for mark in wanted:
                S, conv = (torch.stack([layer[place] for layer in layers]) for layers in kept)
                views[-1][mark] = one.at(mark, S, conv)
                place += 1
        return views

    def prompt_pass(
        self, one: State, ids: list[int], features: dict[int, Tensor], at: Tensor, marks: list[int]
    ) -> tuple[Tensor, dict[int, View]]:
        """`prompt_passes` of one prompt: the last row's logits, the states at its marks."""
        return self.prompt_passes([(one, ids, features, at, marks)])[0][:2]

    @on_device
    def tap(self, layers: list[int]) -> None:
        """Give the residual rows after these layers besides, from now on, joined in this order: layer i's are
        `hidden_states[i + 1]`."""
        if any(not 0 <= layer < len(self.text.w.layers) for layer in layers) or sorted(set(layers)) != list(layers):
            raise ValueError(f"layers {layers} cannot be tapped in a model of {len(self.text.w.layers)}")
        if self.text.taps == list(layers):
            return  # what was captured stays
        self.text.taps = list(layers)
        self.rounds.tap()
        self.short.tap()

    @on_device
    def draw(self, logits: Tensor, draws: list[Draw]) -> list[tuple[int, Likely | None]]:
        """The tokens that one row of logits, float32 [V], gives to streams that begin with it, and log probabilities
        where they are asked for. Raises FloatingPointError when the row is not finite."""
        return self.first.draw(logits, draws)

    @on_device
    def round(self, states: list[State], windows: list[Window], draws: list[Draw]) -> list[Outcome]:
        """Verify one window a sequence, each at its state's end, in one pass that gives each what it gives alone; walk
        every window, and move every state along its walk. A pass that fails has moved no state."""
        return self.rounds.launch(states, windows, draws)()

    @on_device
    def launch_round(self, states: list[State], windows: list[Window], draws: list[Draw]) -> Flight:
        """`round`, begun: what is returned waits for it and gives the outcomes, when it is called."""
        return self.rounds.launch(states, windows, draws)

    @on_device
    def follow_round(self, flight: Flight) -> Flight | None:
        """Begin the round behind one of a row a stream that has not landed, with the tokens that it is about to give;
        flights land in their order. None where that cannot be. Raises MemoryError."""
        return self.rounds.follow(flight)

    @on_device
    def draft_round(self, flight: Flight, *told, **more) -> Flight | None:
        """Begin the round behind one that has not landed, which drafts for itself: see `Drafted.launch`. Once it has
        landed, what it drafted is the flight's `made`."""
        return self.drafted.launch(flight, *told, **more)

    @on_device
    def time_round(self, streams: int, rows: int) -> float:
        """Milliseconds of one round of so many streams and rows, the rows spread over them; the states are new ones."""
        lengths = [(rows + i) // streams for i in range(streams)]
        windows = [Window([0] * n, list(range(-1, n - 1))) for n in lengths]
        draws = [Draw(replace(GREEDY, size=self.size), 0, 1)] * streams
        states = [State(self.pool) for _ in range(streams)]
        self.rounds.launch(states, windows, draws)()  # what is new to the device is made first
        began = time.perf_counter()
        self.rounds.launch(states, windows, draws)()
        return 1e3 * (time.perf_counter() - began)
