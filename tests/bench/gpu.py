"""Speeds of the bf16 form on one GPU, through the engine: real requests, so that everything between counts.

    python -m tests.bench.gpu --model 4b|9b|27b|tiny|FOLDER [--bits 4|8|16] [--kv bf16|fp8] [--parts decode,ttft,...]
                              [--folder DIR] [--device cuda:0]

Parts: `decode` at 1, 4 and 16 streams, and `logprobs` beside none; `drafts` at chosen rates of acceptance, `copies`
against serial; `ttft` cold at 128, 1,024 and 8,192 rows; `again` the same prompt and 128 rows behind it; `keeping` what
it costs a turn that its states are kept; `images` four pictures and the turn behind them; `prefill` at 8,192 rows;
`rounds` by streams and rows; `kernels`: where their time goes; `long` past 32k.

A checkpoint of a size is drawn on the device, or with --folder written there and read. What is told stands in rows of
one table: the model, what was measured, the median, and what it is made of. Arms of a ratio run A-B-B-A. Tokens of
different arms must be equal, and are hashed; where they are not, the row says so and the command fails.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from unittest import mock

import torch

from tfmagic import protocol
from tfmagic.engine import open as opening
from tfmagic.engine.drafting.drafting import Drafting
from tfmagic.engine.families.qwen3_5.gpu.weights import size
from tfmagic.engine.loop import Engine
from tfmagic.engine.open import Settings
from tfmagic.engine.prompt import Prompt
from tfmagic.engine.resident.worker import collect_garbage
from tfmagic.engine.stream import Request
from tfmagic.run import Round, Run, Stream

from .checkpoints import SIZES, Drawn, write
from .chosen import Chosen
from .drafter import Made
from .images import encoded, picture
from .kernels import parts, table, total

PARTS = (
    *("decode", "logprobs", "copies", "drafts", "ttft", "again", "keeping", "images", "prefill"),
    *("rounds", "kernels", "long"),
)
QUICK = ("decode", "ttft", "again", "images", "prefill", "copies", "drafts")
COLD = (128, 1024, 8192)
LONG = 33_000
STREAMS = (1, 4, 16)
SOLO = 48
"""Tokens of each stream that are compared with the stream alone."""


@dataclass
class Bench:
    """An opened model, and what its runs came to."""

    opened: object
    copy: float
    """Bytes a second that the device copies, read and written."""
    label: str
    runs: dict[str, Run] = field(default_factory=dict)
    salt: count = field(default_factory=count)
    differ: list[str] = field(default_factory=list)
    """Rows whose arms gave different tokens."""

    def take(self, event: protocol.Event) -> None:
        self.runs[event.run].apply(event)

    def row(self, what: str, value: str, *details: str) -> None:
        print(f"| {self.label} | {what} | {value} | {'; '.join(details)} |", flush=True)

    def equal(self, what: str, *arms: object) -> str:
        """In words, whether the tokens of these arms are equal."""
        if all(arm == arms[0] for arm in arms):
            return f"equal tokens {hashlib.sha256(str(arms[0]).encode()).hexdigest()[:8]}"
        self.differ.append(what)
        return "OTHER TOKENS"

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


def several(streams: int) -> str:
    return f"{streams} stream{'s' * (streams > 1)}"


def tokens_of(runs: list[Run]) -> list[list[int]]:
    return [run.streams[0].token_ids for run in runs]


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


def decode(b: Bench, o: argparse.Namespace) -> None:
    """Rounds read every weight once, and each stream's state and keys. Every stream says what it says alone."""
    weights = size(b.opened._model.text.w.layers, b.opened._model.text.w.norm, b.opened._model.text.w.head)
    prompts, took, said = [b.ids(64) for _ in range(16)], defaultdict(list), defaultdict(list)
    few = min(SOLO, o.tokens)
    solo = tokens_of([b.run(ids, cache=False, max_tokens=few) for ids in prompts])
    for streams in STREAMS:  # captured before it is timed
        speed(b, [b.submit(ids, cache=False, max_tokens=4) for ids in prompts[:streams]])
    for streams in (*STREAMS, *reversed(STREAMS)) * o.repeats:
        runs = [b.submit(ids, cache=False, max_tokens=o.tokens) for ids in prompts[:streams]]
        took[streams].append(speed(b, runs))
        said[streams].append(tokens_of(runs))
    for streams in STREAMS:
        rate, ms = (statistics.median(one) for one in zip(*took[streams]))
        what, used = f"decode, {several(streams)}", weights / ms * 1e3
        alone = [[ids[:few] for ids in arm] for arm in said[streams]]
        b.row(
            what, f"{rate:.1f} tok/s", f"{ms:.2f} ms a round",
            f"weights {used / 1e12:.2f} TB/s = {100 * used / b.copy:.1f} % of the copy",
            "beside alone: " + b.equal(what, solo[:streams], *alone), "arms: " + b.equal(what, *said[streams]),
        )  # fmt: skip


def logprobs(b: Bench, o: argparse.Namespace) -> None:
    """Streams that ask for the 20 likeliest tokens of every place against streams that ask for none."""
    prompts = [b.ids(64) for _ in range(16)]
    for streams in STREAMS:
        rates, said, what = defaultdict(list), [], f"decode, {several(streams)}, the 20 likeliest tokens"
        for arm in (20, 0, *(20, 0, 0, 20) * o.repeats):  # the first of both are not counted
            runs = [b.submit(ids, cache=False, max_tokens=o.tokens, logprobs=arm) for ids in prompts[:streams]]
            rates[arm].append(speed(b, runs)[0])
            said.append(tokens_of(runs))
        asked, none = (statistics.median(rates[arm][1:]) for arm in (20, 0))
        b.row(what, f"{asked / none:.3f} x none", f"{asked:.1f} against {none:.1f} tok/s", b.equal(what, *said))


def copies(b: Bench, o: argparse.Namespace) -> None:
    """A copied continuation against serial."""
    ids, rates, runs = b.ids(64), defaultdict(list), []
    for arm in ("copy", "off", "copy", "copy", "off"):  # the first is not counted
        runs.append(b.submit(ids, cache=False, max_tokens=o.tokens, draft=arm))
        rates[arm].append(speed(b, runs[-1:])[0])
    ratio = statistics.mean(rates["copy"][1:]) / statistics.mean(rates["off"])
    told = f"{runs[0].stats['tokens_per_round']:.2f} tokens a round", b.equal("copies", *tokens_of(runs))
    b.row("drafts by copying, 1 stream", f"{ratio:.2f} x serial", *told)


def drafts(b: Bench, o: argparse.Namespace) -> None:
    """A drafter of random weights, whose pass is really run and whose guesses are right at chosen rates, against serial
    in the same engine: off, every rate, every rate once more in the opposite order, off."""
    with drafted(b, o) as chosen:
        engine, curve = b.opened.engine, b.opened.engine.drafting.curve
        for streams in STREAMS:
            prompts = [b.ids(64) for _ in range(streams)]
            begun = [b.submit(ids, cache=False, max_tokens=o.tokens) for ids in prompts]
            b.drain()
            serial = tokens_of(begun)
            for rows in (1, 2, 4, 8, 16):  # every window is captured before it is timed
                b.opened._model.time_round(streams, streams * rows)
            chosen.knows([ids + own for ids, own in zip(prompts, serial)])
            rates, said, guessed, spent = defaultdict(list), [serial], defaultdict(list), defaultdict(list)
            arms = ["off", *o.rates, *reversed(o.rates), "off"]
            for arm in [*o.rates, *arms]:  # the first ones, in which what is new is captured, are not counted
                engine.drafting = engine.rounds.drafting = Drafting(chosen, curve)  # nothing learnt from other rates
                chosen.begin(0.0 if arm == "off" else arm)
                params = {"draft": "off" if arm == "off" else "block", "max_tokens": o.tokens}
                runs = [b.submit(ids, cache=False, **params) for ids in prompts]
                rates[arm].append(speed(b, runs)[0])
                said.append(tokens_of(runs))
                guessed[arm] += [run.stats for run in runs]
                spent[arm].append(runs[0].streams[0].rounds)
            equal = b.equal(f"drafts, {several(streams)}", *said)
            off = statistics.mean(rates["off"])
            b.row(f"drafts, {several(streams)}, none", f"{off:.1f} tok/s", equal)
            for arm in o.rates:
                rate, stats = statistics.mean(rates[arm][-2:]), guessed[arm][-2 * streams :]
                accepted, tried = (sum(one[name] for one in stats) for name in ("accepted", "drafted"))
                b.row(
                    f"drafts, {several(streams)}, {100 * arm:.0f} % right", f"{rate / off:.2f} x serial",
                    f"{rate:.1f} tok/s", f"{statistics.mean(one['tokens_per_round'] for one in stats):.2f} a round",
                    f"{accepted} of {tried} guesses verified were accepted", *parts_of(spent[arm][-2:]), equal,
                )  # fmt: skip


def parts_of(runs: list[list[Round]]) -> list[str]:
    """How many rounds of these runs drafted, whether or not a guess was verified, and what theirs and the others took,
    in words. A pass much longer than the others was the first of its shape, which is captured then."""
    rounds = [r for rounds in runs for r in rounds]
    drafted = [r for r in rounds if r.nodes or r.cut]
    if not drafted:
        return []
    few = f"{len(drafted)} of {len(rounds)} rounds in {len(runs)} runs drafted"
    draft, verify = (statistics.median(getattr(r, name) for r in drafted) for name in ("draft_ms", "verify_ms"))
    told = [f"{few}, {sum(r.draft_ms for r in drafted):.1f} ms for drafts in all"]
    names = "planned_ms", "serial_ms"
    planned, serial = (statistics.median(getattr(r, name) or 0.0 for r in drafted) for name in names)
    told.append(f"where it drafted {draft:.2f} ms for drafts, {verify:.2f} for the pass")
    told.append(f"{planned:.2f} planned for both, against {serial:.2f}")
    if plain := [r.verify_ms for r in rounds if not (r.nodes or r.cut)]:
        told.append(f"elsewhere {statistics.median(plain):.2f}")
    longest = sorted((r.verify_ms for r in rounds), reverse=True)[:4]
    return [*told, "longest passes " + ", ".join(f"{ms:.1f}" for ms in longest)]


def ttft(b: Bench, o: argparse.Namespace) -> None:
    for rows in b.within(*COLD):
        runs = [b.run(b.ids(rows), cache=False, max_tokens=1) for _ in range(6)][1:]
        b.row(f"TTFT cold, {rows} tokens", *told(runs))


def told(runs: list[Run]) -> tuple[str, str]:
    """The median time to first token and its parts."""
    parts = {name: statistics.median(run.ttft[name] for run in runs) for name in runs[0].ttft}
    total = parts.pop("total")
    return f"{total:.1f} ms", ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items() if ms >= 0.05)


def again(b: Bench, o: argparse.Namespace) -> None:
    rows = b.within(*COLD)[-1]
    ids = b.ids(rows)
    cold = b.run(ids, max_tokens=8)
    runs = [b.run(ids, max_tokens=8) for _ in range(6)][1:]
    what, cached = f"TTFT again, the same {rows} tokens", runs[0].cached_tokens
    b.row(what, *told(runs), f"{cached} from the cache", b.equal(what, *tokens_of([cold, *runs])))
    more = [b.run(ids + b.ids(128), max_tokens=1) for _ in range(6)][1:]
    b.row(f"TTFT, {rows} kept + 128 new", *told(more), f"{more[0].cached_tokens} from the cache")
    store, restored = b.opened.engine.store, []
    for _ in range(3):
        for kept in store._kept.values():
            if getattr(kept.tensors, "view", None) is not None:
                kept.tensors.view.leave()
        restored.append(b.run(ids, max_tokens=8))
    what = f"TTFT again, the same {rows} tokens from host memory"
    b.row(what, *told(restored), b.equal(what, *tokens_of([cold, *restored])))


def keeping(b: Bench, o: argparse.Namespace) -> None:
    """A cold turn that keeps its states against the same one that keeps none, from submitting to its last token."""
    rows, took, said = b.within(*COLD)[-1], defaultdict(list), []
    for arms in ((False, True), (True, False)) * (o.repeats + 1):
        ids = b.ids(rows)
        runs = {keeps: b.run(ids, cache=keeps, max_tokens=o.tokens) for keeps in arms}
        for keeps, run in runs.items():
            took[keeps].append(run.total_ms)
        said.append(b.equal("keeping", *tokens_of([*runs.values()])))
    kept, none = (statistics.median(took[keeps][2:]) for keeps in (True, False))  # the first of both are not counted
    what = f"a turn of {rows} rows and {o.tokens} tokens that keeps its states"
    b.row(what, f"{kept / none:.4f} x one that does not", f"{kept:.1f} ms against {none:.1f}", said[-1])


def images(b: Bench, o: argparse.Namespace) -> None:
    said, side = [], 1024 if b.opened.context > 8192 else 256
    for i in range(3):
        data = [encoded(picture(side, 10 * i + j), "PNG") for j in range(4)]
        pictures = {hashlib.sha256(one).hexdigest(): one for one in data}
        parts = [protocol.ImageRef(digest, f"{j}.png") for j, digest in enumerate(pictures)]
        messages = [protocol.Message("user", [*parts, protocol.Text("What is the same in these?")])]
        cold = b.chat(messages, pictures, max_tokens=min(96, o.tokens))
        answer = protocol.Message("assistant", [protocol.Text(cold.streams[0].text)])
        b.opened.settle([*messages, answer], {}, "the first turn")  # as the engine does while a person reads
        b.drain()
        after = [*messages, answer, protocol.Message("user", [protocol.Text("And what is not?")])]
        said.append((cold, b.chat(after, {}, max_tokens=8)))
    colds, turns = zip(*said[1:])
    b.row(f"TTFT cold, 4 images of {side} x {side}", *told(colds), f"{colds[0].prompt_tokens} tokens")
    kept = f"{turns[0].cached_tokens} of {turns[0].prompt_tokens} from the cache"
    b.row("TTFT, the turn behind them", *told(turns), kept, f"{turns[0].stats['images_encoded']} images encoded")


def prefill(b: Bench, o: argparse.Namespace) -> None:
    model, rows = b.opened._model, b.within(*COLD)[-1]
    matrices = sum(w.n * w.k for w in weights_of(model))
    runs = [b.run(b.ids(rows), cache=False, max_tokens=1) for _ in range(4)][1:]
    ms = statistics.median(run.ttft["prefill"] for run in runs)
    flops = 2e-9 * matrices * rows / ms
    b.row(f"prefill, {rows} tokens", f"{flops:.0f} TFLOP/s in the matrices", f"{1e3 * rows / ms:.0f} rows/s")


def weights_of(model) -> list:
    layers = model.text.w.layers
    return [w for layer in layers for w in (layer.mixer.inputs, layer.mixer.out, layer.up, layer.down)]


def rounds(b: Bench, o: argparse.Namespace) -> None:
    """Milliseconds of a round by streams and rows of a window, without the engine."""
    model = b.opened._model
    for streams in STREAMS:
        times = [min(model.time_round(streams, streams * rows) for _ in range(5)) for rows in (1, 2, 4, 8, 16)]
        b.row(f"a round, {several(streams)} of 1, 2, 4, 8, 16 rows", ", ".join(f"{ms:.2f}" for ms in times) + " ms")


def kernels(b: Bench, o: argparse.Namespace) -> None:
    """What passes spend on the device, by kernel, and how long they take with everything."""
    model = b.opened._model

    def told_of(what: str, run: Callable[[], object], *details: str) -> None:
        found = parts(run)
        print(f"  {what}:\n{table(found)}", flush=True)
        dearest = ", ".join(f"{p.name} {p.count:.0f} x {p.us:.0f} us" for p in found[:4])
        b.row(f"on the device, {what}", f"{total(found):.2f} ms", *details, dearest)

    for streams, rows in ((1, 1), (1, 16), (16, 16), (16, 64)):
        two = partial(model.time_round, streams, rows)
        whole = 2 * min(two() for _ in range(5))
        told_of(f"two rounds of {several(streams)}, {rows} rows", two, f"{whole:.2f} with the host")
    for rows in b.within(64, 1024, 4096):
        cold = partial(b.run, b.ids(rows), cache=False, max_tokens=1)
        cold()
        told_of(f"a prompt of {rows} rows", cold, f"{cold().ttft['total']:.2f} with the host")
    if o.model in SIZES:
        with drafted(b, o) as chosen:
            for streams in STREAMS:
                told_of(f"drafts for {several(streams)}", chosen.batches[streams].launch)
    if model.eyes is not None:
        patches, grid, _ = model.prepare(picture(1024, 0))
        encode = partial(model.tower, patches, grid)
        encode()
        began = time.perf_counter()
        encode()
        told_of("a picture", encode, f"{1e3 * (time.perf_counter() - began):.2f} with the host")


def long(b: Bench, o: argparse.Namespace) -> None:
    run = b.submit(b.ids(LONG), cache=False, max_tokens=o.tokens)
    rate, ms = speed(b, [run])
    b.row(f"decode past {LONG} tokens, 1 stream", f"{rate:.1f} tok/s", f"{ms:.2f} ms a round", told([run])[0])


# The command -------------------------------------------------------------------------------------


def opened(b: Bench, o: argparse.Namespace, place: Path) -> None:
    """Open the model; says what took how long."""
    began = time.perf_counter()

    def progress(what: str) -> None:
        print(f"  {time.perf_counter() - began:6.1f} s: {what}", flush=True)

    def checkpoint(path: Path, real=opening.Checkpoint):
        return real(path) if o.folder or o.model not in SIZES else Drawn(path, SIZES[o.model], o.packed)

    settings = Settings(prompt_cache_gib=o.cache_gib, form="bf16", kv_cache=o.kv, drafter="none")
    with mock.patch.object(opening, "Checkpoint", checkpoint):
        b.opened = opening.open(str(place), o.device, settings, b.take, progress)
    b.run(b.ids(100), max_tokens=4)
    progress("the first reply")
    if (pinned := b.opened._model.pool.pinned) is not None:
        pinned.grown.wait()
        progress(f"{pinned.size / 2**30:g} GiB of host memory are pinned")


@contextmanager
def drafted(b: Bench, o: argparse.Namespace) -> Iterator[Chosen]:
    """Within, the engine has a drafter of random weights in the published shape."""
    model, before = b.opened._model, b.opened.engine
    made = Made(o.model, o.device, o.drafter_bits)
    chosen = Chosen(made, model, o.device, b.opened._size, o.drafter_bits)
    memory, curve = before.schedule.memory, before.drafting.curve
    b.opened.engine = Engine(model, before.store, before.sink, before.piece, memory, chosen, curve)
    b.opened.drafter = chosen.name
    yield chosen
    b.opened.engine, b.opened.drafter = before, "none"
    model.tap([])


def place_of(o: argparse.Namespace, temporary: str) -> Path:
    """The model's folder."""
    if o.model not in SIZES:
        return Path(o.model)
    name = f"{o.model}-{o.bits}"
    if o.folder is None:
        (Path(temporary) / name).mkdir()
        return Path(temporary) / name
    if not (o.folder / name / "model.safetensors.index.json").is_file():
        began = time.perf_counter()
        written = write(o.folder / name, SIZES[o.model], o.packed, device=o.device)
        print(f"{o.folder / name}: {written / 1e9:.2f} GB written in {time.perf_counter() - began:.1f} s")
    return o.folder / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="9b")
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=16)
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--parts", default=",".join(QUICK), type=lambda text: text.split(","))
    parser.add_argument("--folder", type=Path, help="write and read a checkpoint there; else its weights are drawn")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=128, help="of a reply whose speed is measured")
    parser.add_argument("--repeats", type=int, default=2, help="of decode's arms, each there and back")
    parser.add_argument("--rates", default=[0.0, 0.5, 0.8, 0.95], type=lambda text: [*map(float, text.split(","))])
    parser.add_argument("--drafter-bits", type=int, choices=(4, 16), default=16)
    parser.add_argument("--cache-gib", type=float, default=16.0)
    o = parser.parse_args()
    o.packed = None if o.bits == 16 else o.bits
    if unknown := set(o.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if "drafts" in o.parts and o.model not in SIZES:
        parser.error(f"drafts are for a size: {', '.join(SIZES)}")
    label = f"{o.model}, {'bf16' if o.bits == 16 else f'{o.bits} bits'}, kv {o.kv}"
    b = Bench(None, copied(o.device), label)
    print(f"{label}, {o.device}: the device copies {b.copy / 1e12:.2f} TB/s", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        opened(b, o, place_of(o, temporary))
        failed = []
        for part in o.parts:
            collect_garbage()  # as the resident engine does when it is quiet
            began = time.perf_counter()
            try:
                globals()[part](b, o)
            except Exception as error:  # the other parts may still tell something
                traceback.print_exc()
                failed.append(f"{part}: {type(error).__name__}: {str(error)[:300]}")
                b.drain()
            print(f"  ({part}: {time.perf_counter() - began:.0f} s)", flush=True)
    failed += [f"other tokens: {what}" for what in b.differ]
    if failed:
        sys.exit("FAILED " + "\nFAILED ".join(failed))


if __name__ == "__main__":
    main()
