"""Rounds by bucket: (streams, rows of a window), both powers of two up to 16. On a GPU each is captured once and from
then on is one launch between one copy in and one copy out; on a CPU it simply runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tfmagic.kernels.gpu.logprobs import TOP, Logprobs, logprobs
from tfmagic.kernels.gpu.sample import Rules, sample

from ....drafting.draft import Likely, Outcome, Walk, Window
from ....sampling import COLDEST, Draw, Sampling
from .fields import Fields
from .forward import ROWS, Forward
from .graphs import Graphs
from .state import State

BUCKETS = (1, 2, 4, 8, 16)
NOT_FINITE = "the model gave numbers that are not finite"
WRAP = 1 << 64


class Bucket(NamedTuple):
    """Rounds of one shape. Every field is part of what is captured."""

    streams: int
    rows: int
    size: int
    """Ids at or beyond it are never drawn."""
    greedy: bool
    """Every stream of the round is."""
    logprobs: bool = False
    """Some stream of the round asks for them."""


def bucket(windows: list[Window], draws: list[Draw], least: int = 1) -> Bucket:
    """The least bucket that holds the round and has `least` rows in all. Raises ValueError when none does."""
    streams, rows = len(windows), max(len(window.ids) for window in windows)
    if streams > BUCKETS[-1] or rows > BUCKETS[-1]:
        raise ValueError(f"a round of {streams} windows of up to {rows} rows; {BUCKETS[-1]} of {BUCKETS[-1]} at most")
    sizes = {draw.sampling.size for draw in draws}
    if len(sizes) > 1:
        raise ValueError("a round's streams draw from different numbers of ids")
    rows = next(b for b in BUCKETS if b >= rows)
    streams = next(b for b in BUCKETS if b >= streams and b * rows >= least)
    greedy = all(draw.sampling.greedy for draw in draws)
    return Bucket(streams, rows, sizes.pop(), greedy, any(draw.sampling.logprobs for draw in draws))


Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def fields(S: int, R: int) -> Kinds:
    """What a round is told."""
    rows, whole = (S, R), torch.int32
    return {
        "ids": (whole, rows),
        "parents": (whole, rows),
        "positions": (whole, rows),  # for the rotation
        "counts": (whole, (S,)),  # rows in use; 0: no stream
        "slots": (whole, (S,)),
        "rows": (whole, (S,)),  # committed before
        **drawing(rows),
    }


def drawing(rows: tuple[int, ...]) -> Kinds:
    """How each row's token is drawn."""
    whole, double = torch.int32, torch.float64
    return {
        "temperature": (double, rows),
        "top_k": (whole, rows),
        "top_p": (double, rows),
        "min_p": (double, rows),
        "seed": (torch.int64, rows),
        "places": (whole, rows),  # absolute, of the tokens drawn
    }


def probabilities(shape: tuple[int, int]) -> Kinds:
    """What `Logprobs` holds of so many streams and rows."""
    double, top = torch.float64, (*shape, TOP)
    return dict(zip(Logprobs._fields, [(double, shape), (torch.int32, top), (double, top)]))


def tell(f: dict[str, np.ndarray], s: int, draw: Draw) -> None:
    """Write how stream s draws; not where."""
    by = draw.sampling
    f["temperature"][s] = max(by.temperature, COLDEST) if by.temperature else 0.0
    f["top_k"][s], f["top_p"][s], f["min_p"][s] = by.top_k, by.top_p, by.min_p
    f["seed"][s] = signed(draw.seed)


class Made(NamedTuple):
    """What a round drafted for itself."""

    drafts: list[list[tuple[int, int, float]]]
    """Of each stream the guesses: id, parent's row, chance; the likeliest first."""
    verified: list[int]
    """Of each stream, rows of its window."""
    ms: float | None
    """From the end of the round before until they were made; None: the round had to be captured in between."""


class Round:
    """A bucket's arrays, and its launch."""

    def __init__(self, b: Bucket, forward: Forward, graphs: Graphs, taps: Tensor | None):
        """`taps`: where the tapped layers' rows go."""
        self.bucket, self.taps, self.forward, device = b, taps, forward, forward.device
        self.into, self.out = Fields(device, **self.told()), Fields(device, **self.given())
        self.first = torch.arange(0, b.streams * b.rows, b.rows, dtype=torch.int32, device=device)[:, None]
        """Each stream's first row."""
        self.chain = list(range(-1, b.rows - 1))
        self.into.numpy["parents"][:] = self.chain
        self._last: list[tuple[Sampling, int] | None] = [None] * b.streams
        self.into.send()
        self.launch = graphs.captured(self.run)
        self.out.capture(graphs)

    def told(self) -> Kinds:
        """What `into` holds."""
        return fields(self.bucket.streams, self.bucket.rows)

    def given(self) -> Kinds:
        """What `out` holds: see `kernels.gpu.walk`, and `Logprobs` where they are asked for."""
        shape = S, _ = self.bucket.streams, self.bucket.rows
        rows, more = (torch.int32, shape), probabilities(shape) if self.bucket.logprobs else {}
        return {"drawn": rows, "path": rows, "walked": (torch.int32, (S,)), **more}

    def run(self) -> None:
        """What is captured."""
        self.forward.round(self.into.device, self.out.device, self.taps, self.bucket.size, self.bucket.greedy)

    def fill(self, states: list[State], windows: list[Window], draws: list[Draw]) -> None:
        f, n, R = self.into.numpy, len(states), self.bucket.rows
        self.seat(states, draws)
        for name in ("counts", "rows"):
            f[name][n:] = 0
        f["counts"][:n] = [len(ids) for ids, _ in windows]
        f["rows"][:n] = rows = np.array([state.rows for state in states], np.int32)
        places, shifts = [draw.position for draw in draws], [state.shift for state in states]
        depths = 0
        if R == 1:
            f["ids"][:n, 0] = [ids[0] for ids, _ in windows]
        else:
            f["ids"][:n] = [ids + [0] * (R - len(ids)) for ids, _ in windows]
            f["parents"][:n] = [parents + self.chain[len(parents) :] for _, parents in windows]
            depths = np.array([window.depths + [0] * (R - len(window.ids)) for window in windows], np.int32)
        f["positions"][:n] = (rows + shifts)[:, None] + depths
        f["places"][:n] = np.array(places, np.int32)[:, None] + depths

    def seat(self, states: list[State], draws: list[Draw]) -> None:
        """Where each stream's state is, and how it draws, which most often is what it was in the last round."""
        slots = self.into.numpy["slots"]
        slots[: len(states)], slots[len(states) :] = [state.slot.index for state in states], 0
        for s, draw in enumerate(() if self.bucket.greedy else draws):
            last = self._last[s]
            if last is None or last[0] is not draw.sampling or last[1] != draw.seed:
                self._last[s] = draw.sampling, draw.seed
                tell(self.into.numpy, s, draw)

    def outcomes(self, tapped: Tensor | None, draws: list[Draw]) -> list[Outcome]:
        """What each stream's window gave; `tapped` of this round, on the device."""
        counts, paths, drawn = (self.out.numpy[name].tolist() for name in ("walked", "path", "drawn"))
        rows = [path[:count] for path, count in zip(paths, counts[: len(draws)])]
        taps = [None] * len(rows) if tapped is None else self._walked(tapped, rows)
        found = []
        for s, (own, by) in enumerate(zip(rows, draws)):
            error = NOT_FINITE if self._stuck(s, own, drawn[s]) else None
            walk = Walk(own, [drawn[s][row] for row in own], error)
            found.append(Outcome(walk, likely(self.out.numpy, s, len(own), by.sampling.logprobs), taps[s]))
        return found

    def tapped(self) -> Tensor | None:
        """The tapped rows [S, R, taps · D] of every stream's path, gathered by what is on the device."""
        if self.taps is None:
            return None
        places = (self.out.device["path"].clamp_min(0) + self.first).view(-1)
        return self.taps.index_select(0, places).view(*self.first.shape[:1], self.bucket.rows, -1)

    def _walked(self, tapped: Tensor, rows: list[list[int]]) -> list[Tensor]:
        """Of each stream the tapped rows of its walk."""
        parts = [tapped[s, : len(own)] for s, own in enumerate(rows)]
        return parts if self.bucket.rows == 1 else [part.clone() for part in parts]  # not held by rows of no walk

    def _stuck(self, s: int, rows: list[int], drawn: list[int]) -> bool:
        """Whether the walk ended before a row that was not finite."""
        if not rows:
            return True
        (ids, parents, counts), last = self.windows(), rows[-1]
        count = int(counts[s])
        if count == last + 1 or min(drawn[:count]) >= 0:
            return False
        here = slice(last + 1, count)
        return bool(((parents[s, here] == last) & (ids[s, here] == drawn[last])).any())

    def windows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What was verified: ids and parents [S, >= R], and of each stream how many rows."""
        f = self.into.numpy
        return f["ids"], f["parents"], f["counts"]

    def drafts(self, streams: int) -> Made | None:
        """Of a round that drafted for itself, what it made."""
        return None


def likely(out: dict[str, np.ndarray], s: int, steps: int, count: int) -> list[Likely | None]:
    """What `Logprobs`, whose arrays are in `out`, says of each of stream s's steps, with `count` likeliest ids."""
    if not count:
        return [None] * steps
    drawn, ids, values = (out[name][s, :steps] for name in Logprobs._fields)
    tops = zip(ids[:, :count].tolist(), values[:, :count].tolist())
    return [Likely(own, [one for one in zip(*top) if one[0] >= 0]) for own, top in zip(drawn.tolist(), tops)]


class Flight:
    """A round that was launched. Called, it waits for the round, moves the states along their walks and says what it
    gave."""

    def __init__(self, round: Round, states: list[State], draws: list[Draw], fresh: bool = False):
        """`fresh`: it was the first of its bucket, which had to be captured."""
        self.round, self.draws, self.fresh = round, draws, fresh
        # A sequence that ends meanwhile is let go: whoever has its place next, writes there behind this round.
        self.states = [weakref.ref(state) for state in states]
        self.seats: Any = None
        """Of a round that drafts for itself, `kernels.gpu.tree.Seats` as lists."""
        self.made: Made | None = None
        """What it made, once it has landed."""
        self._tapped: Tensor | None = None
        self._fetched = False
        self._outcomes: list[Outcome] | None = None

    def fetch(self, tapped: bool = True) -> None:
        """Have what it gives brought, before the round behind it writes over it. Not `tapped`: without tapped rows,
        for somebody else takes them from `round.taps`."""
        if not self._fetched:
            self._tapped, self._fetched = self.round.tapped() if tapped else None, True
            self.round.out.fetch()

    def wait(self) -> list[Outcome]:
        """What it gives: here before any round but the one behind it is launched."""
        if self._outcomes is None:
            self.fetch()
            self.round.out.wait()
            self._outcomes = self.round.outcomes(self._tapped, self.draws)
            made = self.round.drafts(len(self.draws))
            self.made = made._replace(ms=None) if made and self.fresh else made
        return self._outcomes

    def __call__(self) -> list[Outcome]:
        outcomes = self.wait()
        for reference, outcome in zip(self.states, outcomes):
            if (state := reference()) is not None:
                state.rows += len(outcome.walk.rows)
        return outcomes


def signed(seed: int) -> int:
    """The bits of a seed as int64."""
    seed %= WRAP
    return seed - WRAP if seed >= WRAP // 2 else seed


class First:
    """First tokens: those that one row of logits gives to the streams that begin with it, 16 at most."""

    def __init__(self, vocab: int, device: torch.device, graphs: Graphs):
        """`vocab`: numbers of a row of logits."""
        rows = BUCKETS[-1], 1
        self.into = Fields(device, **drawing(rows[:1]))
        self.out = Fields(device, drawn=(torch.int32, rows), **probabilities(rows))
        self.out.capture(graphs)
        self._graphs, self._row = graphs, torch.zeros(vocab, device=device)
        self._greedy: dict[int, Callable[[], None]] = {}
        self.path = torch.zeros(rows, dtype=torch.int32, device=device)
        """Of every stream the row is its first."""

    def greedy(self, size: int) -> Callable[[], None]:
        """The launch that draws from the row at hand what greedy streams begin with. `size`: ids at or beyond it are
        never drawn. Captured when it is first asked for."""
        if size not in self._greedy:
            rules = Rules(*(torch.zeros_like(x) for x in self.into.device.values()), size=size)
            rows, out = self._row.expand(len(self.path), -1), self.out.device["drawn"].view(-1)
            self._greedy[size] = self._graphs.captured(lambda: sample(rows, rules, out=out, greedy=True))
        return self._greedy[size]

    def draw(self, row: Tensor, draws: list[Draw]) -> list[tuple[int, Likely | None]]:
        """`row` float32 [V]. Raises FloatingPointError when it is not finite."""
        if all(draw.sampling.greedy and not draw.sampling.logprobs for draw in draws):
            self._row.copy_(row)
            self.greedy(draws[0].sampling.size)()
        else:
            self._sample(row, draws)
        return self.drawn(draws)

    def _sample(self, row: Tensor, draws: list[Draw]) -> None:
        """The draws of streams of which some sample, or ask for log probabilities."""
        n, f, size = len(draws), self.into.numpy, draws[0].sampling.size
        self.into.wait()
        for s, draw in enumerate(draws):
            tell(f, s, draw)
            f["places"][s] = draw.position
        self.into.send()
        rules = Rules(*(x[:n] for x in self.into.device.values()), size=size)
        greedy = all(draw.sampling.greedy for draw in draws)
        rows, (drawn, *out) = row.expand(n, -1), (x[:n] for x in self.out.device.values())
        sample(rows, rules, out=drawn.view(-1), greedy=greedy)
        if any(draw.sampling.logprobs for draw in draws):
            logprobs(rows, drawn, self.path[:n], (drawn >= 0).int().view(-1), size, Logprobs(*out))

    def drawn(self, draws: list[Draw]) -> list[tuple[int, Likely | None]]:
        self.out.receive()
        ids = self.out.numpy["drawn"][: len(draws), 0].tolist()
        if min(ids) < 0:
            raise FloatingPointError(NOT_FINITE)
        told = (likely(self.out.numpy, s, 1, by.sampling.logprobs)[0] for s, by in enumerate(draws))
        return list(zip(ids, told))


class Rounds:
    """Rounds of every bucket, made when they are first needed."""

    def __init__(self, forward: Forward, graphs: Graphs):
        self.forward, self.graphs = forward, graphs
        self._made: dict[Bucket, Round] = {}
        self.taps: Tensor | None = None
        """bf16 [256, taps · D]: where tapped rows go, of all rounds."""
        self.least = -(-4 // forward.t.kv_heads)
        """Rows in all for which every layer's part of what a round leaves starts at a multiple of 16 bytes."""
        self._last: Callable[[], Flight | None] = lambda: None
        """The flight that was launched last, while somebody has it."""

    def tap(self) -> None:
        """The forward's taps have changed."""
        self._made, self.taps = {}, self.forward.new_taps(ROWS)

    def launch(self, states: list[State], windows: list[Window], draws: list[Draw]) -> Flight:
        """Begin one round."""
        b = bucket(windows, draws, self.least)
        if (last := self._last()) is not None:
            last.wait()
        for state, window in zip(states, windows):
            state.reserve(state.rows + len(window.ids))
        fresh = b not in self._made
        round = self._make(b) if fresh else self._made[b]
        round.fill(states, windows, draws)
        round.into.send()
        round.launch()
        return self.launched(Flight(round, states, draws, fresh))

    def follow(self, flight: Flight) -> Flight | None:
        """Begin the round behind one of a row a stream, which has not landed: the same streams, each with the token
        that it is about to get. None where a window has more rows, a stream has ended, or another round was
        launched since."""
        states = None if flight.round.bucket.rows > 1 else self.going(flight)
        if states is None:
            return None
        for state in states:
            state.reserve(state.rows + 2)
        flight.fetch()
        flight.round.launch()  # the one before has left in its arrays what this one is told
        return self.launched(Flight(flight.round, states, flight.draws))

    def going(self, flight: Flight) -> list[State] | None:
        """The states of a flight that nothing was launched behind; None where there was, or where one has ended."""
        states = [reference() for reference in flight.states]
        return states if self._last() is flight and None not in states else None

    def launched(self, flight: Flight) -> Flight:
        self._last = weakref.ref(flight)
        return flight

    def _make(self, b: Bucket) -> Round:
        made = self._made[b] = Round(b, self.forward, self.graphs, self.tapped(b))
        return made

    def tapped(self, b: Bucket) -> Tensor | None:
        """Where a bucket's tapped rows go."""
        return None if self.taps is None else self.taps[: b.streams * b.rows]
