"""The static memory of running sequences: pages of keys and values, and a slot of recurrent state a sequence.

Everything is allocated once. A page holds 512 rows of every full-attention layer; it is free again when nobody refers
to its `Page` any more, so sequences that begin alike may share it. Slot 0 and page 0 belong to nobody: rows that only
fill a bucket point there.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tfmagic.kernels.gpu.pages import PAGE
from tfmagic.kernels.gpu.pages import pages as paged

from ..config import Text
from .pinned import PinnedPool

KV = {"bf16": 2, "fp8": 1}
"""What keys and values are held in, and bytes a number; fp8 with a float32 scale a row and head."""


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    slots: int
    """Sequences at a time, and slot 0."""
    pages: int
    """With page 0."""
    longest: int
    """Pages that one sequence may have."""
    views: int
    """Bytes that recurrent states at marks may take while they wait on the device for the next turn."""
    kv: str = "bf16"


class Page:
    """One page's place, held for as long as somebody refers to it."""

    __slots__ = ("_free", "host", "index")

    def __init__(self, index: int, free: list[int]):
        self.index, self._free = index, free
        self.host: Any = None
        """Its copy in host memory, once it is full and was kept: (named tensors, what to wait for)."""

    def __del__(self):
        self._free.append(self.index)


class Slot:
    """A recurrent state's place, held for as long as somebody refers to it."""

    __slots__ = ("_free", "index")

    def __init__(self, index: int, free: list[int]):
        self.index, self._free = index, free

    def __del__(self):
        self._free.append(self.index)


class Pool:
    """keys: `kernels.gpu.pages.Rows` [A, pages, KV, 512, d] over A full-attention layers; S float32 [G, slots, heads,
    dk, dv] and conv bf16 [G, slots, K - 1, C] over G Gated DeltaNet layers; table int32 [slots, longest]: the pages of
    a slot's sequence in order."""

    def __init__(self, t: Text, plan: Plan, device: torch.device):
        self.t, self.plan, self.device = t, plan, device
        self.recurrent = [i for i, full in enumerate(t.full) if not full]
        """The model's Gated DeltaNet layers, in order."""
        full = sum(t.full)
        self.keys = paged(plan.pages, t.kv_heads, t.head_dim, plan.kv == "fp8", device, layers=full)
        slots = len(self.recurrent), plan.slots
        self.S = torch.zeros(*slots, t.value_heads, t.key_dim, t.value_dim, device=device)
        self.conv = torch.zeros(*slots, t.conv - 1, t.channels, dtype=torch.bfloat16, device=device)
        self.table = torch.zeros(plan.slots, plan.longest, dtype=torch.int32, device=device)
        self._slots, self._pages = list(range(plan.slots - 1, 0, -1)), list(range(plan.pages - 1, 0, -1))
        self.pinned: PinnedPool | None = None
        """Where states in host memory find their place without waiting, once it is made."""
        self._waiting: OrderedDict[int, Any] = OrderedDict()  # views on the device by id, the longest unused first

    @property
    def free_pages(self) -> int:
        return len(self._pages)

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    @property
    def view_bytes(self) -> int:
        """Bytes of one recurrent state, all layers."""
        return (self.S[:, 0].numel() * 4) + (self.conv[:, 0].numel() * 2)

    def parts(self) -> dict[str, Tensor]:
        """What a page consists of, by name."""
        return {name: x for name, x in self.keys._asdict().items() if x is not None}

    def slot(self) -> Slot:
        """Raises MemoryError when every slot is taken."""
        if not self._slots:
            gc.collect()  # a sequence that failed may hang in its traceback
        if not self._slots:
            raise MemoryError(f"all {self.plan.slots - 1} sequences of the device's memory are taken")
        return Slot(self._slots.pop(), self._slots)

    def page(self) -> Page:
        """Raises MemoryError when every page is taken; states that only wait there are dropped first."""
        while not self._pages and self._waiting:
            self._drop()
        if not self._pages:
            gc.collect()
        if not self._pages:
            raise MemoryError(f"all {self.plan.pages - 1} pages of the device's memory are taken")
        return Page(self._pages.pop(), self._pages)

    def point(self, slot: Slot, pages: list[Page], first: int = 0) -> None:
        """Write a slot's table from its `first` page on."""
        if len(pages) > self.plan.longest:
            raise MemoryError(f"a sequence of {len(pages)} pages; {self.plan.longest} is the longest")
        if first < len(pages):
            places = torch.tensor([page.index for page in pages[first:]], dtype=torch.int32)
            self.table[slot.index, first : len(pages)].copy_(places, non_blocking=True)

    def copy_page(self, source: Page) -> Page:
        page = self.page()
        for part in self.parts().values():
            raw(part)[:, page.index] = raw(part)[:, source.index]
        return page

    def host(self, x: Tensor) -> Tensor:
        """Pinned memory for a tensor."""
        here = None if self.pinned is None else self.pinned.take(x.shape, x.dtype)
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True) if here is None else here

    # States that wait on the device for the next turn --------------------------------------------------

    def wait(self, view: Any) -> None:
        """Let a view stay on the device until the room is needed."""
        name = id(view)
        self._waiting[name] = weakref.ref(view, lambda _: self._waiting.pop(name, None))
        while len(self._waiting) * self.view_bytes > self.plan.views:
            self._drop()

    def used(self, view: Any) -> None:
        self._waiting.move_to_end(id(view))

    def _drop(self) -> None:
        _, reference = self._waiting.popitem(last=False)
        if (view := reference()) is not None:
            view.leave()


def raw(x: Tensor) -> Tensor:
    """fp8 as bytes: not every indexing knows fp8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def pages_for(rows: int) -> int:
    return -(-rows // PAGE)


def page_bytes(t: Text, kv: str) -> int:
    """Bytes of one page, all layers."""
    row = t.head_dim * KV[kv] + (4 if kv == "fp8" else 0)
    return 2 * sum(t.full) * t.kv_heads * PAGE * row


def slot_bytes(t: Text) -> int:
    """Bytes of one recurrent state, all layers."""
    recurrence = 4 * t.value_heads * t.key_dim * t.value_dim + 2 * (t.conv - 1) * t.channels
    return (len(t.full) - sum(t.full)) * recurrence
