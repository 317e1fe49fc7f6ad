"""The runtime directory: private files, and locks as the truth about who is alive.

An engine holds a POSIX record lock on `engine.lock` for life; a client holds one on a file of its connection's name.
The kernel gives a lock back when its process ends, however it ends, and keeps it while the process is stopped or busy,
so a probe (`F_GETLK`, which takes nothing) is never wrong and needs no heartbeat. One caveat of such locks shapes the
code: closing any descriptor of the file within the holder drops the lock, so a holder opens its file once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...errors import TfmagicError

PATH_LIMIT = 100
"""Bytes of the socket's path; the system's own limit is 104 to 108."""
CLIENT = re.compile(r"client-[0-9]{1,10}-[0-9a-f]{8}")
"""The name of a connection: its ZeroMQ routing id and its lock file."""
_FLOCK, _KIND, _PID = ("qqihh", 3, 2) if sys.platform == "darwin" else ("hhqqi4x", 0, 4)
"""The system's `struct flock`, and where in it the kind of lock and its holder stand."""


class Failure(msgspec.Struct):
    problem: str
    fix: str


class Info(msgspec.Struct):
    """`engine.json`: who the engine is. Written once its socket is bound, and again when it fails."""

    pid: int
    started: float
    protocol: int
    package: str
    model: str | None
    """As asked for; None: the model that ships."""
    device: str
    settings: dict[str, bool | float | int | str | None]
    failure: Failure | None = None
    """Why it ended, when it could not go on."""


@dataclass(frozen=True)
class Place:
    """One runtime directory, and with it one engine."""

    path: Path

    @property
    def lock(self) -> Path:
        return self.path / "engine.lock"

    @property
    def socket(self) -> Path:
        return self.path / "engine.sock"

    @property
    def info(self) -> Path:
        return self.path / "engine.json"

    @property
    def log(self) -> Path:
        return self.path / "engine.log"

    def engine(self) -> int | None:
        """The process id of the living engine, or None."""
        return holder(self.lock)

    def read(self) -> Info | None:
        """What `engine.json` says, or None when there is none that can be read."""
        try:
            return msgspec.json.decode(self.info.read_bytes(), type=Info)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, info: Info) -> None:
        """Atomic, mode 0600."""
        draft = self.path / f"engine.json.{os.getpid()}"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(msgspec.json.encode(info))
        os.replace(draft, self.info)

    def clean(self) -> None:
        """Remove what only a living engine needs. For the engine itself, at its start and at its end."""
        for path in (self.socket, self.info, *self.path.glob("client-*"), *self.path.glob("engine.json.*")):
            with contextlib.suppress(OSError):
                path.unlink()

    def touch(self) -> None:
        """Now and then, lest a cleaner of /tmp take the living engine's files for forgotten ones."""
        for path in (self.lock, self.info, self.socket):
            with contextlib.suppress(OSError):
                os.utime(path)

    def tail(self, lines: int = 15, size: int = 4096) -> list[str]:
        """The last lines of the log, from its last `size` bytes."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - size))
                return file.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Held by the one client that starts an engine: a lock on the directory itself, so no file is left."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def take(path: Path) -> int | None:
    """Hold `path` for this process. The descriptor keeps the lock and is to be kept; None: another process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def holder(path: Path) -> int | None:
    """The process id that holds `path`, or None. Never to be called by the holder: closing would drop its lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        ask = [0] * 5
        ask[_KIND] = fcntl.F_WRLCK
        answer = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack(_FLOCK, *ask)))
        return None if answer[_KIND] == fcntl.F_UNLCK else answer[_PID]
    finally:
        os.close(fd)


def find() -> Place:
    """This user's runtime directory, made when it is missing.

    `$TFMAGIC_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/tfmagic` when that is ours and private, else `/tmp/tfmagic-<uid>`.
    Raises TfmagicError when it is not a private directory of ours, or its path is too long for a socket.
    """
    place = Place(candidates()[0])
    if len(os.fsencode(place.socket)) > PATH_LIMIT:
        raise TfmagicError(
            f"The runtime directory's path is too long for a socket: {place.path}",
            f"Set TFMAGIC_RUNTIME_DIR to a path of at most {PATH_LIMIT - len('/engine.sock')} bytes.",
        )
    try:
        place.path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise TfmagicError(
            f"The runtime directory {place.path} cannot be made: {error.strerror}.",
            "Set TFMAGIC_RUNTIME_DIR to a directory that you may write, on a local disk.",
        ) from None
    if why := objection(place.path):
        raise TfmagicError(
            f"The runtime directory {place.path} is not safe to use: {why}.",
            f"Make it private (chmod 700 {place.path}), or set TFMAGIC_RUNTIME_DIR to a directory that is yours.",
        )
    return place


def candidates() -> list[Path]:
    """Where an engine of this user may live; the first is where a new one is started."""
    paths = [Path(f"/tmp/tfmagic-{os.getuid()}")]
    if (base := os.environ.get("XDG_RUNTIME_DIR")) and not objection(Path(base)):
        path = Path(base).absolute() / "tfmagic"
        if len(os.fsencode(path / "engine.sock")) <= PATH_LIMIT:
            paths.insert(0, path)
    if own := os.environ.get("TFMAGIC_RUNTIME_DIR"):
        paths.insert(0, Path(own).expanduser().absolute())
    return paths


def objection(path: Path) -> str | None:
    """Why `path` is not a private directory of ours, or None."""
    try:
        status = path.lstat()
    except OSError as error:
        return error.strerror or "it cannot be read"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory (a link does not count)"
    if status.st_uid != os.getuid():
        return f"it belongs to user id {status.st_uid}"
    if status.st_mode & 0o077:
        return f"others may use it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def finish(place: Place, grace: float = 3.0) -> bool:
    """End the engine that lives here, whatever its version: SIGTERM, then SIGKILL after `grace` seconds.

    True: there was one, and it is gone.
    """
    pid = place.engine()
    if not pid:
        return False
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + patience
        while (there := place.engine() == pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not there:
            return True
    raise TfmagicError(f"The engine (process {pid}) does not end.", f"End it by hand: kill -9 {pid}")
