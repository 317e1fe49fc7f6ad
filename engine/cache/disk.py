"""Kept states on disk: written by one thread behind the engine's back, found again by what their rows say.

A file's name is the digest of its rows' key; its namespace is the digest of everything else that could change a bit
(`namespace`). What goes wrong costs a cold pass and a line in the log, never a turn and never a wrong bit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from . import namespace, segments
from .directory import Directory, File, prepare
from .key import prefixes
from .segments import Damaged
from .store import Kept, size

GIB = 1 << 30
QUEUE = GIB
"""Bytes of states that may wait for the writer; one state alone always may."""
PATIENCE = 2.0
"""Seconds that the writer lets a state wait for the runs to end."""
LETTING_GO = 10.0
"""Seconds that a clear waits for the state that is being written; one that takes longer goes when it is."""


@dataclass(frozen=True)
class Limits:
    """Bytes."""

    learned: int | None = 32 << 30
    """What states of conversations may take together, over all models and builds; None: none are written."""
    spilled: int | None = None
    """The same for states that memory had no room for."""
    free: int = 4 << 30
    """What is left free on the disk."""
    daily: int | None = None
    """What may be written a day."""

    def of(self, kind: str) -> int | None:
        return self.learned if kind == "learned" else self.spilled


@dataclass
class Counts:
    written: int = 0
    bytes_written: int = 0
    read: int = 0
    skipped: int = 0
    """States that were not written: too many waited, or a limit was reached."""
    failed: int = 0
    """States that could not be written or read."""
    damaged: int = 0
    """Files that were dropped because they were not what was written."""
    removed: int = 0
    """States removed to make room."""


class Waiting(NamedTuple):
    """A state on its way to the writer."""

    kept: Kept
    kind: str
    epoch: int
    """It is void when everything was cleared since."""
    since: float
    """`time.monotonic()`."""


class Disk:
    """`find`, `offer`, `evicted`, `forget`, `working` are for the engine thread and never wait for the writer."""

    def __init__(
        self, base: Path, facts: Mapping[str, str], grain: int, limits: Limits, tell: Callable[[str], None] = print
    ):
        """`tell` takes a line for the log. Raises Refusal when `base` is not a private directory of this user."""
        self.base, self.limits, self.grain, self.counts = base, limits, grain, Counts()
        self.namespace = namespace.name(facts)
        self.directory: Directory | None = None
        self._tell, self._told = tell, ""
        self._lock = threading.Condition()
        self._queue: OrderedDict[bytes, Waiting] = OrderedDict()
        self._queued, self._epoch, self._writing, self._closed = 0, 0, False, False
        self._quiet = threading.Event()
        try:
            self.directory = Directory(prepare(base), self.namespace, facts)
        except OSError as error:
            self._say(f"cannot be kept in {base}: {reason(error)}; prompts are computed afresh after a restart")
            return
        self._writer = threading.Thread(target=self._run, name="states", daemon=True)
        self._writer.start()

    # The engine thread -----------------------------------------------------------------------------

    def find(self, digests: Sequence[bytes], key: Sequence[int], above: int = 0) -> Kept | None:
        """The longest state of more than `above` rows that a prompt of this key may start from.

        `digests`: `prefixes(key[:-1], grain)`.
        """
        if not self._reachable():
            return None
        for i in reversed(range(above // self.grain, len(digests))):
            rows = (i + 1) * self.grain
            if kept := self._waiting(digests[i], key[:rows]):
                return kept
            name = self.directory.look(digests[i].hex(), rows)
            if name and (kept := self._read(name, tuple(key[:rows]))):
                return kept
        return None

    def offer(self, digest: bytes, kept: Kept) -> None:
        """A state of a conversation. `digest`: of its whole key, the last of its `prefixes`."""
        self._put("learned", digest, kept)

    def evicted(self, digest: bytes, kept: Kept) -> None:
        """A state that memory has no room for any more."""
        self._put("spilled", digest, kept)

    def forget(self, digest: bytes, kept: Kept) -> None:
        """A state that the model did not take back."""
        if self._reachable() and (name := self.directory.look(digest.hex(), kept.at)):
            self._drop(name, "the model does not take it")

    def working(self, busy: bool) -> None:
        """Whether runs go on. The writer waits for them to end, so that a turn does not share the processor with the
        state that it saves; but it does not wait for long."""
        self._quiet.clear() if busy else self._quiet.set()

    def _waiting(self, digest: bytes, key: Sequence[int]) -> Kept | None:
        """A state that memory had no room for and that is not written yet."""
        item = self._queue.get(digest)
        return item.kept if item and item.epoch == self._epoch and item.kept.key == tuple(key) else None

    def _reachable(self) -> bool:
        if self.directory is None:
            return False
        if not self.directory.attached():
            self._say(f"are out of reach: {self.directory.path} is gone; prompts are computed afresh")
            return False
        return True

    def _read(self, name: str, key: tuple[int, ...]) -> Kept | None:
        fd = None
        try:
            fd = self.directory.open(name)
            reader = segments.Reader(fd, self.namespace)
            if reader.header.at != len(key) or reader.key() != key:
                raise Damaged("its rows are not those of its name")
            tensors = reader.tensors()
        except FileNotFoundError:  # another engine needed its room
            return None
        except Damaged as damage:
            self._drop(name, str(damage))
            return None
        except (OSError, MemoryError) as error:
            self._fail(f"could not be read ({name}): {reason(error)}")
            return None
        finally:
            if fd is not None:
                os.close(fd)
        self.directory.used(name)
        self.counts.read += 1
        label, made = reader.header.label, reader.header.made
        return Kept(len(key), key, tensors, size(tensors, len(key)), label=label, made=made, source="disk")

    def _drop(self, name: str, why: str) -> None:
        self.counts.damaged += 1
        self._say(f"lose {name}: {why}; the prompt is computed afresh")
        try:
            self.directory.remove(name)
        except OSError as error:
            self._fail(f"could not be removed ({name}): {reason(error)}")

    def _put(self, kind: str, digest: bytes, kept: Kept) -> None:
        if self.directory is None or self.limits.of(kind) is None or self.directory.look(digest.hex(), kept.at):
            return
        with self._lock:
            if digest in self._queue or self._closed:
                return
            if self._queue and self._queued + kept.bytes > QUEUE:
                self.counts.skipped += 1
                return
            self._queue[digest] = Waiting(kept, kind, self._epoch, time.monotonic())
            self._queued += kept.bytes
            self._quiet.clear()
            self._lock.notify_all()

    # Any thread ------------------------------------------------------------------------------------

    def flush(self, seconds: float) -> bool:
        """Have everything written now, or given up, and wait for it; False: it took longer."""
        self._quiet.set()
        with self._lock:
            return self._lock.wait_for(lambda: not self._queue, seconds)

    def close(self, seconds: float) -> None:
        """Take nothing more and finish what waits, for at most `seconds`."""
        with self._lock:
            self._closed = True
            self._quiet.set()
            self._lock.notify_all()
        if self.directory is not None:
            self._writer.join(seconds)

    def held(self) -> list[File]:
        """The states of this model and build, most recently used first."""
        if self.directory is None:
            return []
        return sorted(self.directory.files(self.directory.path), key=lambda file: file.used, reverse=True)

    def label(self, file: File) -> str:
        """Whose state a file of `held` is, in words; "" when it cannot be told."""
        with contextlib.suppress(OSError, Damaged):
            fd = self.directory.open(file.path.name)
            try:
                return segments.Reader(fd, self.namespace).header.label
            finally:
                os.close(fd)
        return ""

    def clear(self) -> int:
        """Remove the states of all models and builds, and forget those that wait: how many files. Raises OSError."""
        if self.directory is None:
            return 0
        with self._lock:
            self._epoch += 1
            self._lock.wait_for(lambda: not self._writing, LETTING_GO)
        return self.directory.clear()

    # The writer ------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._tidy()
        while self._step():
            pass

    def _step(self) -> bool:
        """Write the next state. False: it is over."""
        with self._lock:
            self._lock.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return False
            digest, item = next(iter(self._queue.items()))
        self._quiet.wait(item.since + PATIENCE - time.monotonic())
        try:
            self._write(digest, item)
        except OSError as error:
            self._fail(f"could not be written: {reason(error)}")
        except Exception as error:  # the thread has to live
            traceback.print_exc()
            self._fail(f"could not be written: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                del self._queue[digest]
                self._queued -= item.kept.bytes
                self._writing = False
                self._lock.notify_all()
        return True

    def _tidy(self) -> None:
        try:
            parts, stale = self.directory.start()
        except OSError as error:
            self._fail(f"cannot be written to {self.directory.path}: {reason(error)}")
        else:
            if parts or stale:
                self._say(f"tidied: {parts} unfinished files and {stale} directories of other builds removed")

    def _write(self, digest: bytes, item: Waiting) -> None:
        kept, kind, epoch, _ = item
        if not self._reachable():
            return
        with self._lock:
            if epoch != self._epoch:
                return
            self._writing = True
        room = segments.room(kept.key, kept.tensors)
        if why := self._objection(kind, room):
            self.counts.skipped += 1
            return self._say(f"are not written: {why}")
        name = f"{digest.hex()}-{kept.at}.{kind}"
        self.counts.bytes_written += self.directory.write(name, self._pack(kept))
        self.counts.written += 1
        self._told = ""
        if epoch != self._epoch:  # cleared meanwhile
            return self.directory.remove(name)
        for i, shorter in enumerate(prefixes(kept.key, self.grain)[:-1]):
            if held := self.directory.look(shorter.hex(), (i + 1) * self.grain):
                self.directory.used(held, superseded=True)

    def _pack(self, kept: Kept) -> Iterator[memoryview]:
        return segments.pack(self.namespace, kept.key, kept.tensors, kept.made, kept.label)

    def _objection(self, kind: str, room: int) -> str | None:
        """Why this much may not be written, or None; makes room within the kind's limit."""
        limits, directory = self.limits, self.directory
        if room > limits.of(kind):
            return f"one of {room / GIB:.2f} GiB is over the limit of {limits.of(kind) / GIB:g} GiB"
        if (free := directory.free()) - room < limits.free:
            return f"the disk has {free / GIB:.2f} GiB free, of which {limits.free / GIB:g} are to stay free"
        if limits.daily is not None and not directory.spend(room, limits.daily):
            return f"the limit of {limits.daily / GIB:g} GiB a day is reached"
        self.counts.removed += directory.make_room(kind, room, limits.of(kind))
        return None

    def _fail(self, text: str) -> None:
        self.counts.failed += 1
        self._say(text)

    def _say(self, text: str) -> None:
        """A line for the log, once until something goes well again."""
        if text != self._told:
            self._told = text
            self._tell(f"states on disk {text}")


def reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
