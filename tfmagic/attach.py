"""Finding the resident engine, or starting it, and waiting until it is ready."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from . import protocol
from .connection import Connection, died
from .engine.resident import launch, place
from .errors import EngineDied, TfmagicError
from .protocol import State

ANSWER = 15.0
"""Seconds that the engine has to answer a question about itself."""
LEAVE = 3.0
"""Seconds that a stopping engine has to be gone."""


def attach(where: place.Place, wish: dict, start: bool, ready: bool, progress: Callable[[str], None]) -> Connection:
    """Find the engine, or start it; if `ready`, wait until it is.

    `wish`: model, device and settings asked for, by name. An engine that goes away meanwhile, as when it has been idle
    for long, is followed by a fresh one, once.
    """
    try:
        return _attach(where, wish, start, ready, progress)
    except EngineDied:
        if not start:
            raise
    deadline = time.monotonic() + LEAVE
    while where.engine() is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    return _attach(where, wish, start, ready, progress)


def _attach(where: place.Place, wish: dict, start: bool, ready: bool, progress: Callable[[str], None]) -> Connection:
    pid = where.engine()
    if pid is None:
        if not start:
            raise TfmagicError("No engine is running.", "Start one: %tfold start, or tfmagic start")
        progress("starting the engine")
        launch.launch(where, [flag(name, value) for name, value in wish.items() if value is not None])
        pid = where.engine()
    info = _info(where, pid)
    if info.protocol != protocol.VERSION:
        raise TfmagicError(
            f"The running engine is of tfmagic {info.package}, which speaks another protocol ({info.protocol}).",
            "Restart the engine: %tfold restart",
        )
    connection = Connection(where, info.pid)
    try:
        if ready:
            _wait_ready(connection, progress)
        _check_wish(wish, info, ask(connection))
    except BaseException:
        connection.close()
        raise
    return connection


def _info(where: place.Place, pid: int | None) -> place.Info:
    """`engine.json` of the engine that lives; it comes within moments of the lock."""
    deadline = time.monotonic() + ANSWER
    while time.monotonic() < deadline:
        info = where.read()
        if info is not None and info.pid == pid and where.engine() == pid:
            return info
        if where.engine() != pid or pid is None:
            raise died(where, pid or 0)
        time.sleep(0.005)
    raise TfmagicError(f"The engine (process {pid}) does not come up.", "End it: tfmagic stop. Its log: tfmagic logs")


def _wait_ready(connection: Connection, progress: Callable[[str], None]) -> None:
    states: deque[State] = deque()
    connection.listener = states.append
    states.append(ask(connection))
    while True:
        connection.wait_for(lambda: states)
        state = states.popleft()
        if state.phase == "ready":
            connection.listener = None
            return
        if state.phase == "stopping":
            raise EngineDied("The engine is stopping.", "Connect again when it is gone.")
        progress(state.detail)


def ask(connection: Connection) -> State:
    """The engine's own state. Raises TfmagicError when it does not answer."""
    return connection.call(lambda call: protocol.Ask(call), ANSWER).reply


def _check_wish(wish: dict, info: place.Info, state: State) -> None:
    """One engine at a time: what is asked for has to be what runs. None, and the device auto, ask for nothing."""
    runs = {name: (value,) for name, value in info.settings.items()}
    runs |= {"model": (state.model, info.model or "embedded"), "device": (state.device, info.device, "auto")}
    runs["drafter"] = (info.settings.get("drafter"), "none" if state.drafter == "none" else None)
    for name, value in wish.items():
        if value is not None and value not in runs.get(name, ()):
            has = runs.get(name, (None,))[0]
            raise TfmagicError(
                f"The running engine has {name.replace('_', ' ')} {has}, not {value}.",
                "Restart it with what you want: %tfold restart MODEL, or tfmagic.connect(..., restart=True)",
            )


def flag(name: str, value) -> str:
    """An option as the command line of the engine's process spells it."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def absolute(model: str | os.PathLike | None) -> str | None:
    """A folder's path in full, because the engine has another current directory; any other name as it is."""
    if model is None:
        return None
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() or isinstance(model, os.PathLike) else str(model)
