"""Which drafts a round verifies: those that are worth their rows, by the time that rounds take on this machine.

What a round takes is timed once at load, for a few numbers of streams and rows, and then follows the rounds that are
run. Every round keeps, over all streams, the guesses with the best chances, as many as make the most of the time; a
stream whose drafts do not pay for their making drafts no more for a while. Only which guesses are verified depends on
clocks: no token does.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import accumulate
from statistics import median
from typing import NamedTuple

import numpy as np

from .draft import Draft

ONE, MANY, FEW = (1, (1, 8, 2, 4, 16)), (16, (16, 64, 32, 128, 256)), (4, (4, 16))
"""Streams, and their rows to be timed; the first two matter most. MANY where rows are cheap; else FEW, which take less
time and tell as much, since there every row takes its own."""
CHEAP = 1.5
"""Rows are, when eight take less than so many times one."""
LONG, ENOUGH = 30.0, 400.0
"""Milliseconds. No rounds larger than two over LONG are timed: what lies beyond goes on as it began. After ENOUGH in
all, on a machine that is slow or busy, the rest is left to be learnt."""
TIMES = 3
"""Each is timed so often; the shortest counts, for other work only adds to it."""
FREE, GUESSED = 0.002, 0.1
"""A row more than one a stream takes at least the first part of a round without any, and the second where none could
be timed."""
RECENT, AT_LEAST = 16, 4
"""Rounds whose times correct the curve, for about so many streams each; before AT_LEAST they do not."""
WITHIN = 20.0
"""They correct it within this factor."""


class Curve:
    """What a round takes, milliseconds, by streams and rows."""

    def __init__(self, points: dict[int, dict[int, float]]):
        """`points`: of each number of streams, rows -> milliseconds; rows from one a stream on."""
        self._streams = sorted(points)
        self._serial = [points[s][min(points[s])] for s in self._streams]
        self._extra: list[tuple[list[int], list[float]]] = []
        for streams, serial in zip(self._streams, self._serial):
            rows = sorted(points[streams])
            if len(rows) == 1:  # one point has no slope: that of fewer streams must do
                self._extra.append(self._extra[-1] if self._extra else ([0, 1], [0.0, GUESSED * serial]))
                continue
            least = [FREE * serial * (r - streams) for r in rows]
            more = accumulate((max(points[streams][r] - serial, low) for r, low in zip(rows, least)), max)
            self._extra.append(([r - streams for r in rows], list(more)))
        self._ratios: dict[tuple[bool, int], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    @classmethod
    def timed(cls, time_round: Callable[[int, int], float]) -> Curve:
        """`time_round(streams, rows)` runs a round and says what it took, milliseconds."""
        time_round(1, 2)
        alone, left = timed(time_round, *ONE, ENOUGH)
        points = {ONE[0]: alone}
        if left >= 0:
            streams, rows = MANY if alone[8] < CHEAP * alone[1] else FEW
            points[streams], _ = timed(time_round, streams, rows, left)
        return cls(points)

    def serial(self, streams: int) -> float:
        """A round of one row a stream."""
        known = self._serial[0] if len(self._serial) == 1 else float(beyond(streams, self._streams, self._serial))
        return self._scale(False, streams) * known

    def extra(self, streams: int, rows: np.ndarray) -> np.ndarray:
        """What so many rows more than one a stream add; [len(rows)]."""
        known = np.array([beyond(rows, *one) for one in self._extra])
        between = [float(np.interp(streams, self._streams, row)) for row in np.eye(len(known))]
        return self._scale(True, streams) * (np.array(between) @ known)

    def learn(self, streams: int, rows: int, ms: float) -> None:
        """A round of so many streams and rows took so long."""
        drafted, serial = rows > streams, self.serial(streams)
        known = float(self.extra(streams, np.array([rows - streams]))[0]) if drafted else serial
        took = ms - serial if drafted else ms
        self._ratios[drafted, crowd(streams)].append(took * self._scale(drafted, streams) / max(known, 1e-6))

    def _scale(self, drafted: bool, streams: int) -> float:
        """The median of what recent rounds took over what the timing at load said: rounds of about so many streams, or
        before there are any, of the next numbers up and down."""
        about = crowd(streams)
        for crowds in ((about,), (about - 1, about + 1)):
            ratios = [ratio for one in crowds for ratio in self._ratios.get((drafted, one), ())]
            if len(ratios) >= AT_LEAST:
                return min(max(median(ratios), 1 / WITHIN), WITHIN)
        return 1.0


def timed(
    time_round: Callable[[int, int], float], streams: int, rows: tuple[int, ...], left: float
) -> tuple[dict[int, float], float]:
    """Rows -> milliseconds of a round of so many streams, and what is left of so many milliseconds: below 0, it is
    time to end."""
    shortest: dict[int, float] = {}
    for n in rows:
        if len(shortest) > 1 and (left < 0 or max(shortest.values()) > LONG):
            break
        times: list[float] = []
        while not times or (len(times) < TIMES and left >= 0):
            times.append(time_round(streams, n))
            left -= times[-1]
        shortest[n] = min(times)
    return shortest, left


def crowd(streams: int) -> int:
    """Numbers of streams that are about the same: 1, 2 or 3, 4 to 7, 8 to 15, 16."""
    return streams.bit_length()


def beyond(x: np.ndarray | int, known: list[int], values: list[float]) -> np.ndarray:
    """Linear between the known points and on along the last two."""
    slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
    return np.interp(x, known, values) + np.maximum(x - known[-1], 0) * slope


class Share(NamedTuple):
    """What a round verifies."""

    kept: list[int]
    """Of each draft the first so many guesses."""
    serial_ms: float | None = None
    """The round without drafts, by the curve."""
    planned_ms: float | None = None
    """The round with what is kept."""


def share(drafts: list[Draft], curve: Curve | None, drafting_ms: float = 0.0) -> Share:
    """The guesses of a round that are worth their rows; all of them where no curve is known.

    With n guesses kept, the likeliest first, a round gives E(n) = streams + Σ chances tokens and takes C(n). In the
    long run the best is the largest E(n) - r C(n), where r is the best rate to be had: of rounds like this one, whose
    drafts take `drafting_ms` besides, or of rounds without drafts. Of each draft a first part is kept, so parents come
    with their children: no guess is valued above those before it.
    """
    if curve is None:
        return Share([len(draft.ids) for draft in drafts])
    streams, serial = len(drafts), curve.serial(len(drafts))
    if not any(draft.ids for draft in drafts):
        return Share([0] * streams, serial, serial)
    lines = [[(-chance, i) for chance in accumulate(draft.chances, min)] for i, draft in enumerate(drafts)]
    order = list(heapq.merge(*lines))
    tokens = streams + np.cumsum([0.0] + [-chance for chance, _ in order])
    takes = serial + curve.extra(streams, np.arange(len(order) + 1))
    rate = max(float((tokens / (takes + drafting_ms)).max()), streams / serial)
    n = int(np.argmax(tokens - rate * takes))
    kept = [0] * streams
    for _, i in order[:n]:
        kept[i] += 1
    return Share(kept, serial, float(takes[n]))


SORTS = 12
"""Chances are told apart in so many steps."""
TRUST, WHOLE = 8.0, 4.0
"""The drafter's own word counts as so many guesses of its sort, and as so many accepted ones of all."""
FADE = 0.998
"""What is left of the record with each draft that is learnt from: half after 350."""


class Calibration:
    """How far a drafter's chances can be trusted, learnt from what was accepted.

    A guess behind an accepted one has a chance of its own: its path's over its parent's. Of the guesses of about one
    such chance, the share that was accepted is counted, beside the drafter's own word, which is itself worth what all
    its guesses together showed; a path's corrected chance is the product along it. What is cut is never seen, so the
    record fades and a doubted guess is tried again.
    """

    def __init__(self):
        self._right, self._tried, self._promised = np.zeros(SORTS), np.zeros(SORTS), 0.0

    def corrected(self, draft: Draft) -> Draft:
        chances, own = [], self._own(draft)
        whole = (self._right.sum() + WHOLE) / (self._promised + WHOLE)
        for parent, p in zip(draft.parents, own):
            at = sort(p)
            q = (self._right[at] + TRUST * min(p * whole, 1.0)) / (self._tried[at] + TRUST)
            chances.append(float(min(q, 1.0)) * (chances[parent - 1] if parent else 1.0))
        return draft._replace(chances=chances)

    def learn(self, draft: Draft, kept: int, rows: list[int]) -> None:
        """Of a draft as it came from the drafter, the first `kept` guesses were verified; `rows` were walked."""
        self._right *= FADE
        self._tried *= FADE
        self._promised *= FADE
        walked = set(rows)
        for row, (parent, p) in enumerate(zip(draft.parents[:kept], self._own(draft)), 1):
            if parent in walked:
                self._promised += p
                self._tried[sort(p)] += 1
                self._right[sort(p)] += row in walked

    @staticmethod
    def _own(draft: Draft) -> list[float]:
        """Each guess's chance behind its parent."""
        before = [1.0, *draft.chances]
        return [
            min(chance / before[parent], 1.0) if before[parent] > 0 else 0.0
            for parent, chance in zip(draft.parents, draft.chances)
        ]


def sort(chance: float) -> int:
    return min(int(chance * SORTS), SORTS - 1)


LOSS, AGAIN = 1.0, 0.5
TRIAL, PROBE = 4, 2
"""What drafts may lose before a stream pauses, in its serial rounds, and how many must have been made: at first, and
after a pause."""
SPEND, LONGEST = 0.005, 128
"""The part of a stream's time that drafts which do not pay may take: what was lost, over it, is the pause, rounds; at
most LONGEST."""
LOSING = -0.05
"""Where other streams' drafts lose more than that each, a new stream begins within a pause."""
CREDIT = 2.0
"""What drafts have gained is held against later losses up to so much."""


class Worth:
    """Whether a stream's drafts pay for their making.

    What each gained or lost adds up. A stream that has lost a round's time makes no drafts until the loss is a small
    part of its rounds; then it may lose half as much again before the next pause.
    """

    def __init__(self, usual: float = 0.0, begun: float = 0.0):
        """`usual`: what other streams' drafts gain each. Where they lose, this one begins within a pause, of which the
        part `begun` is over."""
        self.balance, self.paused, self._made, self._limits = 0.0, 0, 0, (LOSS, TRIAL)
        if usual < LOSING:
            self._rest(AGAIN * (1 - begun))

    def rests(self) -> bool:
        """Whether this round goes without; counts it."""
        self.paused -= self.paused > 0
        return self.paused > 0

    def learn(self, gain: float) -> None:
        """A draft gained so many serial rounds more than it took."""
        self.balance, self._made = min(self.balance + gain, CREDIT), self._made + 1
        loss, least = self._limits
        if self.balance < -loss and self._made >= least:
            self._rest(-self.balance)

    def _rest(self, lost: float) -> None:
        self.balance, self._made, self._limits = 0.0, 0, (AGAIN, PROBE)
        self.paused = min(math.ceil(lost / SPEND), LONGEST)


def gain(accepted: int, kept: int, shared: Share, drafts: list[int], drafting_ms: float) -> float:
    """What a stream's draft saved, in its serial rounds: its accepted tokens, less its part of the rows' time (by
    guesses kept; `drafts`: of all streams) and of the drafting (`drafting_ms`: its own part)."""
    if shared.serial_ms is None or shared.planned_ms is None:
        return 0.0
    rows = kept * (shared.planned_ms - shared.serial_ms) / max(sum(drafts), 1)
    return accepted - (rows + drafting_ms) * len(drafts) / shared.serial_ms
