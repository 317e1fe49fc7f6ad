"""Speeds of the bf16 form on one GPU, through the engine: real requests, so that everything between counts.

    python -m tests.bench.gpu --model 4b|9b|27b|tiny|FOLDER [--bits 4|8|16] [--kv bf16|fp8] [--parts decode,ttft,...]
                              [--folder DIR] [--device cuda:0]

Parts: `decode` at 1, 4 and 16 streams, `long` past 32k, `draft` with copies against serial, `ttft` cold at 128, 1,024
and 8,192 rows, `again` the same prompt and 128 rows behind it, `images` four pictures and the turn behind them,
`prefill` at 8,192 rows, `rounds` by streams and rows. A checkpoint of a size is written to DIR when it is not there.
Medians; what a ratio is made of runs A-B-B-A. Tokens of different arms must be equal, and are hashed.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

from tfmagic import protocol
from tfmagic.engine.families.qwen3_5.gpu.weights import size
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model
from tfmagic.engine.prompt import Prompt
from tfmagic.engine.stream import Request
from tfmagic.run import Run, Stream, token_sha

from .checkpoints import SIZES, write
from .images import encoded, picture

PARTS = ("decode", "draft", "ttft", "again", "images", "prefill", "rounds", "long")
QUICK = ("decode", "draft", "ttft", "again", "images", "prefill")
COLD = (128, 1024, 8192)
LONG = 33_000


@dataclass
class Bench:
    """An opened model, and what its runs came to."""

    opened: object
    copy: float
    """Bytes a second that the device copies, read and written."""
    runs: dict[str, Run] = field(default_factory=dict)
    salt: count = field(default_factory=count)

    def ids(self, rows: int) -> list[int]:
        """Rows of a prompt that no other begins like."""
        salt, size = next(self.salt), self.opened._size - 8
        return [(salt * 7919 + 31 * i * i + 17 * i) % size for i in range(rows)]

    def within(self, *rows: int) -> list[int]:
        """Those that the context has room for, with some reply."""
        return [n for n in rows if n + 256 <= self.opened.context]

    def submit(self, ids: list[int], cache: bool = True, **params) -> Run:
        prompt = Prompt(ids, ids, [], torch.arange(len(ids)).expand(3, -1))
        return self.request(prompt, time.perf_counter(), cache, **params)

    def request(self, prompt: Prompt, started: float, cache: bool = True, **params) -> Run:
        params.setdefault("draft", "off")
        sampling = self.opened.sampling(protocol.Params(temperature=0.0, **params), prompt)
        prepared = 1e3 * (time.perf_counter() - started)
        run = Run(f"run-{len(self.runs)}", time.time(), streams=[Stream()])
        self.runs[run.id] = run
        make = self.opened.text.detokenizer
        self.opened.engine.submit(Request(run.id, prompt, sampling, 1, started, prepared, make, cache))
        return run

    def drain(self, run: Run | None = None) -> Run | None:
        while self.opened.engine.step():
            pass
        if run is not None and run.status != "done":
            raise RuntimeError(run.error)
        return run

    def run(self, ids: list[int], **params) -> Run:
        return self.drain(self.submit(ids, **params))

    def chat(self, messages: list[protocol.Message], pictures: dict[str, bytes], **params) -> Run:
        started = time.perf_counter()
        return self.drain(self.request(self.opened.prepare(messages, pictures), started, **params))


def speed(b: Bench, runs: list[Run]) -> tuple[float, float]:
    """(tokens a second of all, milliseconds a round) while every one decodes; runs them to their end."""
    streams, step = [run.streams[0] for run in runs], b.opened.engine.step
    while not all(stream.tokens for stream in streams):
        step()
    before, began, rounds = sum(len(stream.tokens) for stream in streams), time.perf_counter(), 0
    while not any(stream.finish_reason for stream in streams):
        step()
        rounds += 1
    seconds = time.perf_counter() - began
    said = sum(len(stream.tokens) for stream in streams) - before
    for run in runs:
        b.drain(run)
    return said / seconds, 1e3 * seconds / max(rounds, 1)


def sha(runs: list[Run]) -> str:
    """Of every run's tokens."""
    return hashlib.sha256(" ".join(token_sha(run.streams[0].token_ids) for run in runs).encode()).hexdigest()[:12]


def copied(device: str) -> float:
    """Bytes a second of a device copy, read and written; the median of 20."""
    if device == "cpu":
        return float("nan")
    a = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    b, times = torch.empty_like(a), []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2e3 * a.nbytes / statistics.median(times)


def decode(b: Bench, tokens: int, rows: int = 64) -> None:
    """Rounds read every weight once, and each stream's state and keys."""
    model = b.opened._model
    weights = size(model.text.w.layers, model.text.w.norm, model.text.w.head)
    b.run(b.ids(rows), max_tokens=8)
    alone: list[str] = []
    prompts = [b.ids(rows) for _ in range(16)]
    for streams in (1, 4, 16):
        best, shas = [], set()
        for _ in range(3):
            runs = [b.submit(ids, cache=False, max_tokens=tokens) for ids in prompts[:streams]]
            best.append(speed(b, runs))
            shas.add(sha(runs))
            if streams == 1:
                alone = [token_sha(runs[0].streams[0].token_ids)]
        rate, ms = sorted(best)[1]
        same = token_sha(runs[0].streams[0].token_ids) == alone[0] and len(shas) == 1
        used = weights / ms * 1e3
        print(
            f"decode {streams:2} streams: {rate:7.1f} tok/s, {ms:6.2f} ms a round, weights {used / 1e9:6.0f} GB/s = "
            f"{100 * used / b.copy:4.1f} % of copy; stream 1 as alone: {same}; {shas.pop()}"
        )


def draft(b: Bench, tokens: int) -> None:
    """A copied continuation against serial, A-B-B-A: the tokens are the same."""
    ids, runs, rates = b.ids(64), [], {"off": [], "copy": []}
    for arm in ("off", "copy", "copy", "off"):
        runs.append(b.submit(ids, cache=False, max_tokens=tokens, draft=arm))
        rates[arm].append(speed(b, runs[-1:])[0])
    off, copy = (statistics.mean(rates[arm]) for arm in ("off", "copy"))
    shas = {sha([run]) for run in runs}
    told = f"{copy / off:.2f} x serial, {runs[1].stats['tokens_per_round']:.2f} tokens a round"
    print(f"draft copies: {copy:7.1f} tok/s, {told}; equal tokens: {len(shas) == 1}; {shas.pop()}")


def ttft(b: Bench) -> None:
    for rows in b.within(*COLD):
        runs = [b.run(b.ids(rows), cache=False, max_tokens=1) for _ in range(6)][1:]
        print(f"ttft cold {rows:5}: {told(runs)}")


def told(runs: list[Run]) -> str:
    """The median time to first token and its parts."""
    parts = {name: statistics.median(run.ttft[name] for run in runs) for name in runs[0].ttft}
    total = parts.pop("total")
    return f"{total:7.1f} ms  (" + ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items() if ms >= 0.05) + ")"


def again(b: Bench) -> None:
    rows = b.within(*COLD)[-1]
    ids = b.ids(rows)
    cold = b.run(ids, max_tokens=8)
    runs = [b.run(ids, max_tokens=8) for _ in range(6)][1:]
    equal = {sha([run]) for run in (cold, *runs)}
    cached = runs[0].cached_tokens
    print(f"ttft the same {rows} again: {told(runs)}, {cached} from the cache; equal tokens: {len(equal) == 1}")
    more = [b.run(ids + b.ids(128), max_tokens=1) for _ in range(6)][1:]
    print(f"ttft {rows} kept + 128 new: {told(more)}, {more[0].cached_tokens} from the cache")
    store, restored = b.opened.engine.store, []
    for _ in range(3):
        for kept in store._kept.values():
            if getattr(kept.tensors, "view", None) is not None:
                kept.tensors.view.leave()
        restored.append(b.run(ids, max_tokens=8))
    equal |= {sha([run]) for run in restored}
    print(f"ttft the same from host memory: {told(restored)}; equal tokens: {len(equal) == 1}")


def images(b: Bench) -> None:
    said, side = [], 1024 if b.opened.context > 8192 else 256
    for i in range(3):
        data = [encoded(picture(side, 10 * i + j), "PNG") for j in range(4)]
        pictures = {hashlib.sha256(one).hexdigest(): one for one in data}
        parts = [protocol.ImageRef(digest, f"{j}.png") for j, digest in enumerate(pictures)]
        messages = [protocol.Message("user", [*parts, protocol.Text("What is the same in these?")])]
        cold = b.chat(messages, pictures, max_tokens=96)
        answer = protocol.Message("assistant", [protocol.Text(cold.streams[0].text)])
        b.opened.settle([*messages, answer], {}, "the first turn")  # as the engine does while a person reads
        b.drain()
        after = [*messages, answer, protocol.Message("user", [protocol.Text("And what is not?")])]
        said.append((cold, b.chat(after, {}, max_tokens=8)))
    print(f"ttft 4 images of {side} x {side}: {told([cold for cold, _ in said[1:]])}")
    turns = [turn for _, turn in said[1:]]
    print(f"ttft the turn behind them, settled: {told(turns)}, images encoded {turns[0].stats['images_encoded']}")


def prefill(b: Bench) -> None:
    model, rows = b.opened._model, b.within(*COLD)[-1]
    matrices = sum(w.n * w.k for w in weights_of(model))
    runs = [b.run(b.ids(rows), cache=False, max_tokens=1) for _ in range(4)][1:]
    ms = statistics.median(run.ttft["prefill"] for run in runs)
    print(f"prefill {rows}: {1e3 * rows / ms:8.0f} rows/s, {2e-9 * matrices * rows / ms:6.1f} TFLOP/s in the matrices")


def weights_of(model) -> list:
    layers = model.text.w.layers
    return [w for layer in layers for w in (layer.mixer.inputs, layer.mixer.out, layer.up, layer.down)]


def rounds(b: Bench) -> None:
    """Milliseconds of a round by streams and rows of a window, without the engine."""
    model = b.opened._model
    for streams in (1, 4, 16):
        times = [min(model.time_round(streams, streams * rows) for _ in range(5)) for rows in (1, 2, 4, 8, 16)]
        print(f"round {streams:2} streams of 1, 2, 4, 8, 16 rows: " + ", ".join(f"{ms:.2f}" for ms in times) + " ms")


def long(b: Bench, tokens: int) -> None:
    run = b.submit(b.ids(LONG), cache=False, max_tokens=tokens)
    rate, ms = speed(b, [run])
    print(f"decode past {LONG}: {rate:7.1f} tok/s, {ms:.2f} ms a round; its prompt: {told([run])}")


def folder_of(name: str, bits: int, folder: Path, device: str) -> Path:
    if name not in SIZES:
        return Path(name)
    place = folder / f"{name}-{bits}"
    if not (place / "model.safetensors.index.json").is_file():
        began = time.perf_counter()
        written = write(place, SIZES[name], None if bits == 16 else bits, device=device)
        print(f"{place}: {written / 1e9:.2f} GB written in {time.perf_counter() - began:.1f} s")
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="9b")
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=16)
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--parts", default=",".join(QUICK), type=lambda text: text.split(","))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tfmagic-bench")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--cache-gib", type=float, default=16.0)
    o = parser.parse_args()
    if unknown := set(o.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    place = folder_of(o.model, o.bits, o.folder, o.device)
    copy, began = copied(o.device), time.perf_counter()
    settings = Settings(prompt_cache_gib=o.cache_gib, form="bf16", kv_cache=o.kv, drafter="none")
    bench = Bench(None, copy)
    bench.opened = open_model(str(place), o.device, settings, lambda event: bench.runs[event.run].apply(event))
    print(f"{o.model}, {o.bits} bits, kv {o.kv}, {o.device}: copy {copy / 1e12:.2f} TB/s; ready after "
          f"{time.perf_counter() - began:.1f} s")  # fmt: skip
    print(f"  {bench.opened._model.plan}")
    began = time.perf_counter()
    bench.run(bench.ids(100), max_tokens=4)
    print(f"first reply: {time.perf_counter() - began:.1f} s, with what it compiles")
    calls = {"decode": (o.tokens,), "draft": (o.tokens,), "long": (o.tokens,)}
    for part in o.parts:
        began = time.perf_counter()
        globals()[part](bench, *calls.get(part, ()))
        print(f"  ({part}: {time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
