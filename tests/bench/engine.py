"""Speeds of the embedded model in this process: `python -m tests.bench.engine`. Best of three, one line each."""

from __future__ import annotations

import statistics
import time
from itertools import count

import torch

from tfmagic import protocol
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model
from tfmagic.engine.prompt import Prompt
from tfmagic.engine.stream import Request
from tfmagic.run import Run, Stream, token_sha

STORY = "Tell me a story about a girl and a cat."
COPY = "Repeat: " + " and ".join(
    f"the {a} fox runs over the {b} hill" for a in ("red", "blue") for b in ("tall", "low")
)


def run(opened, text: str | list[int], streams: int = 1, **params) -> Run:
    events, start = [], time.perf_counter()
    opened.engine.sink = events.append
    if isinstance(text, str):
        prompt = opened.prepare([protocol.Message("user", [protocol.Text(text)])], {})
    else:
        prompt = Prompt(text, text, [], torch.arange(len(text)).expand(3, -1))
    sampling = opened.sampling(protocol.Params(**params), prompt)
    prepared = 1e3 * (time.perf_counter() - start)
    opened.engine.submit(Request("bench", prompt, sampling, streams, start, prepared, opened.text.detokenizer))
    while opened.engine.step():
        pass
    record = Run("bench", 0.0, streams=[Stream() for _ in range(streams)])
    for event in events:
        record.apply(event)
    return record


def speed(record: Run) -> float:
    """Tokens of all streams after the first ones, a second."""
    said = sum(len(stream.tokens) - 1 for stream in record.streams)
    return 1e3 * said / (record.total_ms - record.ttft["total"])


def eight(opened, together: bool) -> tuple[list[float], str]:
    """Milliseconds until each of eight short prompts has its first token, and a hash of all replies."""
    records, start = {}, time.perf_counter()
    opened.engine.sink = lambda event: records[event.run].apply(event)
    for number in range(8):
        text = f"{STORY} It is number {number}, and she lives by the sea."
        prompt = opened.prepare([protocol.Message("user", [protocol.Text(text)])], {})
        sampling = opened.sampling(protocol.Params(temperature=0, max_tokens=8), prompt)
        run = str(number)
        records[run] = Run(run, 0.0, streams=[Stream()])
        opened.engine.submit(Request(run, prompt, sampling, 1, start, 0.0, opened.text.detokenizer, cache=False))
        while not together and opened.engine.step():
            pass
    while opened.engine.step():
        pass
    ids = [id for record in records.values() for id in record.streams[0].token_ids]
    return [record.ttft["total"] for record in records.values()], token_sha(ids)


def compare_eight(opened, pairs: int = 3) -> None:
    """A-B-B-A, medians; the replies must be the same."""
    ways = {True: [], False: []}
    said = set()
    for together in [True, False, False, True] * pairs:
        first, sha = eight(opened, together)
        ways[together].append(first)
        said.add(sha)
    assert len(said) == 1, said
    for name, together in (("together", True), ("one after another", False)):
        means = statistics.median(statistics.mean(first) for first in ways[together])
        lasts = statistics.median(max(first) for first in ways[together])
        print(f"eight short prompts {name:>17}: first tokens after {means:.0f} ms on average, {lasts:.0f} ms the last")


def main() -> None:
    opened = open_model(None, "auto", Settings(), lambda event: None)
    print(f"{opened.name} on {opened.device}, {torch.get_num_threads()} thread(s)")
    run(opened, "Hello!")
    for name, text, streams, params in (
        ("serial, a story", STORY, 1, {"draft": "off"}),
        ("drafted, a story", STORY, 1, {}),
        ("serial, a copy", COPY, 1, {"draft": "off"}),
        ("drafted, a copy", COPY, 1, {}),
        ("16 streams, a story", STORY, 16, {"temperature": 0.8, "max_tokens": 60}),
    ):
        best = max((run(opened, text, streams, **params) for _ in range(3)), key=speed)
        per_round = best.stats["tokens_per_round"]
        first = f"first after {best.ttft['total']:.0f} ms"
        print(f"{name:>20}: {speed(best):6.1f} tok/s, {per_round:.2f} tokens a round, {first}")
    compare_eight(opened)
    salt = count()  # another first row each time: nothing is found in the cache
    for rows in (64, 300, 1000, 3000):
        colds = [run(opened, [next(salt), *(5 + i % 200 for i in range(1, rows))], max_tokens=1) for _ in range(3)]
        ms = min(cold.ttft["prefill"] for cold in colds)
        print(f"{rows:>5} prompt rows, cold: {ms:6.0f} ms, {1e3 * rows / ms:6.0f} rows/s")


if __name__ == "__main__":
    main()
