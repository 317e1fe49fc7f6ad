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

    def __init__(self, checkpoint, device: torch.device | str = "cpu", context: int | None = None):
        self.device = torch.device(device)
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
    def prompt_pass(
        self, state: State, ids: list[int], features: dict[int, Tensor], positions: Tensor, marks: list[int]
    ) -> tuple[Tensor, dict[int, State]]:
        """Prompt rows from state.rows on. `features`: first row (counted from the prompt's start) -> rows to put there
        in place of embeddings. Returns the last row's logits float32 [V] and the states at `marks`."""
        x, start = self.text.embed(ids), state.rows
        for first, rows in features.items():
            low, high = max(first, start), min(first + len(rows), start + len(ids))
            if low < high:
                x[low - start : high - start] = rows[low - first : high - first]
        x, kept = self.text.prompt_pass(state, x, positions.to(self.device), marks)
        return self.text.logits(x[-1:])[0], kept

    @torch.inference_mode()
    def round_pass(self, states: list[State], windows: list[list[int]]) -> tuple[Tensor, Change]:
        """One window of ids a sequence: logits float32 [all rows, V] and the change for `commit`."""
        return self.text.round_pass(states, windows)

    @torch.inference_mode()
    def commit(self, states: list[State], change: Change, rows: list[int]) -> None:
        """Move each state over the first `rows` rows of its window."""
        self.text.commit(states, change, rows)
