"""Time to first token of one prompt, cold and out of the cache: `python -m tests.bench.ttft [ROWS] [PAIRS]`.

Ways are run in the order A-B-B-A, each twice `PAIRS` times; medians, in one process but for the restarted one.
The reply's token hash must be the same every way, or nothing is printed but the difference.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from tfmagic import protocol
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model
from tfmagic.engine.stream import Request
from tfmagic.run import Run, Stream

TALE = "the red fox runs over the tall hill and finds a small house where an old cat tells a story about rain"
ASK = "Tell me what the story is about."


class Bench:
    """The shipped model with one long chat, whose turn is asked in several ways."""

    def __init__(self, rows: int, states: str):
        self.rows, self.states = rows, states
        self.open()

    def open(self) -> None:
        settings = Settings(learn_conversations=True, learn_dir=self.states, learn_min_free_gib=0)
        self.opened = open_model(None, "auto", settings, self.take)

    def take(self, event) -> None:
        self.record.apply(event)

    def messages(self, ask: str) -> list[protocol.Message]:
        words = TALE.split()
        text = " ".join(words[i * i % len(words)] for i in range(self.rows))
        return [protocol.Message("user", [protocol.Text(f"{text}. {ask}")])]

    def run(self, ask: str = ASK, cache: bool = True) -> Run:
        start, opened = time.perf_counter(), self.opened
        prompt = opened.prepare(self.messages(ask), {})
        sampling = opened.sampling(protocol.Params(temperature=0, max_tokens=16), prompt)
        self.record = Run("ttft", 0.0, streams=[Stream()])
        prepared = 1e3 * (time.perf_counter() - start)
        opened.engine.submit(Request("ttft", prompt, sampling, 1, start, prepared, opened.text.detokenizer, cache))
        while opened.engine.step():
            pass
        return self.record

    def cold(self) -> Run:
        return self.run(cache=False)

    def extended(self) -> Run:
        """Resumed in memory from another question's prompt, which parts from this one near its end."""
        self.opened.engine.store.clear()
        self.run("Who tells it?")
        return self.run()

    def again(self) -> Run:
        """The same prompt once more."""
        self.opened.engine.store.clear()
        self.run()
        return self.run()

    def restarted(self) -> Run:
        """The same prompt in a process of its own, which has answered nothing but a greeting: memory is empty."""
        self.run()
        self.opened.engine.store.disk.flush(10)
        child = [sys.executable, "-m", __spec__.name, "--restarted", self.states, str(self.rows)]
        return Run.from_json(subprocess.run(child, check=True, capture_output=True, text=True).stdout)


def compare(cold: Callable[[], Run], warm: Callable[[], Run], pairs: int) -> tuple[list[Run], list[Run]]:
    a, b = [], []
    for _ in range(pairs):
        a.append(cold())
        b.append(warm())
        b.append(warm())
        a.append(cold())
    return a, b


def median(runs: list[Run]) -> float:
    return statistics.median(run.ttft["total"] for run in runs)


def main(rows: int = 700, pairs: int = 3) -> None:
    with tempfile.TemporaryDirectory() as states:
        bench = Bench(rows, states)
        bench.cold()
        print(f"{bench.opened.name} on {bench.opened.device}, {4 * pairs} runs a line, A-B-B-A, medians")
        ways = {
            "resumed from memory": bench.extended,
            "the same prompt again": bench.again,
            "from disk, restarted": bench.restarted,
        }
        for name, way in ways.items():
            cold, warm = compare(bench.cold, way, pairs)
            said = {run.stats["token_sha"] for run in cold + warm}
            if len(said) > 1:
                sys.exit(f"{name}: the replies differ: {said}")
            a, b, run = median(cold), median(warm), warm[-1]
            came = f"{run.cached_tokens:,} of {run.prompt_tokens:,} rows from {run.cache_source or 'nowhere'}"
            print(f"{name:24s} {b:7.1f} ms, cold {a:7.1f} ms: {b / a:6.1%}   {came}   {said.pop()}")
        bench.opened.close(5)


def child(states: str, rows: str) -> None:
    """The restarted process: its run's record goes to the standard output."""
    bench = Bench(0, states)
    bench.run("Hello!", cache=False)
    bench.rows = int(rows)
    print(bench.run().to_json())
    bench.opened.close(5)


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--restarted"] else main(*map(int, sys.argv[1:]))
