"""What the wire and the process cost, with a scripted engine: `python tests/bench/resident.py`.

Prints round trips, events a second, and how long after its making a first token reaches the client.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tfmagic.client import connect
from tfmagic.engine.resident import launch, place

FAKE = Path(__file__).parents[1] / "resident" / "fake_engine.py"


def quantiles(name: str, ms: list[float]) -> None:
    cuts = statistics.quantiles(ms, n=100)
    print(f"{name:<44} median {cuts[49]:8.3f}   p90 {cuts[89]:8.3f}   p99 {cuts[98]:8.3f} ms   (n = {len(ms)})")


def timed(action, count: int) -> list[float]:
    def once() -> float:
        began = time.perf_counter()
        action()
        return 1e3 * (time.perf_counter() - began)

    return [once() for _ in range(count)]


def first(engine) -> float:
    """Submit → first token in the client's hands, ms."""
    began = time.perf_counter()
    handle = engine.submit("slow 2")
    while not handle.record.ttft:
        handle.changed(handle.version)
    ms = 1e3 * (time.perf_counter() - began)
    handle.wait()
    return ms


def main() -> None:
    os.environ["TFMAGIC_RUNTIME_DIR"] = path = tempfile.mkdtemp(prefix="tfm-", dir="/tmp")
    launch.COMMAND = [str(FAKE)]
    try:
        measure()
    finally:
        place.finish(place.Place(Path(path)))
        shutil.rmtree(path)


def measure() -> None:
    print(f"{'start and connect':<44} {timed(lambda: connect().close(), 1)[0]:15.1f} ms")
    engine = connect()
    quantiles("connect to a running engine", timed(lambda: connect().close(), 30))
    quantiles("round trip, engine idle", timed(engine.status, 2000))
    quantiles("submit → first token at the client", [first(engine) for _ in range(30)])
    for streams in (1, 8):
        count = 40_000 // streams
        began = time.perf_counter()
        engine.run(f"fast {count}", streams=streams)
        seconds = time.perf_counter() - began
        print(f"{f'{streams} stream(s), one event a token':<44} {streams * count / seconds:15,.0f} events/s")
    busy = engine.submit("fast 1000000")
    quantiles("round trip, engine busy in Python", timed(engine.status, 200))
    busy.cancel()
    busy.wait()


if __name__ == "__main__":
    main()
