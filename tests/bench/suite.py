"""All there is to run on a machine with a GPU, stage after stage, in one command that ends in time.

    python -m tests.bench.suite [STAGE ...] [--seconds 560] [--out DIR]

Every command of a stage is a process of its own with a limit of its own: one that fails, crashes or hangs costs its own
time, and the next one begins. What they print goes to DIR/suite.log (DIR: artifacts/suite), together with the tile
tables if they were rewritten. At the end stand what failed and every row that was measured, in a page or two.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
TILES = ROOT / "kernels" / "gpu" / "tiles.py"
SHOWN = 11_500
"""Characters of the summary."""
LEAST = 10.0
"""Seconds for which nothing is begun any more."""


@dataclass
class Command:
    argv: list[str]
    limit: float
    """Seconds."""


@dataclass
class Ended:
    """How a command went."""

    stage: str
    argv: list[str]
    how: str
    """In words; "well" where nothing is wrong."""
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)


def module(name: str, *options: str, limit: float) -> Command:
    return Command([sys.executable, "-m", name, *options], limit)


def tests(*paths: str, limit: float, workers: int = 12) -> Command:
    several = ["-n", str(workers)] if find_spec("xdist") else []  # kernels are then built by as many processes
    options = ["-q", "--tb=short", "-rfE", "--durations=6", "-p", "no:cacheprovider", "-p", "tests.gpu.isolation"]
    waits = ["-o", f"faulthandler_timeout={0.3 * limit:.0f}"]  # where a test hangs is told before it is ended
    waits += [f"--timeout={0.4 * limit:.0f}", "--timeout-method=thread"] if find_spec("pytest_timeout") else []
    return module("pytest", *options, *waits, *several, "-m", "gpu", *paths, limit=limit)


def bench(size: str, *options: str, limit: float) -> Command:
    return module("tests.bench.gpu", "--model", size, *options, limit=limit)


def stages() -> dict[str, list[Command]]:
    """In order, the most telling first."""
    tiles = "tests.bench.tiles"
    return {
        "machine": [Command(["nvidia-smi"], 20), Command([sys.executable, "-c", MACHINE], 60)],
        "kernels": [
            tests("tests/gpu/test_gpu_linear.py", "tests/gpu/test_gpu_attention.py", "tests/gpu/test_gpu_delta.py",
                  "tests/gpu/test_gpu_rows.py", limit=180),
        ],
        "engine": [
            tests("tests/gpu/test_gpu_engine.py", "tests/gpu/test_engine.py", "tests/drafting/test_gpu.py",
                  "tests/drafting/test_ahead.py", "tests/disk/test_gpu.py", "tests/checkpoint/test_reading.py",
                  "tests/gpu/test_kernels.py",
                  limit=240, workers=4),
        ],
        "sanitizer": [
            Command([*SANITIZER, "--tool", tool, sys.executable, "-m", "tests.gpu.sanitized"], 60)
            for tool in ("memcheck", "racecheck")
        ],
        "tiles": [
            module(tiles, "--only", "dense", "--models", "9b", "--seconds", "90", limit=120),
            module(tiles, "--only", "affine", "--models", "27b", "--seconds", "60", limit=90),
        ],
        "9b": [bench("9b", limit=150)],
        "4b": [bench("4b", limit=110)],
        "27b-4bit": [bench("27b", "--bits", "4", "--drafter-bits", "4", limit=180)],
        "drafter": [
            module("tests.bench.drafter", "--shape", "27b", "--device", "cuda:0", limit=60),
            module("tests.bench.drafter", "--shape", "27b", "--device", "cuda:0", "--bits", "4", limit=60),
        ],
        "9b-fp8": [bench("9b", "--kv", "fp8", "--parts", "decode,ttft,again,long", limit=100)],
        "start": [module("tests.bench.start", "--model", "4b", limit=150)],
        "mixers": [module("tests.bench.mixers", "--shapes", "9b", limit=90)],
        "27b": [bench("27b", "--parts", "decode,ttft,again,prefill,drafts", limit=200)],
        "9b-rest": [bench("9b", "--parts", "long", limit=80), bench("9b", "--bits", "4", limit=120)],
        "within": [
            module("tests.bench.within", "27b", "--bits", "4", "--seconds", "70", limit=90),
            module("tests.bench.within", "4b", "--seconds", "50", limit=70),
        ],
        "tiles-rest": [
            module(tiles, "--only", "dense", "--models", "4b", "--seconds", "60", limit=90),
            module(tiles, "--only", "dense", "--models", "27b", "--seconds", "70", limit=100),
        ],
        "profile": [bench("9b", "--parts", "kernels,rounds", limit=70)],
        "profile-4bit": [bench("27b", "--bits", "4", "--parts", "kernels,rounds", limit=70)],
        "shipped": [module("tests.bench.devices", "cuda:0", form, limit=60) for form in ("bf16", "exact")],
    }  # fmt: skip


SANITIZER = "compute-sanitizer", "--report-api-errors", "no", "--error-exitcode", "9"
MACHINE = """
import os, platform, torch, triton
print(platform.python_version(), "torch", torch.__version__, "triton", triton.__version__, os.cpu_count(), "processors")
print(torch.cuda.get_device_name(), torch.cuda.mem_get_info())
"""


def run(plan: dict[str, list[Command]], seconds: float, out: Path) -> list[Ended]:
    """Every command in turn, none begun that would have no time; returns how each went."""
    until, ended = time.monotonic() + seconds, []
    with (out / "suite.log").open("w") as log:
        for stage, commands in plan.items():
            for command in commands:
                left = until - time.monotonic()
                if left < LEAST:
                    ended.append(Ended(stage, command.argv, "not begun: no time was left"))
                    continue
                log.write(f"\n===== {stage}: {' '.join(command.argv)}\n")
                ended.append(one(stage, command, min(command.limit, left), log))
                said = ended[-1]
                log.write(f"===== {stage} ended {said.how} after {said.seconds:.0f} s\n")
                print(f"{stage}: {said.how}, {said.seconds:.0f} s", flush=True)
    return ended


def one(stage: str, command: Command, limit: float, log) -> Ended:
    began, start = time.monotonic(), log.tell()
    variables = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "400"}
    log.flush()
    try:
        process = subprocess.Popen(
            command.argv, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Ended(stage, command.argv, f"not begun: {error}")
    try:
        code = process.wait(limit)
        how = "well" if code == 0 else f"with exit code {code}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a process that waits for the device hears nothing else
        process.wait()
        how = f"stopped at its limit of {limit:.0f} s"
    log.seek(0, os.SEEK_END)
    text = Path(log.name).read_bytes()[start:].decode(errors="replace")
    return Ended(stage, command.argv, how, time.monotonic() - began, text.splitlines())


def summary(ended: Iterable[Ended], room: int = SHOWN) -> str:
    """What failed, then how each went and every row that was measured. Where there is too much of the first, each gets
    its share."""
    ended = list(ended)
    last = [f"{one.stage:10} {one.seconds:5.0f} s  {one.how}  {closing(one)}" for one in ended]
    last += [line for one in ended for line in one.lines if line.startswith("| ")]
    end = "\n".join(last)[-room:]
    wrong = [one for one in ended if one.how != "well" and one.lines]
    share = max(room - len(end), 0) // max(len(wrong), 1)
    parts = [f"----- {one.stage}: {' '.join(one.argv[1:])}\n{telling(one.lines, share - 120)}" for one in wrong]
    return "\n".join([*(part for part in parts if share > 300), "----- in all", end])


def closing(one: Ended) -> str:
    """pytest's count."""
    found = [line for line in one.lines if (" passed" in line or " failed" in line) and " in " in line]
    return found[-1].strip("= ") if found else ""


def telling(lines: list[str], room: int) -> str:
    """Of a log, what says most of a failure, and its end."""
    marks = ("FAILED", "ERROR", "E  ", "    not ", "    other bits")
    marked = [line[:1500] for line in lines if line.startswith(marks)]
    short = [line for line in marked if line.startswith(("FAILED", "ERROR"))] or marked
    text = "\n".join(short)[: 2 * room // 3] + "\n...\n"
    tail = "\n".join(line for line in lines if not line.startswith("| "))  # rows stand at the end
    return text + tail[-max(room - len(text), 1) :]


def main() -> None:
    plan = stages()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(plan)}; by default all")
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts" / "suite")
    o = parser.parse_args()
    if unknown := set(o.stages) - plan.keys():
        parser.error(f"there is no stage {', '.join(sorted(unknown))}; there are {', '.join(plan)}")
    o.out.mkdir(parents=True, exist_ok=True)
    before = TILES.read_bytes()
    ended = run({name: plan[name] for name in o.stages or plan}, o.seconds, o.out)
    if TILES.read_bytes() != before:
        shutil.copy(TILES, o.out / "tiles.py")
    print(summary(ended))
    sys.exit(any(one.how != "well" for one in ended))


if __name__ == "__main__":
    main()
