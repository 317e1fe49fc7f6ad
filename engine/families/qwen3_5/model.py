"""The family's face to the engine."""

from __future__ import annotations

import torch
from torch import Tensor

from tfmagic.errors import Refusal

from . import config, images, positions, state, tower, weights
from .forward import Change, Forward
from .state import State


class Model:
    """A Qwen3.5 checkpoint, ready to run. Reading it raises Refusal naming what does not fit.

    `context`: the longest sequence, rows; None: the checkpoint's own.
    """

    grain = 64
    """A prompt pass may start, and a state be kept, at multiples of it."""
    PACKED = {"cpu": 512}
    """Rows of short prompts that share a prompt pass, by kind of device: a CPU gains little by it, and while a pass
    runs, nothing else does."""

    def __init__(self, checkpoint, device: torch.device | str = "cpu", context: int | None = None):
        self.device = torch.device(device)
        self.packed = self.PACKED.get(self.device.type, 4096)
        self.config = config.read(checkpoint.config, checkpoint.tied)
        tensors = checkpoint.tensors()
        self.text = Forward(self.config.text, weights.read_text(tensors, self.config, self.device), self.device)
        vision = self.config.vision
        self.eyes = weights.read_vision(tensors, self.config, self.device) if vision else None
        if left := tensors.leftover(weights.UNUSED):
            problem = f"The checkpoint holds {len(left)} tensors of no known layer, {left[0]} first."
            raise Refusal(problem, config.OTHER)
        self.context = min(context or self.config.text.positions, self.config.text.positions)
        self.vocab = self.config.text.vocab
        self.image_token_id = self.config.image_token_id if vision else None
        seeing = checkpoint.config.get("vision_config") or {}
        self.preprocessor = images.Preprocessor.read(checkpoint.preprocessor, seeing) if vision else None

    def prepare(self, image) -> tuple[Tensor, tuple[int, int, int], int]:
        """An RGB picture's patches, grid and prompt rows."""
        return images.prepare(image, self.preprocessor)

    def positions(self, ids: list[int], pictures: list) -> tuple[Tensor, int]:
        """Positions int64 [3, len(ids)], and what a generated row's index adds to be its position."""
        return positions.positions(ids, pictures, self.image_token_id)

    def new_state(self) -> State:
        return State(self.config.text, self.device)

    def restore(self, tensors: dict[str, Tensor], rows: int) -> State:
        """The state that `State.named` described. Raises ValueError when the tensors are not of this model."""
        return state.restore(tensors, rows, self.config.text, self.device)

    @torch.inference_mode()
    def tower(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """One image's feature rows, float32 [tokens, D]."""
        return tower.encode(patches.to(self.device), grid, self.config.vision, self.eyes)

    @torch.inference_mode()
    def prompt_passes(
        self, parts: list[tuple[State, list[int], dict[int, Tensor], Tensor, list[int]]]
    ) -> list[tuple[Tensor, dict[int, State]]]:
        """The next rows of several prompts, each (state, ids, features, positions int64 [3, rows], marks), in one pass
        that gives each what it gives alone. A pass that fails has moved no state.

        `features`: first row (counted from the prompt's start) -> rows to put there in place of embeddings.
        Returns for each the last row's logits float32 [V] and the states at its marks.
        """
        states, ids, features, positions, marks = zip(*parts)
        lengths = [len(rows) for rows in ids]
        x = self.text.embed([id for rows in ids for id in rows])
        for rows, one, laid in zip(x.split(lengths), states, features):
            lay(rows, one.rows, laid)
        positions = torch.cat(positions, 1).to(self.device)
        x, kept, moves = self.text.prompt_pass(list(states), lengths, x, positions, list(marks))
        logits = self.text.logits(x[(torch.tensor(lengths).cumsum(0) - 1).to(self.device)])
        self.text.move(list(states), lengths, moves)
        return list(zip(logits, kept))

    def prompt_pass(
        self, state: State, ids: list[int], features: dict[int, Tensor], positions: Tensor, marks: list[int]
    ) -> tuple[Tensor, dict[int, State]]:
        """`prompt_passes` of one prompt."""
        return self.prompt_passes([(state, ids, features, positions, marks)])[0]

    def state_bytes(self, rows: int) -> int:
        """Device memory of one sequence of so many rows, bytes; an upper bound."""
        return state.room(rows, self.config.text)

    @torch.inference_mode()
    def round_pass(self, states: list[State], windows: list[list[int]]) -> tuple[Tensor, Change]:
        """One window of ids a sequence: logits float32 [all rows, V] and the change for `commit`."""
        return self.text.round_pass(states, windows)

    @torch.inference_mode()
    def commit(self, states: list[State], change: Change, rows: list[int]) -> None:
        """Move each state over the first `rows` rows of its window."""
        self.text.commit(states, change, rows)


def lay(x: Tensor, start: int, features: dict[int, Tensor]) -> None:
    """Put feature rows into x [L, D], which holds the rows start, start + 1, ... of a prompt."""
    for first, rows in features.items():
        low, high = max(first, start), min(first + len(rows), start + len(x))
        if low < high:
            x[low - start : high - start] = rows[low - first : high - first]
