"""Speeds of the attention and Gated DeltaNet kernels on one GPU, one layer at a time.

    python -m tests.bench.mixers [--shapes 27B,9B] [--only attention|round|tower|chunks|tree]

Each line: microseconds (median of CUDA graph replays), and what they come to in TFLOP/s or GB/s.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from tests.kernels_gpu.cases import Draws, chain, ints, mixer, mixer_rows, packed, planned, tree
from tfmagic.kernels.gpu import attention, conv, delta, delta_rounds, pages, tower
from tfmagic.kernels.gpu.conv import Heads
from tfmagic.kernels.gpu.pages import PAGE

DEVICE = "cuda"
ATTENTION = {"27B": (24, 4, 256), "9B": (16, 4, 256)}
MIXERS = {"27B": Heads(16, 48, 128, 128), "9B": Heads(16, 32, 128, 128)}


def microseconds(call: Callable[..., object], *args: object, repeats: int = 15) -> float:
    """Of one call, the median of `repeats` replays of its graph; caches are as the call before left them."""
    for _ in range(2):
        call(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*args)
    took = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(1000 * start.elapsed_time(end))
    return statistics.median(took)


def say(name: str, us: float, flops: float = 0, moved: float = 0) -> None:
    rates = [f"{flops / us / 1e6:8.1f} TFLOP/s"] if flops else []
    rates += [f"{moved / us / 1e3:8.0f} GB/s"] if moved else []
    print(f"{name:56} {us:9.1f} us  {'  '.join(rates)}", flush=True)


def filled(streams: int, rows: int, kv: int, d: int, fp8: bool):
    """Pages of so many streams of so many rows, and their table."""
    each = -(-rows // PAGE) + 1
    held = pages.pages(streams * each, kv, d, fp8, DEVICE)
    draws = Draws(0, DEVICE)
    one = pages.stored(draws(kv, PAGE, d), draws(kv, PAGE, d), fp8)
    for x, y in zip(held, one):
        if x is not None:
            x.copy_(y)
    return held, torch.randperm(streams * each).int().view(streams, each).to(DEVICE)


def prompt_attention(name: str) -> None:
    heads, kv, d = ATTENTION[name]
    for start, rows in ((0, 1024), (0, 8192), (98304, 4096)):
        for fp8 in (False, True):
            held, table = filled(1, start + rows, kv, d, fp8)
            q, plan = Draws(1, DEVICE)(rows, heads, d), packed([(0, start, rows)], device=DEVICE)
            us = microseconds(attention.prompt_attention, q, held, table, plan, repeats=5)
            flops = 4 * heads * d * rows * (start + rows / 2)
            say(f"{name} prompt attention {start}+{rows} {'fp8' if fp8 else 'bf16'}", us, flops)


def round_attention(name: str) -> None:
    heads, kv, d = ATTENTION[name]
    for streams, rows, context in ((1, 1, 1024), (1, 1, 32768), (1, 16, 32768), (16, 1, 8192), (16, 16, 8192)):
        for fp8 in (False, True):
            held, table = filled(streams, context, kv, d, fp8)
            draws = Draws(1, DEVICE)
            q = draws(streams, rows, heads, d)
            own = pages.stored(draws(streams, rows, kv, d), draws(streams, rows, kv, d), fp8)
            slots, committed = ints(*range(streams), device=DEVICE), ints(*[context] * streams, device=DEVICE)
            windows = planned([tree(rows, s) for s in range(streams)], rows, DEVICE)
            room = attention.partials(streams, rows, heads, d, streams * (context // PAGE + 1), DEVICE)
            us = microseconds(attention.round_attention, q, own, held, table, slots, committed, windows, room)
            moved = streams * context * kv * 2 * (d + 4 if fp8 else 2 * d)
            flops = 4 * heads * d * streams * rows * context
            say(f"{name} round attention {streams}x{rows} over {context} {'fp8' if fp8 else 'bf16'}", us, flops, moved)


def tower_attention(name: str) -> None:
    rows = 4 * 4096
    x = tower.split(*Draws(1, DEVICE)(rows, 3, 16, 72).unbind(1))
    lengths = ints(*[4096] * 4, device=DEVICE)
    say("tower attention, 4 x 4096 patches, 16 x 72", microseconds(tower.tower_attention, x, lengths),
        4 * 16 * 72 * rows * 4096)  # fmt: skip


def chunks(name: str) -> None:
    heads = MIXERS[name]
    weights = mixer(heads, device=DEVICE)
    for parts in ([(0, 0, 4096)], [(i, 0, 512) for i in range(8)], [(0, 0, 128)]):
        rows = sum(n for _, _, n in parts)
        plan, (m, a, b) = packed(parts, device=DEVICE), mixer_rows(heads, rows, device=DEVICE)
        past = Draws(2, DEVICE)(8, 3, heads.channels)
        states = torch.zeros(8, heads.values, heads.dk, heads.dv, device=DEVICE)
        x = conv.convolve(m, a, b, past, weights, heads, plan)
        us = microseconds(conv.convolve, m, a, b, past, weights, heads, plan)
        say(f"{name} convolution {len(parts)} x {parts[0][2]}", us, moved=4 * rows * heads.channels)
        us = microseconds(delta.delta_chunks, x, states, plan)
        flops = rows * heads.values * (2 * 64 * (2 * heads.dk + 2 * heads.dv) + 6 * heads.dk * heads.dv)
        say(f"{name} delta chunks {len(parts)} x {parts[0][2]}", us, flops)


def trees(name: str) -> None:
    heads = MIXERS[name]
    weights = mixer(heads, device=DEVICE)
    for streams, rows, kind in ((1, 1, chain), (1, 16, chain), (1, 16, tree), (16, 1, chain), (16, 16, tree)):
        m, a, b = mixer_rows(heads, streams, rows, device=DEVICE)
        past = Draws(2, DEVICE)(streams, 3, heads.channels)
        states = torch.zeros(streams, heads.values, heads.dk, heads.dv, device=DEVICE)
        slots = ints(*range(streams), device=DEVICE)
        plan = planned([chain(rows) if kind is chain else tree(rows, s) for s in range(streams)], rows, DEVICE)
        x = conv.convolve_tree(m, a, b, past, slots, weights, heads, plan)
        label, state = f"{name} {{}} {streams} x {rows} {kind.__name__}", states.numel() * 4
        say(label.format("convolution"),
            microseconds(conv.convolve_tree, m, a, b, past, slots, weights, heads, plan))  # fmt: skip
        _, u = delta_rounds.delta_tree(x, states, slots, plan)
        say(label.format("delta tree"), microseconds(delta_rounds.delta_tree, x, states, slots, plan), moved=state)
        path = torch.arange(rows, dtype=torch.int32, device=DEVICE).expand(streams, rows).contiguous()
        steps = ints(*[min(rows, 5)] * streams, device=DEVICE)
        taken = states[None], x.k[None], x.decay[None], u[None], slots, path, steps
        us = microseconds(delta_rounds.delta_commit, *taken)
        say(label.format("delta commit"), us, moved=2 * state)


PARTS = {"attention": prompt_attention, "round": round_attention, "tower": tower_attention, "chunks": chunks,
         "tree": trees}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="27B,9B")
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    for part, measure in PARTS.items():
        if options.only in (None, part):
            for name in options.shapes.split(","):
                measure(name)


if __name__ == "__main__":
    main()
