"""Starting the resident process from a client: a launcher of its own session that forks the engine and ends.

A plain child of a Jupyter kernel dies when the kernel is interrupted or restarted; this one has neither the kernel's
process group nor its session nor its environment.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

import tfmagic

from ...errors import EngineFailed
from .place import Place

COMMAND = ["-m", "tfmagic.engine.resident"]
"""What the interpreter is told to run."""
HELD = 3
"""The launcher's exit status when another engine already holds the lock."""
_DROPPED = ("JPY_", "JUPYTER", "IPYTHON", "KERNEL_", "VSCODE_", "PYDEVD_")


def environment() -> dict[str, str]:
    """This process's environment without what belongs to its notebook, and so that this very package is imported."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(_DROPPED)}
    for key in ("PYTHONSTARTUP", "PYTHONINSPECT", "MPLBACKEND"):
        env.pop(key, None)
    root = str(Path(tfmagic.__file__).absolute().parent.parent)
    path = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    if root not in (site.getusersitepackages(), *site.getsitepackages()):  # else it would come before Python's own
        path.insert(0, root)
    return env | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def launch(place: Place, arguments: list[str]) -> None:
    """Start an engine here unless one lives; it holds its lock when this returns. Raises EngineFailed.

    `arguments`: as of `python -m tfmagic.engine.resident`.
    """
    with place.starting():
        if place.engine() is not None:
            return
        if place.log.exists() and place.log.stat().st_size:
            os.replace(place.log, place.log.with_suffix(".log.1"))
        log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            code = subprocess.Popen(
                [sys.executable, *COMMAND, "--runtime-dir", str(place.path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment(),
                start_new_session=True,
            ).wait()
        finally:
            os.close(log)
    if code not in (0, HELD):
        raise EngineFailed("The engine process could not be started.", last_words(place))


def last_words(place: Place) -> str:
    """Where to look, and the last lines of the log."""
    lines = place.tail()
    head = f"Its log ({place.log}) ends:" if lines else f"Its log is empty: {place.log}"
    return "\n".join([head, *("  " + line for line in lines)])
