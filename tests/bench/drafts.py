"""Drafting on against off by workload, the embedded model: `python -m tests.bench.drafts [PAIRS] [--drafter PATH]`.

Ways are run in the order A-B-B-A, `PAIRS` times; a ratio is the median over the quartets of off's time over on's, from
the first token to the last. Both ways must say the same tokens. `--cpu-time` counts the process's CPU seconds instead,
prompt included, for a machine that others use too.

`--drafter stand-in`: a drafter that costs what one of the published shape costs here (the pass of a small network is
really computed) and guesses the reply, known beforehand, right in 70 of 100 places, or 5 of 100 in prose. It shows what
the engine makes of good and bad drafts; it says nothing about any drafter.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import numpy as np
import torch

from tests.bench.engine import COPY, STORY, run
from tfmagic.engine.drafting.draft import Lattice
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model
from tfmagic.run import Run

EDIT = "Copy this text and write dog in place of cat: " + " ".join(
    f"The {a} cat runs over the {b} hill to the house." for a in ("red", "blue") for b in ("tall", "low", "green")
)
WORKLOADS = {
    "copy": (COPY, 1, {"temperature": 0.0, "max_tokens": 120}),
    "edit": (EDIT, 1, {"temperature": 0.0, "max_tokens": 120}),
    "story": (STORY, 1, {"temperature": 0.0, "max_tokens": 120}),
    "chat": ("What is the sea? Why is it blue?", 1, {"temperature": 0.0, "max_tokens": 80}),
    "prose at temperature 1": (STORY, 1, {"temperature": 1.0, "seed": 3, "max_tokens": 120}),
    "prose, 16 streams": (STORY, 16, {"temperature": 1.0, "seed": 3, "max_tokens": 60}),
    "copy, 16 streams": (COPY, 16, {"temperature": 0.0, "max_tokens": 60}),
}


class StandIn:
    """See above. It finds the reply by the pending token and its place among those it was told."""

    layers, block, name, candidates = [1, 3, 5], 8, "a stand-in", 8

    def __init__(self, right: float):
        self.right, self.rng, self.known = right, random.Random(0), []
        self.layer = torch.nn.Sequential(torch.nn.Linear(320, 1536), torch.nn.SiLU(), torch.nn.Linear(1536, 320))
        self.head = torch.nn.Linear(320, 4096, bias=False)

    def context(self) -> StandIn:
        return self

    def fork(self) -> StandIn:
        return self

    def context_bytes(self, rows: int) -> int:
        return 0

    def extend(self, context, taps, start: int) -> None:
        pass

    @torch.inference_mode()
    def lattices(self, asks) -> list[Lattice]:
        x = torch.zeros(len(asks) * self.block, 320)
        for _ in range(3):
            x = x + self.layer(x)
        self.head(x).topk(self.candidates)
        return [self.lattice(ask) for ask in asks]

    def lattice(self, ask) -> Lattice:
        n, k, at = min(ask.places, self.block - 1), self.candidates, ask.position
        full = next((f for f in self.known if at < len(f) and f[at] == ask.anchor), [])
        ids = np.array([self.rng.sample(range(4000), k) for _ in range(n)], np.int64)
        for place, id in enumerate(full[at + 1 : at + 1 + n]):
            if self.rng.random() < self.right:
                ids[place, 0] = id
        logits = np.tile(np.linspace(5, 0, k, dtype=np.float32), (n, 1))
        return Lattice(ids, logits, np.zeros((n, k, k), np.float32))


def taken(record: Run) -> float:
    """Milliseconds from the first token to the end."""
    return record.total_ms - record.ttft["total"]


def compare(opened, name: str, pairs: int, stand_in: bool, cpu_time: bool) -> None:
    text, streams, params = WORKLOADS[name]
    drafting = opened.engine.drafting
    off = run(opened, text, streams, draft="off", **params)
    if stand_in:
        drafting.drafter.right = 0.05 if "prose" in name else 0.7
        ids = prompt_ids(opened, text)
        drafting.drafter.known = [ids + stream.token_ids for stream in off.streams]
    ratios, said, last = [], {off.stats["token_sha"]}, off
    for _ in range(pairs):
        ms = {"on": 0.0, "off": 0.0}
        for way in ("off", "on", "on", "off"):
            began = time.process_time()
            record = run(opened, text, streams, draft=way, **params)
            ms[way] += time.process_time() - began if cpu_time else taken(record)
            said.add(record.stats["token_sha"])
            last = record if way == "on" else last
        ratios.append(ms["off"] / ms["on"])
    assert len(said) == 1, f"{name}: other tokens with drafts: {said}"
    stats, expected = last.stats, last.drafting["expected_tokens_per_round"] or 1
    sources = " ".join(f"{source} {n}" for source, n in stats["draft_source"].items())
    ratio, low, high = statistics.median(ratios), min(ratios), max(ratios)
    print(
        f"{name:>24}: x {ratio:.3f} ({low:.3f} to {high:.3f}), {stats['tokens_per_round']:.2f} tokens a round, "
        f"{expected:.2f} expected, {stats['accepted']} of {stats['drafted']} rows; rounds: {sources}; {said.pop()}",
        flush=True,
    )


def prompt_ids(opened, text: str) -> list[int]:
    from tfmagic import protocol

    return list(opened.prepare([protocol.Message("user", [protocol.Text(text)])], {}).ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="?", type=int, default=5)
    parser.add_argument("--drafter", help="a drafter's folder, or stand-in; by default the model's own")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds")
    parser.add_argument("--only", help="workloads whose name holds this")
    asked = parser.parse_args()
    stand_in = asked.drafter == "stand-in"
    began = time.perf_counter()
    settings = Settings(drafter="none" if stand_in else asked.drafter)
    opened = open_model(None, "cpu", settings, lambda event: None, lambda what: None)
    if stand_in:
        opened.engine.drafting.drafter = StandIn(0.7)
        opened.engine.model.tap(StandIn.layers)
    drafter = opened.engine.drafting.drafter
    print(f"{opened.name} on {opened.device}, ready after {time.perf_counter() - began:.1f} s; drafter: "
          f"{drafter.name if drafter else 'none'}")  # fmt: skip
    run(opened, "Hello!")
    for name in WORKLOADS:
        if not asked.only or asked.only in name:
            compare(opened, name, asked.pairs, stand_in, asked.cpu_time)


if __name__ == "__main__":
    main()
