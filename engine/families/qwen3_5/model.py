"""The family's face to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from tfmagic.errors import Refusal

from ...drafting.draft import Likely, Outcome, Window, chain
from ...sampling import Draw, draw, likeliest, walk
from . import config, images, positions, state, tower, weights
from .forward import Change, Forward
from .state import State


class Model:
    """A Qwen3.5 checkpoint, ready to run. Reading it raises Refusal naming what does not fit.

    `context`: the longest sequence, rows; None: the checkpoint's own. `kv`: "fp8" rounds keys and values to e4m3 (see
    `kernels.attention`); "bf16" holds them as finely as exact sums allow, which is finer.
    """

    grain = 64
    """A prompt pass may start, and a state be kept, at multiples of it."""
    PACKED = {"cpu": 512}
    """Rows of short prompts that share a prompt pass, by kind of device: a CPU gains little by it, and while a pass
    runs, nothing else does."""

    def __init__(
        self, checkpoint, device: torch.device | str = "cpu", context: int | None = None, kv: str = "bf16"
    ):
        self.device = torch.device(device)
        self.kv = "fp8" if kv == "fp8" else "own"
        self.packed = self.PACKED.get(self.device.type, 4096)
        self._checkpoint = checkpoint
        self.config = config.read(checkpoint.config, checkpoint.tied)
        tensors = checkpoint.tensors(self.device)
        read = weights.read_text(tensors, self.config, self.device)
        self.text = Forward(self.config.text, read, self.device, kv == "fp8")
        vision = self.config.vision
        self.eyes = weights.read_vision(tensors, self.config, self.device) if vision else None
        if left := tensors.leftover(weights.UNUSED):
            problem = f"The checkpoint holds {len(left)} tensors of no known layer, {left[0]} first."
            raise Refusal(problem, config.OTHER)
        self.commit_ms: float | None = None
        """Of the last round, what moving the states took."""
        self.context = min(context or self.config.text.positions, self.config.text.positions)
        self.vocab = self.config.text.vocab
        self.depth = len(self.config.text.full)
        self.image_token_id = self.config.image_token_id if vision else None
        seeing = checkpoint.config.get("vision_config") or {}
        self.preprocessor = images.Preprocessor.read(checkpoint.preprocessor, seeing) if vision else None

    def prepare(self, image) -> tuple[Tensor, tuple[int, int, int], int]:
        """An RGB picture's patches, grid and prompt rows."""
        return images.prepare(image, self.preprocessor)

    def positions(self, ids: list[int], pictures: list) -> tuple[Tensor, int]:
        """Positions int64 [3, len(ids)], and what a generated row's index adds to be its position."""
        return positions.positions(ids, pictures, self.image_token_id)

    def embedding(self) -> Tensor:
        """The embedding matrix [V, D] as stored, for a drafter."""
        return self.text.w.embed

    def head(self, size: int) -> Callable[[Tensor], Tensor]:
        """The output head's first `size` ids, for a drafter: rows [n, D], which have had their last norm, -> logits
        float32 [n, size]. It is read anew, since `text` holds the head with the last norm's weight folded in."""
        stored = self.text.w.embed if self.config.tied else self._checkpoint.tensors(self.device)["lm_head.weight"]
        matrix = stored[:size].float()
        return lambda rows: torch.nn.functional.linear(rows.float(), matrix)

    def logits(self, rows: Tensor) -> Tensor:
        """float32 [n, V] of the last layer's tapped rows [n, D]."""
        with torch.inference_mode():
            return self.text.logits(rows)

    def new_state(self) -> State:
        return State(self.config.text, self.device, self.kv == "fp8")

    def restore(self, tensors: dict[str, Tensor], rows: int) -> State:
        """The state that `State.named` described. Raises ValueError when the tensors are not of this model."""
        return state.restore(tensors, rows, self.config.text, self.device, self.kv == "fp8")

    @torch.inference_mode()
    def tower(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """One image's feature rows, float32 [tokens, D]."""
        return tower.encode(patches.to(self.device), grid, self.config.vision, self.eyes)

    @torch.inference_mode()
    def prompt_passes(
        self, parts: list[tuple[State, list[int], dict[int, Tensor], Tensor, list[int]]]
    ) -> list[tuple[Tensor, dict[int, State], Tensor | None]]:
        """The next rows of several prompts, each (state, ids, features, positions int64 [3, rows], marks), in one pass
        that gives each what it gives alone. A pass that fails has moved no state.

        `features`: first row (counted from the prompt's start) -> rows to put there in place of embeddings.
        Returns for each the last row's logits float32 [V], the states at its marks, and the tapped layers' rows float32
        [rows, taps · D], None where nothing is tapped.
        """
        states, ids, features, positions, marks = zip(*parts)
        lengths = [len(rows) for rows in ids]
        x = self.text.embed([id for rows in ids for id in rows])
        for rows, one, laid in zip(x.split(lengths), states, features):
            lay(rows, one.rows, laid)
        positions = torch.cat(positions, 1).to(self.device)
        x, kept, moves, taps = self.text.prompt_pass(list(states), lengths, x, positions, list(marks))
        logits = self.text.logits(x[(torch.tensor(lengths).cumsum(0) - 1).to(self.device)])
        self.text.move(list(states), lengths, moves)
        return list(zip(logits, kept, [None] * len(parts) if taps is None else taps.split(lengths)))

    def prompt_pass(
        self, state: State, ids: list[int], features: dict[int, Tensor], positions: Tensor, marks: list[int]
    ) -> tuple[Tensor, dict[int, State]]:
        """`prompt_passes` of one prompt: the last row's logits, the states at its marks."""
        return self.prompt_passes([(state, ids, features, positions, marks)])[0][:2]

    def state_bytes(self, rows: int) -> int:
        """Device memory of one sequence of so many rows, bytes; an upper bound."""
        return state.room(rows, self.config.text)

    def tap(self, layers: list[int]) -> None:
        """Give the residual rows after these layers besides, from now on, joined in this order: layer i's are
        `hidden_states[i + 1]`."""
        if any(not 0 <= layer < len(self.text.w.layers) for layer in layers) or sorted(set(layers)) != list(layers):
            raise ValueError(f"layers {layers} cannot be tapped in a model of {len(self.text.w.layers)}")
        self.text.taps = list(layers)

    def draw(self, logits: Tensor, draws: list[Draw]) -> list[tuple[int, Likely | None]]:
        """The tokens that one row of logits, float32 [V], gives to streams that begin with it, and log probabilities
        where they are asked for. Raises FloatingPointError when the row is not finite."""
        row = logits.cpu().numpy()
        ids = [draw(row, *by) for by in draws]
        return [(id, likeliest(row, by.sampling, id)) for id, by in zip(ids, draws)]

    @torch.inference_mode()
    def round(self, states: list[State], windows: list[Window], draws: list[Draw]) -> list[Outcome]:
        """Verify one window a sequence, each at its state's end, in one pass that gives each what it gives alone; walk
        every window, and move every state along its walk. A pass that fails has moved no state."""
        logits, taps, change = self.text.round_pass(states, windows)
        rows, firsts, outcomes = logits.cpu().numpy(), change.plan.firsts, []
        for first, window, by in zip(firsts, windows, draws):
            walked = walk(rows[first : first + len(window.ids)], window, by)
            here = [first + row for row in walked.rows]
            likely = [likeliest(rows[row], by.sampling, id) for row, id in zip(here, walked.ids)]
            outcomes.append(Outcome(walked, likely, None if taps is None else taps[here]))
        began = time.perf_counter()
        self.text.commit(states, change, [outcome.walk.rows or [0] for outcome in outcomes])
        self.commit_ms = 1e3 * (time.perf_counter() - began)
        return outcomes

    @torch.inference_mode()
    def round_pass(self, states: list[State], windows: list[Window]) -> tuple[Tensor, Change]:
        """The pass of `round` alone: logits float32 [all rows, V] and the change for `commit`."""
        logits, _, change = self.text.round_pass(states, windows)
        return logits, change

    @torch.inference_mode()
    def commit(self, states: list[State], change: Change, walked: list[list[int]]) -> None:
        """Move each state along the rows of its window that were walked, row 0 first."""
        self.text.commit(states, change, walked)

    @torch.inference_mode()
    def time_round(self, streams: int, rows: int) -> float:
        """Milliseconds of one round of so many streams and rows, the rows spread over them; the states are new ones."""
        states = [self.new_state() for _ in range(streams)]
        lengths = [(rows + i) // streams for i in range(streams)]
        windows = [chain([0] * n) for n in lengths]
        began = time.perf_counter()
        _, _, change = self.text.round_pass(states, windows)
        self.text.commit(states, change, [[0]] * streams)
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - began)


def lay(x: Tensor, start: int, features: dict[int, Tensor]) -> None:
    """Put feature rows into x [L, D], which holds the rows start, start + 1, ... of a prompt."""
    for first, rows in features.items():
        low, high = max(first, start), min(first + len(rows), start + len(x))
        if low < high:
            x[low - start : high - start] = rows[low - first : high - first]
