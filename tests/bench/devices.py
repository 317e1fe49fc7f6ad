"""The shipped model on one device: time to first token, tokens a second. `python -m tests.bench.devices cuda:0 bf16`"""

from __future__ import annotations

import statistics
import sys
import time

from tests.gpu.test_engine import EDIT, STORY, Box, picture


def main(device: str, form: str = "exact") -> None:
    began = time.perf_counter()
    box = Box(device, form)
    print(f"{device}, {form}: ready after {time.perf_counter() - began:.1f} s")
    box.run(STORY, cache=False), box.run("What?", picture(), cache=False)
    rows = {
        "story, serial": lambda: box.run(STORY, cache=False, draft="off"),
        "edit, serial": lambda: box.run(EDIT, cache=False, draft="off"),
        "edit, drafted": lambda: box.run(EDIT, cache=False),
        "picture, cold": lambda: box.run("Describe the picture.", picture(), cache=False),
        "story x 16": lambda: box.run(STORY, cache=False, streams=16, temperature=1, seed=1),
    }
    for name, go in rows.items():
        runs = [go() for _ in range(5)]
        ttft = statistics.median(run.ttft["total"] for run in runs)
        rate = statistics.median(sum(stream.tokens_per_second or 0 for stream in run.streams) for run in runs)
        print(f"{name:15s} ttft {ttft:7.1f} ms   {rate:7.1f} tok/s   {runs[0].stats['token_sha']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
