"""How long a start takes, in processes of their own: `python -m tests.bench.start [--model 4b] [--folder DIR]`.

A checkpoint of that size is written to DIR. The first start finds no kernel built; the second those that the first has
left. Of each: until the weights are read, until the engine is ready, and a first reply behind that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from .checkpoints import SIZES, write


def start(folder: str, device: str) -> None:
    """One start, in this process, from its very beginning."""
    began = psutil.Process().create_time()
    from tfmagic.engine.open import Settings
    from tfmagic.engine.open import open as open_model

    from .engine import run

    marks: dict[str, float] = {}

    def progress(what: str) -> None:
        marks[what.split(":")[0].split(" of ")[0]] = now = time.time() - began
        print(f"  {now:6.1f} s: {what}", flush=True)

    opened = open_model(folder, device, Settings(form="bf16", drafter="none"), lambda event: None, progress)
    ready = time.time() - began
    for tokens in (4, 64):
        run(opened, "Hello!", max_tokens=tokens, temperature=0.0)
    first = time.time() - began - ready
    read = marks.get("memory", ready)
    print(f"ready after {ready:.1f} s: weights read after {read:.1f}, {ready - read:.1f} behind; replies {first:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="4b")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.start:
        return start(o.start, o.device)
    with tempfile.TemporaryDirectory() as temporary:
        place = (o.folder or Path(temporary)) / o.model
        if not (place / "model.safetensors.index.json").is_file():
            began = time.perf_counter()
            size = write(place, SIZES[o.model], device=o.device)
            print(f"{size / 1e9:.2f} GB written in {time.perf_counter() - began:.1f} s", flush=True)
        command = [sys.executable, "-m", __spec__.name, "--device", o.device, "--start", str(place)]
        for what in ("nothing built", "again"):
            variables = os.environ | {"TRITON_CACHE_DIR": str(Path(temporary) / "kernels")}
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables).stdout
            print(f"{said}| {o.model} | start, {what} | {said.splitlines()[-1]} | |", flush=True)


if __name__ == "__main__":
    main()
