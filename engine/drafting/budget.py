"""Which drafts a round verifies: those that are worth their rows, by the time that rounds take on this machine.

What a round takes is timed once at load, for a few numbers of streams and rows, and then follows the rounds that are
run. Every round keeps, over all streams, the guesses with the best chances, as many as make the most of the time;
drafts that do not pay for their making are not made for a while. Only which guesses are verified depends on clocks: no
token does.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
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
LATELY = 1024
"""Rounds; what was not run for so many corrects it no more, so that what once seemed slow is tried again."""
WITHIN = 20.0
"""They correct it within this factor."""


class Curve:
    """What a round takes, milliseconds, by streams and rows."""

    def __init__(self, points: dict[int, dict[int, float]], windows: tuple[int, ...] = ()):
        """`points`: of each number of streams, rows -> milliseconds; rows from one a stream on. `windows`: the device
        computes as many rows of every stream, the first of these numbers that holds the longest window; none: as many
        as there are."""
        self.windows = windows
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
        self._serials: dict[int, float] = {}
        self._extras: dict[tuple[int, bytes], np.ndarray] = {}
        self._rounds, self._last = 0, defaultdict(int)
        self._ratios: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    @classmethod
    def timed(cls, time_round: Callable[[int, int], float], windows: tuple[int, ...] = ()) -> Curve:
        """`time_round(streams, rows)` runs a round, its rows spread evenly, and says what it took, milliseconds."""
        time_round(1, 2)
        alone, left = timed(time_round, *ONE, ENOUGH)
        points = {ONE[0]: alone}
        if left >= 0:
            streams, rows = MANY if alone[8] < CHEAP * alone[1] else FEW
            points[streams], _ = timed(time_round, streams, rows, left)
        return cls(points, windows)

    def rows(self, kept: list[int]) -> int:
        """Rows that are computed where of each stream so many guesses are kept."""
        if not self.windows:
            return len(kept) + sum(kept)
        return len(kept) * next(window for window in self.windows if window > max(kept))

    def serial(self, streams: int) -> float:
        """A round of one row a stream."""
        if streams not in self._serials:
            one = len(self._serial) == 1
            self._serials[streams] = self._serial[0] if one else float(beyond(streams, self._streams, self._serial))
        return self._scale(0, streams) * self._serials[streams]

    def extra(self, streams: int, rows: np.ndarray) -> np.ndarray:
        """What so many rows more than one a stream add; [len(rows)]."""
        sizes = self._sizes(streams, rows).tolist()
        scales = {size: self._scale(size, streams) for size in set(sizes)}
        return np.array([scales[size] for size in sizes]) * self._timed(streams, rows)

    def _timed(self, streams: int, rows: np.ndarray) -> np.ndarray:
        """`extra` by the timing alone. The same few are asked for round after round."""
        key = streams, rows.tobytes()
        if key not in self._extras:
            known = np.array([beyond(rows, *one) for one in self._extra])
            between = [float(np.interp(streams, self._streams, row)) for row in np.eye(len(known))]
            self._extras[key] = np.array(between) @ known
        return self._extras[key]

    def learn(self, streams: int, rows: int, ms: float) -> None:
        """A round that computed so many rows of so many streams took so long."""
        size, serial = self._sizes(streams, rows - streams), self.serial(streams)
        known = float(self.extra(streams, np.array([rows - streams]))[0]) if size else serial
        took = ms - serial if size else ms
        self._rounds += 1
        self._last[size, crowd(streams)] = self._rounds
        self._ratios[size, crowd(streams)].append(took * self._scale(size, streams) / max(known, 1e-6))

    def _sizes(self, streams: int, rows: np.ndarray | int) -> np.ndarray | int:
        """Which rounds are corrected together, by their rows more than one a stream: 0 without any, 1 with some; by
        window where there are windows."""
        return -(-rows // streams) if self.windows else (rows > 0) * 1

    def _scale(self, size: int, streams: int) -> float:
        """The median of what recent rounds took over what the timing at load said: rounds of about so many streams, or
        before there are any, of the next numbers up and down."""
        about = crowd(streams)
        for crowds in ((about,), (about - 1, about + 1)):
            ratios = [ratio for one in crowds for ratio in self._recent(size, one)]
            if len(ratios) >= AT_LEAST:
                return min(max(median(ratios), 1 / WITHIN), WITHIN)
        return 1.0

    def _recent(self, size: int, about: int) -> Iterable[float]:
        return self._ratios[size, about] if self._rounds - self._last[size, about] < LATELY else ()


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

    A choice of guesses gives E = streams + Σ chances tokens and takes C. In the long run the best is the largest
    E - r C, where r is the best rate to be had: of rounds like this one, whose drafts take `drafting_ms` besides, or of
    rounds without drafts.
    """
    if curve is None:
        return Share([len(draft.ids) for draft in drafts])
    streams, serial = len(drafts), curve.serial(len(drafts))
    if not any(draft.ids for draft in drafts):
        return Share([0] * streams, serial, serial)
    rows, gained, kept = by_window(drafts, curve.windows) if curve.windows else by_guess(drafts)
    best, takes = most(streams, rows, gained, curve, drafting_ms)
    return Share(kept(best), serial, takes)


def window(streams: int, gained: np.ndarray, curve: Curve, drafting_ms: float) -> int:
    """The place, among the curve's windows, of the one that makes the most of a round. gained [windows]: tokens that
    its guesses give in each, of all streams together."""
    return most(streams, streams * (np.array(curve.windows) - 1), gained, curve, drafting_ms)[0]


def most(streams: int, rows: np.ndarray, gained: np.ndarray, curve: Curve, drafting_ms: float) -> tuple[int, float]:
    """The best of several choices, and what it takes, milliseconds. rows: more than one a stream; gained: Σ chances."""
    serial = curve.serial(streams)
    tokens, takes = streams + gained, serial + curve.extra(streams, rows)
    rate = max(float((tokens / (takes + drafting_ms)).max()), streams / serial)
    best = int(np.argmax(tokens - rate * takes))
    return best, float(takes[best])


def planned(kept: list[int], curve: Curve | None, rows: int) -> Share:
    """The share of a round that was begun with so many rows in all, of each draft the first so many guesses."""
    if curve is None:
        return Share(kept)
    streams, serial = len(kept), curve.serial(len(kept))
    return Share(kept, serial, serial + float(curve.extra(streams, np.array([rows - streams]))[0]))


Choices = tuple[np.ndarray, np.ndarray, Callable[[int], list[int]]]
"""Rows more than one a stream, Σ chances, and of each draft the guesses kept; by number."""


def by_guess(drafts: list[Draft]) -> Choices:
    """Every row takes its time: the n likeliest guesses of all. Of each draft a first part is kept, so parents come
    with their children: no guess is valued above those before it."""
    lines = [[(-chance, i) for chance in accumulate(draft.chances, min)] for i, draft in enumerate(drafts)]
    order = list(heapq.merge(*lines))
    places = np.array([i for _, i in order])
    gained = np.cumsum([0.0] + [-chance for chance, _ in order])
    return np.arange(len(order) + 1), gained, lambda n: np.bincount(places[:n], minlength=len(drafts)).tolist()


def by_window(drafts: list[Draft], windows: tuple[int, ...]) -> Choices:
    """Every stream's window takes the time of the longest: what fits into each size of window."""
    gained = [sum(sum(draft.chances[: window - 1]) for draft in drafts) for window in windows]
    rows = len(drafts) * (np.array(windows) - 1)
    return rows, np.array(gained), lambda n: [min(len(draft.ids), windows[n] - 1) for draft in drafts]


SORTS = 12
"""Chances are told apart in so many steps."""
TRUST, WHOLE, DOUBT = 8.0, 4.0, 0.75
"""The drafter's own word counts as so many guesses of its sort; all its words as so many promised ones, of which that
part came true, so that a trial is cheap."""
FADE, STALE = 0.998, 0.125
"""What is left of the record with each draft that is learnt from, half after 350; and when drafts pause, for it will be
old when they go on."""


class Calibration:
    """How far a drafter's chances can be trusted, learnt from what was accepted.

    A guess behind an accepted one has a chance of its own: its path's over its parent's. Of the guesses of about one
    such chance, the share that was accepted is counted, beside the drafter's own word, which is itself worth what all
    its guesses together showed; a path's corrected chance is the product along it. What is cut is never seen, so the
    record fades and a doubted guess is tried again.
    """

    def __init__(self):
        self._right, self._tried, self._promised = [0.0] * SORTS, [0.0] * SORTS, 0.0

    def corrected(self, draft: Draft) -> Draft:
        chances, own = [], self._own(draft)
        whole = (sum(self._right) + DOUBT * WHOLE) / (self._promised + WHOLE)
        for parent, p in zip(draft.parents, own):
            at = sort(p)
            q = (self._right[at] + TRUST * min(p * whole, 1.0)) / (self._tried[at] + TRUST)
            chances.append(min(q, 1.0) * (chances[parent - 1] if parent else 1.0))
        return draft._replace(chances=chances)

    def learn(self, draft: Draft, kept: int, rows: list[int]) -> None:
        """Of a draft as it came from the drafter, the first `kept` guesses were verified; `rows` were walked."""
        self.fade(FADE)
        walked = set(rows)
        for row, (parent, p) in enumerate(zip(draft.parents[:kept], self._own(draft)), 1):
            if parent in walked:
                self._promised += p
                self._tried[sort(p)] += 1
                self._right[sort(p)] += row in walked

    def fade(self, left: float) -> None:
        """So much is left of the record."""
        self._right = [left * right for right in self._right]
        self._tried = [left * tried for tried in self._tried]
        self._promised *= left

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


LOSS, AGAIN, TRIES = 1.0, 0.35, 2
"""What drafts may lose before they pause, in rounds without any: at first, and after a pause; and how many of them must
have been made since, for one alone may be out of luck."""
DEAR, SURE = 1.5, 4
"""At first they may lose so much before so many have been made: dear drafts lose a round by a few, which prove little.
"""
LUCK = 0.5
"""Of the first loss so much is put down to bad luck, and not made good by the pause."""
SPEND, LONGEST = 0.008, 512
"""The part of the time that drafts which do not pay may take: what was lost, over it, is the pause, rounds; at most
LONGEST."""
CREDIT, START = 8.0, 1.0
"""What a reply's drafts have gained is held against its later losses up to so much; and against those of the next
reply, which may begin worse than it goes on, up to so much."""


class Worth:
    """Whether drafts of one kind pay for their making, with about so many streams.

    What each round's drafts gained or lost adds up. When they have lost the time of a round, none are made until the
    loss is a small part of the rounds; then they may lose a third of a round before the next pause. All streams pause
    and try again together, since a draft for one takes nearly the time of drafts for all, and every stream waits for
    it. Pauses do not grow: replies differ, and the next may be one that drafts are good for.
    """

    def __init__(self):
        self.balance, self.paused, self._made, self._first = 0.0, 0, 0, True

    def begin(self) -> None:
        """A reply begins: what others have gained counts for little."""
        self.balance = min(self.balance, START)

    def rests(self) -> bool:
        """Whether this round goes without; counts it."""
        self.paused -= self.paused > 0
        return self.paused > 0

    @property
    def resting(self) -> bool:
        """Whether the next round goes without."""
        return self.paused > 1

    def learn(self, gain: float, made: int) -> None:
        """So many drafts, made for one round, gained so much; in rounds without any."""
        if self.resting:  # that one was under way when the pause began, which its loss makes longer
            self.paused = min(self.paused + math.ceil(max(-gain, 0.0) / SPEND), LONGEST)
            return
        self.balance, self._made = min(self.balance + gain, CREDIT), self._made + made
        if self.balance < -self._limit and self._made >= TRIES:
            lost = -self.balance - (LUCK if self._first else 0.0)
            self.paused = min(math.ceil(lost / SPEND), LONGEST)
            self.balance, self._made, self._first = 0.0, 0, False

    @property
    def _limit(self) -> float:
        """What drafts may lose now."""
        if not self._first:
            return AGAIN
        return LOSS if self._made >= SURE else DEAR


def gain(accepted: int, kept: int, shared: Share, drafts: list[int], drafting_ms: float) -> float:
    """What some streams' drafts gained, tokens more than rounds without any give in their time: what was accepted, less
    that of their part of the rows (by guesses kept; `drafts`: of all streams) and of the drafting (`drafting_ms`: their
    own part)."""
    if shared.serial_ms is None or shared.planned_ms is None:
        return 0.0
    rows = kept * (shared.planned_ms - shared.serial_ms) / max(sum(drafts), 1)
    return accepted - (rows + drafting_ms) * len(drafts) / shared.serial_ms
