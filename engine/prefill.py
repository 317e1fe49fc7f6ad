"""A prompt on its way through the prompt pass: restored, its pictures encoded, then computed a slice at a time.

Slices of several prompts may share a pass; a row's bits are its own, so no prompt can tell.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator
from typing import Any

from tfmagic import protocol

from .cache.explain import explain
from .cache.store import Kept, Store, marks
from .drafting.drafting import Taps
from .ranges import span
from .stream import Job

Part = tuple[Any, list[int], dict, Any, list[int]]
"""What `prompt_passes` takes of one prompt: state, ids, features, positions, marks."""


class Rows:
    """A restored prompt, ready to be computed from `state.rows` on."""

    def __init__(self, prompt: Any, state: Any, resumed: Kept | None, grain: int, keep: bool = True):
        """`keep`: whether states at marks are wanted."""
        self.prompt, self.state, self.resumed, self.grain = prompt, state, resumed, grain
        self.features: dict[int, Any] = {}
        self.todo = marks(len(prompt.ids), prompt.marks, state.rows, grain) if keep else []
        self.reached: dict[int, Any] = {}
        """Marks passed, as views of the state there."""
        self.taps = Taps(state.rows)
        """The tapped rows computed so far, where the model is tapped."""

    @property
    def left(self) -> int:
        return len(self.prompt.ids) - self.state.rows

    def fit(self, most: int) -> int:
        """Rows of the next slice: about `most`, a multiple of the grain, or all that is left."""
        return min(self.left, max(most // self.grain, 1) * self.grain)

    def passed(self, reached: dict[int, Any], taps: Any) -> None:
        """The pass over the last part is done: the states at its marks, and its tapped rows."""
        self.reached |= reached
        if taps is not None:
            self.taps.add(taps, self.state.rows - len(taps))

    def part(self, rows: int) -> Part:
        low, high = self.state.rows, self.state.rows + rows
        here = [mark for mark in self.todo if low < mark <= high]
        return self.state, self.prompt.ids[low:high], self.features, self.prompt.positions[:, low:high], here


def begin(
    job: Job, model: Any, store: Store, emit: Callable, piece: Callable[[int], str], decoding: Callable[[], list]
) -> Generator[int, None, None]:
    """Everything before the rows, which are then `job.rows`; yields what each piece of work was worth, in rows.
    `decoding`: the streams that decode and wait for every piece."""
    job.ended("queue", time.perf_counter())  # admitted, it may still have waited behind other prompts
    prompt, cache = job.request.prompt, job.request.cache
    kept = store.find(prompt.key) if cache else None
    miss = explain(store, prompt, kept, piece) if cache else "asked to run cold"
    state, source, note = restore(model, store, kept, prompt.key)
    kept = kept if state.rows else None
    state.shift = prompt.rope_delta
    rows = Rows(prompt, state, kept, model.grain, cache)
    job.ended("restore", time.perf_counter())
    emit(protocol.Restored(job.run, state.rows, source, note, miss, kept.settled if kept else 0))
    spared = [image.start + image.tokens <= state.rows for image in prompt.images]
    left, calls = [image for image, spare in zip(prompt.images, spared) if not spare], 0
    while left:
        together = 1 if decoding() or not hasattr(model, "towers") else len(left)
        some, left, calls = left[:together], left[together:], calls + 1
        rows.features |= encoded(model, some)
        yield sum(image.tokens for image in some)
    job.ended("tower", time.perf_counter())
    emit(protocol.Encoded(job.run, calls, spared))
    job.rows = rows


@span("tower")
def encoded(model: Any, images: list[Any]) -> dict[int, Any]:
    """First row -> feature rows of some images: by one run of the tower where the model can, which changes no bit."""
    patches, grids = [image.patches for image in images], [image.grid for image in images]
    found = model.towers(patches, grids) if hasattr(model, "towers") else map(model.tower, patches, grids)
    return {image.start: rows for image, rows in zip(images, found)}


@span("restore")
def restore(model: Any, store: Store, kept: Kept | None, key: list[int]):
    """(state, cache source, note): a kept state's copy, or a new state where there is none or it fails."""
    if kept is None:
        return model.new_state(), None, None
    try:
        state = model.restore(kept.tensors, kept.at)
        return state, "exact" if store.exact(kept, key) else kept.source, None
    except Exception as error:
        traceback.print_exc()
        store.drop(kept)
        note = f"A kept state of {kept.at} rows could not be restored ({error}); computed from row 0."
        return model.new_state(), None, note


def later(job: Job, room: int, others: list[Rows], store: Store) -> bool:
    """Whether a job behind others is better begun later: there is no room for all its rows, or it could start from a
    state that they are about to keep."""
    if job.rows is not None or room < 1:
        return room < 1
    key = job.request.prompt.key
    if not job.request.cache:
        return len(key) > room
    above = store.reach(key)
    return len(key) - above > room or (bool(store.budget) and any(common(other, key, above) for other in others))


def common(other: Rows, key: list[int], above: int) -> bool:
    """Whether `other` is about to keep a state of more than `above` rows that a prompt of this key may start from."""
    mark = next((mark for mark in other.todo if above < mark < len(key)), None)
    return mark is not None and key[:mark] == other.prompt.key[:mark]
