"""`python -m tfmagic.engine.resident`: leave the caller's session, take the lock, serve."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ... import __version__
from .launch import HELD
from .place import Place, objection, take


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("tfmagic.engine.resident", description="The resident engine; clients start it.")
    p.add_argument("--runtime-dir", type=Path, required=True)
    p.add_argument("--model", help="a folder or a Hugging Face id; without it the model that ships")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    p.add_argument("--prompt-cache-gib", type=float, default=1.0)
    p.add_argument("--context", type=int, help="longest prompt and reply together, tokens")
    p.add_argument("--drafter", help="a folder, a Hugging Face id or none; without it the model's own, if it has one")
    p.add_argument("--drafter-bits", type=int, default=16, help="4: round the drafter's matrices to 4 bits")
    p.add_argument("--form", choices=("exact", "bf16"), help="the numeric form: exact is a CPU's own, bf16 a GPU's")
    p.add_argument("--kv-cache", choices=("bf16", "fp8"), default="bf16", help="what keys and values are held in")
    p.add_argument("--learn-conversations", action=argparse.BooleanOptionalAction, default=False)
    p.add_argument("--spill-gib", type=float, default=0.0, help="disk for states that memory has no room for")
    p.add_argument("--learn-dir", help="where states on disk are kept")
    p.add_argument("--learn-gib", type=float, default=32.0, help="disk for states of conversations")
    p.add_argument("--learn-min-free-gib", type=float, default=4.0, help="disk that is left free")
    p.add_argument("--learn-daily-gib", type=float, default=64.0, help="what may be written to disk a day")
    p.add_argument("--idle-minutes", type=float, default=60.0, help="end after this long without requests; 0: never")
    return p


def main(argv: list[str] | None = None, open: Callable | None = None) -> None:
    """Fork the engine; the launcher exits when the engine has its lock, or could not get it.

    `open`: what opens the model, as `worker.open_model`, which is the default.
    """
    options = parser().parse_args(argv)
    place = Place(options.runtime_dir.absolute())
    if why := objection(place.path):
        sys.exit(f"{place.path} is not safe to use: {why}.")
    os.umask(0o077)
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        sys.exit(int(os.read(ready, 1) or b"1"))
    os.close(ready)
    lock = take(place.lock)
    os.write(tell, b"0" if lock is not None else b"%d" % HELD)
    os.close(tell)
    if lock is None:
        os._exit(HELD)

    # Only now what takes time to import: clients see that an engine lives and wait for its socket.
    from .log import log
    from .server import Server
    from .worker import open_model

    faulthandler.enable(all_threads=False)
    sys.setswitchinterval(0.001)  # the socket loop is to answer even while the engine thread computes in Python
    log(f"tfmagic {__version__}, process {os.getpid()}, Python {sys.version.split()[0]}")
    code = Server(place, options, open or open_model).serve()
    os._exit(code)  # the engine thread may be deep in a kernel; nothing is left to give back


if __name__ == "__main__":
    main()
