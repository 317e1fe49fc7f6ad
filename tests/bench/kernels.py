"""Where the device's time goes in what a model runs, kernel by kernel."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

TIMES = 5
KINDS = "kernel", "gpu_memcpy", "gpu_memset"


class Part(NamedTuple):
    """Launches of one kernel with one grid, of one run."""

    name: str
    count: float
    us: float
    """From the end of the launch before to the end of this, each: what hides behind another costs nothing, and a gap
    is its own."""


def parts(run: Callable[[], object]) -> list[Part]:
    """What `run` spends on the device, the dearest first; the mean of a few runs."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(TIMES):
            run()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return summed(json.loads(file.read_text())["traceEvents"], TIMES)


def summed(events: list[dict], times: int) -> list[Part]:
    """Of a trace of so many runs."""
    took, end = defaultdict(list), None
    for event in sorted((e for e in events if e.get("cat") in KINDS), key=lambda e: e["ts"]):
        ended = event["ts"] + event["dur"]
        began = event["ts"] if end is None or event["ts"] - end > 200 else end  # a new run
        took[named(event)].append(max(ended - began, 0.0))
        end = ended if end is None else max(ended, end)
    found = [Part(name, len(us) / times, sum(us) / len(us)) for name, us in took.items()]
    return sorted(found, key=lambda part: -part.count * part.us)


def named(event: dict) -> str:
    grid = event["args"].get("grid")
    return event["name"].split("<")[0][:40] + ("" if grid is None else " " + "x".join(str(n) for n in grid if n > 1))


def total(found: list[Part]) -> float:
    """Milliseconds of one run."""
    return sum(part.count * part.us for part in found) / 1e3


def table(found: list[Part], rows: int = 24) -> str:
    lines = [f"    {p.count * p.us / 1e3:8.3f} ms  {p.count:6.1f} x {p.us:8.1f} us  {p.name}" for p in found[:rows]]
    return "\n".join([*lines, f"    {total(found):8.3f} ms  in all"])
