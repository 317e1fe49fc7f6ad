"""What states on disk cost and save: `python -m tests.bench.disk [--rows N] [--pairs N] [--reply N]`.

The turn that saves its state against the same turn that does not, A-B-B-A with fresh prompts on the model that ships:
medians, the median of the paired differences, the engine thread's own processor time, and whether the tokens are equal.
Then a turn after a restart: cold, from disk, from memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from tests.engine.conftest import GREEDY, Bench, text_prompt
from tfmagic.engine import families
from tfmagic.engine.cache.disk import Disk, Limits
from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.run import token_sha


def median(name: str, off: list[float], on: list[float]) -> None:
    a, b = statistics.median(off), statistics.median(on)
    paired = statistics.median(y - x for x, y in zip(off, on))
    spread = statistics.quantiles(off, n=4)
    print(
        f"{name:<26} off {a:9.3f} ms   on {b:9.3f} ms   {100 * (b / a - 1):+6.2f} %   "
        f"paired {100 * paired / a:+6.2f} %   (quartiles of off: {spread[0]:.1f}, {spread[2]:.1f})"
    )


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--rows", type=int, default=1000)
    p.add_argument("--reply", type=int, default=32)
    p.add_argument("--pairs", type=int, default=20)
    p.add_argument("--model")
    p.add_argument("--device", default="cpu")
    options = p.parse_args()
    sys.setswitchinterval(0.001)  # as the resident process
    model = families.load(Checkpoint(resolve(options.model)), options.device)
    sampling = replace(GREEDY, max_tokens=options.reply, stop_ids=frozenset(), draft="off", size=model.vocab)
    folder = tempfile.TemporaryDirectory(prefix="tfmagic-bench-")
    facts = {"model": "bench", "device": "cpu"}
    disk = Disk(Path(folder.name) / "states", facts, model.grain, Limits(learned=8 << 30, free=0))
    bench, generator = Bench(model), torch.Generator().manual_seed(0)

    def turn(prompt, saving: bool, before=None) -> tuple[str, float, ...]:
        """Tokens, then ms: ttft, turn, the engine thread's time, the process's time with the writer's to its end.
        `before`: a prompt whose state memory holds already."""
        bench.engine.store.clear()
        bench.engine.store.disk = None
        if before is not None:
            bench.run(before, sampling)
        bench.engine.store.disk = disk if saving else None
        wall, own, process = time.perf_counter(), time.thread_time(), time.process_time()
        run = bench.run(prompt, sampling)
        wall, own = time.perf_counter() - wall, time.thread_time() - own
        assert run.status == "done" and run.cache_source == (before and "ram"), (run.error, run.cache_source)
        assert disk.flush(60)
        process = time.process_time() - process
        if saving:
            disk.clear()
        return token_sha(run.streams[0].token_ids), run.ttft["total"], 1e3 * wall, 1e3 * own, 1e3 * process

    def fresh():
        return text_prompt(torch.randint(0, 2000, (options.rows,), generator=generator).tolist())

    for _ in range(4):
        turn(fresh(), True)
    for warm in (False, True):
        off, on = [], []
        for pair in range(options.pairs):
            prompt = fresh()
            before = text_prompt(prompt.ids[: len(prompt.ids) * 3 // 4]) if warm else None
            done = {saving: turn(prompt, saving, before) for saving in ((False, True), (True, False))[pair % 2]}
            off.append(done[False])
            on.append(done[True])
        equal = [x[0] for x in off] == [x[0] for x in on]
        what = "the last quarter of them computed" if warm else "cold"
        print(f"{options.rows} rows, {what}, {options.reply} tokens, {len(off)} pairs, tokens equal: {equal}")
        for i, name in enumerate(("ttft", "turn", "engine thread's own time", "process's own time"), start=1):
            median(name, [x[i] for x in off], [x[i] for x in on])
    each = disk.counts.bytes_written / disk.counts.written / 2**20
    print(f"{disk.counts.written} states written, {each:.2f} MiB each; {disk.counts.skipped} skipped")

    first = fresh()
    bench.engine.store.disk = disk
    reply = bench.run(first, sampling).streams[0].token_ids
    second = text_prompt(first.ids + reply + first.ids[:40])
    times: dict[str, list[float]] = {"cold": [], "disk": [], "ram": []}
    shas = set()
    disk.limits = Limits(learned=None)  # the second turn is to find the first one's state every time
    for name in times:
        for _ in range(5):
            bench.engine.store.disk = None
            bench.engine.store.clear()
            if name == "ram":
                bench.run(first, sampling)
            bench.engine.store.disk = disk if name == "disk" else None
            run = bench.run(second, sampling)
            assert (run.cache_source or "cold") == name, (run.cache_source, name)
            times[name].append(run.ttft["total"])
            shas.add(token_sha(run.streams[0].token_ids))
    said = ", ".join(f"{name} {statistics.median(ms):.1f} ms" for name, ms in times.items())
    print(f"turn 2, ttft: {said}; tokens equal: {len(shas) == 1}")
    disk.close(60)
    folder.cleanup()


if __name__ == "__main__":
    main()
