"""The directory of the states: namespaces, private files, atomic writes, and what is removed to stay within the limits.

    base/                     0700, of this user; all models and builds together
      daily.json              bytes written on this day
      MODEL-DIGEST/           one namespace
        facts.json            what its digest is of, for people
        DIGEST-ROWS.learned   a state kept for its conversation; .spilled: one that memory had no room for
        .NAME.*.part          a state that is being written, locked by its writer

A file's time of change tells when it was written, its time of access when it was used last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from tfmagic.errors import Refusal

from .segments import Damaged

KINDS = ("learned", "spilled")
NAME = re.compile(r"([0-9a-f]{32})-([0-9]{1,9})\.(learned|spilled)")
PART = re.compile(r"\..*\.part")
STALE = 7 * 86400
"""Seconds without use after which a namespace of the same model and device, but of another build, is removed."""
NEWBORN = 60.0
"""Seconds that an empty partial file is left alone."""
RECOUNT = 60.0
"""Seconds after which is looked again what other engines did."""
YEAR = 365 * 86400 * 10**9
"""Nanoseconds."""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NONBLOCK | FILE | getattr(os, "O_NOATIME", 0)
"""Looking at a file is no use of it."""


class File(NamedTuple):
    """A state file."""

    path: Path
    kind: str
    rows: int
    bytes: int
    written: int
    used: int
    """Unix times, nanoseconds."""


class Day(msgspec.Struct):
    day: str
    bytes: int


def default() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("tfmagic") / "states"


def prepare(base: Path) -> Path:
    """The base directory, made when it is missing. Raises Refusal when it is not private, OSError when it cannot be."""
    base = Path(os.path.realpath(base))
    base.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    status = base.lstat()
    fix = "Name another with --learn-dir; one that does not exist yet is made private."
    if not stat.S_ISDIR(status.st_mode):
        raise Refusal(f"{base}, where states are to be kept, is no directory.", fix)
    if status.st_uid != os.geteuid():
        raise Refusal(f"{base}, where states are to be kept, belongs to user id {status.st_uid}.", fix)
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise Refusal(f"Others may use {base}, where states are to be kept (mode {mode:04o}).", f"chmod 700 it. {fix}")
    return base


class Directory:
    """One namespace of a base directory, and the limits over all of them, which other engines' writes may pass for
    `RECOUNT` seconds."""

    def __init__(self, base: Path, namespace: str, facts: Mapping[str, str]):
        """Makes the namespace. Raises OSError."""
        self.base, self.path, self.namespace, self.facts = base, base / namespace, namespace, dict(facts)
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        self._held = self._hold()
        self._used: dict[str, int] = {}
        self._oldest: dict[str, deque[File]] = {}
        self._counted = -RECOUNT

    # Looking ---------------------------------------------------------------------------------------

    def look(self, digest: str, rows: int) -> str | None:
        """The name of that state's file, if there is one. One system call a kind: no list of names that could be old,
        and none to read when there are very many."""
        for kind in KINDS:
            name = f"{digest}-{rows}.{kind}"
            if os.access(name, os.F_OK, dir_fd=self._held, follow_symlinks=False):
                return name
        return None

    def open(self, name: str) -> int:
        """A descriptor to read. Raises OSError; Damaged when it is not a plain file of this user."""
        try:
            fd = os.open(name, READ, dir_fd=self._held)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Damaged("it is a link") from None
            raise
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return fd
        os.close(fd)
        raise Damaged("it is not a plain file of this user")

    def used(self, name: str, superseded: bool = False) -> None:
        """Note that a state was used just now; or that a longer one holds what it does, so that it goes first when room
        is needed, until it is used again."""
        with contextlib.suppress(OSError):
            written = os.stat(name, dir_fd=self._held, follow_symlinks=False).st_mtime_ns
            now = written - YEAR if superseded else time.time_ns()
            os.utime(name, ns=(now, written), dir_fd=self._held, follow_symlinks=False)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._held)

    def attached(self) -> bool:
        """Whether the namespace is still there. It is never made again, since it may be a disk that has gone; but it is
        taken up again when it has come back."""
        try:
            there, held = os.lstat(self.path), os.fstat(self._held)
            if (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
                self._held = self._hold()  # the old one stays open: another thread may be using it just now
        except OSError:
            return False
        return True

    def _hold(self) -> int:
        """A descriptor of the namespace, locked for life: no engine removes one that another uses. Raises OSError."""
        fd = os.open(self.path, DIRECTORY)
        if os.fstat(fd).st_uid != os.geteuid():
            os.close(fd)
            raise PermissionError(errno.EPERM, "it belongs to another user")
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def namespaces(self) -> list[Path]:
        with os.scandir(self.base) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]

    def files(self, namespace: Path) -> Iterator[File]:
        with contextlib.suppress(FileNotFoundError), os.scandir(namespace) as entries:
            for entry in entries:
                match = NAME.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        s = entry.stat(follow_symlinks=False)
                        path = Path(entry.path)
                        yield File(path, match[3], int(match[2]), s.st_size, s.st_mtime_ns, s.st_atime_ns)

    def all(self) -> Iterator[File]:
        """Every state of every namespace."""
        for namespace in self.namespaces():
            yield from self.files(namespace)

    # Writing ---------------------------------------------------------------------------------------

    def start(self) -> tuple[int, int]:
        """Write down the facts and remove what crashed writers and other builds left: (partial files, namespaces)."""
        self.write("facts.json", [msgspec.json.format(msgspec.json.encode(self.facts))])
        parts = sum(self._drop_parts(namespace) for namespace in self.namespaces())
        return parts, sum(self._drop_stale(path) for path in self.namespaces() if path != self.path)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> int:
        """A file by a temporary name that is renamed when all of it is on the disk: its bytes. Raises OSError."""
        part = f".{name}.{os.getpid()}-{secrets.token_hex(4)}.part"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE, 0o600, dir_fd=self._held)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # while it is held, the file is nobody's leftover
            size = sum(write_all(fd, piece) for piece in pieces)
            os.fsync(fd)
            os.rename(part, name, src_dir_fd=self._held, dst_dir_fd=self._held)
            os.fsync(self._held)
            return size
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=self._held)
            raise
        finally:
            os.close(fd)

    def clear(self) -> int:
        """Remove every state of every namespace: how many. Raises OSError."""
        files = list(self.all())
        for file in files:
            file.path.unlink(missing_ok=True)
        self._counted = -RECOUNT
        return len(files)

    # Limits ----------------------------------------------------------------------------------------

    def free(self) -> int:
        return shutil.disk_usage(self.base).free

    def spend(self, size: int, limit: int) -> bool:
        """Count `size` bytes into this day, over all engines of the directory; False: they would pass the limit."""
        fd = os.open(self.base / "daily.json", os.O_RDWR | os.O_CREAT | FILE, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            today = time.strftime("%Y-%m-%d")
            try:
                day = msgspec.json.decode(os.pread(fd, 4096, 0), type=Day)
            except (msgspec.DecodeError, UnicodeDecodeError):
                day = Day(today, 0)
            spent = size + (day.bytes if day.day == today else 0)
            if spent > limit:
                return False
            data = msgspec.json.encode(Day(today, spent))
            os.ftruncate(fd, os.pwrite(fd, data, 0))
            return True
        finally:
            os.close(fd)

    def make_room(self, kind: str, size: int, cap: int) -> int:
        """Remove the least recently used states of this kind, of any namespace, until `size` bytes (at most `cap`) more
        fit within `cap`: how many were removed."""
        if time.monotonic() - self._counted > RECOUNT:
            self._count()
        removed = 0
        while self._used.get(kind, 0) + size > cap:
            if oldest := self._oldest.get(kind):
                removed += self._remove(oldest.popleft())
            else:
                self._count()
        self._used[kind] = self._used.get(kind, 0) + size
        return removed

    def _count(self) -> None:
        self._counted, self._used, self._oldest = time.monotonic(), {}, {}
        for file in sorted(self.all(), key=lambda file: file.used):
            self._used[file.kind] = self._used.get(file.kind, 0) + file.bytes
            self._oldest.setdefault(file.kind, deque()).append(file)

    def _remove(self, file: File) -> bool:
        """Unless it was used since it was counted."""
        try:
            if file.path.lstat().st_atime_ns > file.used:
                return False
            file.path.unlink()
        except FileNotFoundError:
            return False
        self._used[file.kind] -= file.bytes
        return True

    def _drop_parts(self, namespace: Path) -> int:
        """Partial files whose writer is gone: a living one holds a lock, or has made the file just now."""
        dropped = 0
        for path in namespace.iterdir():
            if PART.fullmatch(path.name) and (fd := locked(path)) is not None:
                if not newborn(fd):
                    with contextlib.suppress(FileNotFoundError):
                        path.unlink()
                    dropped += 1
                os.close(fd)
        return dropped

    def _drop_stale(self, namespace: Path) -> bool:
        """A namespace of this model and device that another build left, unless it was used lately or is in use."""
        try:
            facts = msgspec.json.decode((namespace / "facts.json").read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return False
        if any(facts.get(name) != self.facts.get(name) for name in ("model", "device")):
            return False
        used = max([namespace.stat().st_mtime_ns, *(file.used for file in self.files(namespace))])
        fd = locked(namespace, DIRECTORY) if time.time_ns() - used > STALE * 10**9 else None
        if fd is None:
            return False
        shutil.rmtree(namespace, ignore_errors=True)
        os.close(fd)
        return True


def locked(path: Path, flags: int = os.O_RDONLY | FILE) -> int | None:
    """A descriptor that holds a lock on `path`; None when somebody else does, or it is not to be opened."""
    try:
        fd = os.open(path, flags)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def newborn(fd: int) -> bool:
    """Whether a partial file's writer may be about to lock it: nothing is written before that."""
    status = os.fstat(fd)
    return status.st_size == 0 and time.time() - status.st_mtime < NEWBORN


def write_all(fd: int, piece: bytes | memoryview) -> int:
    view, size = memoryview(piece), len(piece)
    while len(view):
        view = view[os.write(fd, view) :]
    return size
