"""One sequence on the device, and its form as named tensors in host memory.

A `State` is what runs: a slot and its pages. A `View` is the state after some of its rows, at rest: the pages it
shares, which nobody writes below its rows, and its own copy of the recurrent part. Kept, a view goes to host memory on
a side stream, and stays on the device as long as there is room: the next turn then starts from it without a copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....cache.arriving import Arriving
from .pool import PAGE, Page, Pool, pages_for, raw


class State:
    """One sequence after its first `rows` rows."""

    def __init__(self, pool: Pool, blank: bool = True):
        """`blank`: the recurrent part is zeroed; else it is yet to be filled in."""
        self.pool, self.slot = pool, pool.slot()
        self.pages: list[Page] = []
        self.rows = 0
        self.shift = 0  # added to a generated row's place to give its position (rope_delta)
        if blank:
            pool.S[:, self.slot.index] = 0
            pool.conv[:, self.slot.index] = 0

    def reserve(self, rows: int) -> None:
        """Have pages for so many rows. Raises MemoryError when there are none."""
        held = len(self.pages)
        if held < pages_for(rows):
            fresh = [self.pool.page() for _ in range(held, pages_for(rows))]
            self.pool.point(self.slot, [*self.pages, *fresh], held)
            self.pages += fresh  # all or none: a page that is held is in the table

    def share(self, pages: list[Page], rows: int) -> None:
        """Begin with the first `rows` rows of these pages: full ones are shared, the last one copied."""
        self.pages = pages[: rows // PAGE]
        if rows % PAGE:
            self.pages.append(self.pool.copy_page(pages[rows // PAGE]))
        self.pool.point(self.slot, self.pages)
        self.rows = rows

    def fork(self) -> State:
        """An independent sequence with the same past."""
        other, here = State(self.pool, blank=False), self.slot.index
        other.share(self.pages, self.rows)
        other.shift = self.shift
        self.pool.S[:, other.slot.index] = self.pool.S[:, here]
        self.pool.conv[:, other.slot.index] = self.pool.conv[:, here]
        return other

    def at(self, rows: int, S: Tensor, conv: Tensor) -> View:
        """This sequence after its first `rows` rows: S [G, heads, dk, dv] and conv [G, K - 1, C] are taken over."""
        return View(self.pool, self.pages[: pages_for(rows)], rows, S, conv)

    def view(self) -> View:
        here = self.slot.index
        return self.at(self.rows, self.pool.S[:, here].clone(), self.pool.conv[:, here].clone())

    def named(self) -> Arriving:
        """The whole state by name, in host memory."""
        return self.view().named()


class View:
    """A sequence after its first `rows` rows, at rest."""

    def __init__(self, pool: Pool, pages: list[Page], rows: int, S: Tensor, conv: Tensor):
        self.pool, self.pages, self.rows, self.S, self.conv = pool, pages, rows, S, conv
        self._kept = False
        self._left: Arriving | None = None
        pool.wait(self)

    @property
    def here(self) -> bool:
        """Whether it is on the device still."""
        return self.S is not None

    def leave(self) -> None:
        """Make room on the device. What nobody has kept yet goes to host memory, from where it can be kept."""
        if self.here and not self._kept:
            self._left = Arriving(*self._sent())
        self.pages, self.S, self.conv = [], None, None

    def named(self) -> Arriving:
        """Every tensor by name, on its way to host memory: of Gated DeltaNet layer i `i.S`, of all of them `conv`; of
        page p the rows that count, `page p.k` and `page p.v` [A, rows, KV, d] in their own dtype (fp8: `page p.k_scale`
        and `page p.v_scale` [A, rows, KV])."""
        if self._left is not None:
            return self._left
        named = Arriving(*self._sent(), self)
        self._kept = True
        return named

    def _sent(self) -> tuple[dict[str, Tensor], list[Callable[[], None]]]:
        """The tensors, and what to wait for."""
        parts, known, events = {"S": self.S, "conv": self.conv}, {}, []
        for p, page in enumerate(self.pages):
            rows = min(self.rows - p * PAGE, PAGE)
            if page.host is None or rows < PAGE:
                parts |= {f"page {p}.{name}": rows_of(x, page, rows) for name, x in self.pool.parts().items()}
            else:
                found, event = page.host
                known |= {f"page {p}.{name}": x for name, x in found.items()}
                events.append(event)
        found, event = fetch(parts, self.pool)
        for p, page in enumerate(self.pages):
            if page.host is None and self.rows >= (p + 1) * PAGE:
                page.host = {name: found[f"page {p}.{name}"] for name in self.pool.parts()}, event
        S = found.pop("S")
        tensors = {f"{i}.S": one for i, one in zip(self.pool.recurrent, S)} | found | known
        return tensors, [event.synchronize for event in (event, *events) if event is not None]

    def wake(self) -> State:
        """A sequence that goes on from here."""
        self.pool.used(self)
        state = State(self.pool, blank=False)
        state.share(self.pages, self.rows)
        self.pool.S[:, state.slot.index], self.pool.conv[:, state.slot.index] = self.S, self.conv
        return state


sides: dict[torch.device, torch.cuda.Stream] = {}
"""Of each device the stream that all copies to host memory take, in order."""


def fetch(parts: dict[str, Tensor], pool: Pool) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
    """Tensors that are not written any more, copied from the device behind everything that was launched before; they
    are in host memory once the event has come."""
    if pool.device.type != "cuda":
        return {name: x.clone() for name, x in parts.items()}, None
    side = sides.get(pool.device) or sides.setdefault(pool.device, torch.cuda.Stream(pool.device))
    found, event = {name: pool.host(x) for name, x in parts.items()}, torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream(pool.device))
    with torch.cuda.stream(side):
        for name, x in parts.items():
            found[name].copy_(x, non_blocking=True)
            x.record_stream(side)
    event.record(side)
    return found, event


def rows_of(x: Tensor, page: Page, rows: int) -> Tensor:
    """The first rows of a page: x [A, pages, KV, 512, ...] -> [A, rows, KV, ...], a copy."""
    held = raw(x)[:, page.index, :, :rows].transpose(1, 2)
    return held.clone(memory_format=torch.contiguous_format).view(x.dtype)


def restore(tensors: dict[str, Tensor], rows: int, pool: Pool) -> State:
    """The state that `named` described; one that is still on the device is gone on from there. Raises ValueError when
    a tensor is missing, strange or of another shape."""
    view = getattr(tensors, "view", None)
    if view is not None and view.here and view.pool is pool and view.rows == rows:
        return view.wake()
    checked = check(tensors, rows, pool)
    state = State(pool, blank=False)
    state.reserve(rows)
    state.rows, here = rows, state.slot.index
    pool.conv[:, here].copy_(checked["conv"], non_blocking=True)
    for S, i in zip(pool.S[:, here], pool.recurrent):
        S.copy_(checked[f"{i}.S"], non_blocking=True)
    for p, page in enumerate(state.pages):
        for name, x in pool.parts().items():
            part = raw(checked[f"page {p}.{name}"].to(pool.device, non_blocking=True))
            raw(x)[:, page.index, :, : part.shape[1]] = part.transpose(1, 2)
    return state


def check(tensors: dict[str, Tensor], rows: int, pool: Pool) -> dict[str, Tensor]:
    """The tensors of a state of so many rows. Raises ValueError."""
    expected = {f"{i}.S": (pool.S.shape[2:], pool.S.dtype) for i in pool.recurrent}
    expected["conv"] = pool.conv[:, 0].shape, pool.conv.dtype
    for p in range(pages_for(rows)):
        for name, x in pool.parts().items():
            shape = x.shape[0], min(rows - p * PAGE, PAGE), x.shape[2], *x.shape[4:]
            expected[f"page {p}.{name}"] = shape, x.dtype
    for name, (shape, dtype) in expected.items():
        x = tensors.get(name)
        if x is None or x.shape != shape or x.dtype != dtype:
            found = "missing" if x is None else f"{x.dtype} {list(x.shape)}"
            raise ValueError(f"the kept tensor {name} is {found}, expected {dtype} {list(shape)}")
    if extra := set(tensors) - expected.keys():
        raise ValueError(f"the kept state holds tensors of no layer: {sorted(extra)[:3]}")
    return {name: tensors[name] for name in expected}
