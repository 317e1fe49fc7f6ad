"""Settling: while nothing else runs, a reply's rows are computed again by the prompt pass, so that the chat's next turn
starts at its end.

What is kept is what a cold pass over those rows keeps, bit for bit: a settled state differs from others in its label
alone.
"""

from __future__ import annotations

import traceback
from collections import deque
from typing import Any, NamedTuple

from .cache.store import Kept, Store, agree
from .prefill import encoded, restore
from .prompt import Prompt

REPLIES = 16
"""Replies that may wait to be settled; the oldest is forgotten first."""


class Reply(NamedTuple):
    """What the chat's next prompt will begin with."""

    prompt: Prompt
    """The rows that are sure."""
    label: str


def beginning(one: Prompt, other: Prompt) -> Prompt:
    """The rows that two prompts share."""
    rows = agree(one.key, other.key)
    images = [image for image in one.images if image.start + image.tokens <= rows]
    return Prompt(one.ids[:rows], one.key[:rows], images, one.positions[:, :rows])


class Settling:
    """One reply, a slice at a time."""

    def __init__(self, reply: Reply, model: Any, store: Store):
        self.reply, self.model, self.store = reply, model, store
        prompt = reply.prompt
        self.goal = len(prompt.ids) // model.grain * model.grain
        self.key = [*prompt.key[: self.goal], 0]
        self.kept: Kept | None = store.longest(self.key)
        self.from_row = self.kept.at if self.kept else 0
        self.settled_from = self.from_row - (self.kept.settled if self.kept else 0)
        self.state: Any = None

    def step(self) -> bool:
        """One slice of a grain, or what must come first. False: it is done."""
        if self.from_row == self.goal:
            return False
        if self.state is None:
            self.state = restore(self.model, self.store, self.kept, self.key)[0]
            self.from_row = self.state.rows
            self.settled_from = min(self.settled_from, self.from_row)
            images = [image for image in self.reply.prompt.images if image.start + image.tokens > self.from_row]
            self.features = encoded(self.model, images) if images else {}
            return True
        low, high, prompt = self.state.rows, self.state.rows + self.model.grain, self.reply.prompt
        self.model.prompt_passes([(self.state, prompt.ids[low:high], self.features, prompt.positions[:, low:high], [])])
        if high < self.goal:
            return True
        self.keep()
        return False

    def keep(self) -> None:
        """Keep what has been reached."""
        if self.state is None or self.state.rows == self.from_row:
            return
        key = [*self.key[: self.state.rows], 0]
        states = {self.state.rows: self.state.named}
        label = f"{self.reply.label}, settled"
        self.store.keep(key, states, label=label, settled=self.settled_from, resumed=self.kept)


class Settler:
    """The replies that wait, and the one in hand. What fails here costs a later turn some time, nothing else."""

    def __init__(self, model: Any, store: Store):
        self.model, self.store = model, store
        self.waiting: deque[Reply] = deque(maxlen=REPLIES)
        self.current: Settling | None = None

    def __len__(self) -> int:
        return len(self.waiting) + (self.current is not None)

    def step(self) -> None:
        """A slice."""
        try:
            if self.current is None and self.waiting:
                self.current = Settling(self.waiting.popleft(), self.model, self.store)
            if self.current is not None and not self.current.step():
                self.current = None
        except Exception as error:
            traceback.print_exception(error)
            self.current = None

    def pause(self) -> None:
        """Real work is here: what has been reached is kept, and the rest begins from there when it is quiet again."""
        if self.current is None:
            return
        current, self.current = self.current, None
        try:
            current.keep()
            self.waiting.append(current.reply)
        except Exception as error:
            traceback.print_exception(error)
