"""What a draft takes: `python -m tests.bench.drafter [--shape 27b|9b|4b|embedded] [--device cuda:0] [--bits 4]`.

A drafter of random weights, of the published shape for a 27B target or of the embedded model's, and as much of a target
as it borrows; on a GPU in its static form, `--form growing` for the other. For 1, 4 and 16 streams: milliseconds from
the taps of the last round, 5 rows a stream, to candidates on the host; beside it, on a GPU, the launch alone, and the
least that the bytes of weights and contexts could take at `--bandwidth`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import cached_property

import torch

from tfmagic.engine.drafting.block import Ask, Drafter
from tfmagic.engine.drafting.dflash.weights import quantize_rows
from tfmagic.engine.drafting.static import StaticDrafter
from tfmagic.kernels.gpu import affine, linear

BOTH = {
    "architectures": ["DFlash2DraftModel"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "is_causal": False,
    "dflash_config": {"block_size": 8, "conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 16},
}


def shape(hidden: int, intermediate: int, depth: int, vocab: int = 248_320) -> tuple[dict, dict, int, int]:
    """The published drafter of a 27B, for a target of other sizes: config, dflash_config, the target's layers, rows of
    context."""
    sizes = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 5, "vocab_size": vocab, "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 2048, "use_sliding_window": True,
    }  # fmt: skip
    taps = [5 + (depth - 8) * i // 4 for i in range(5)]
    return sizes, {"selector_rank": 256, "mask_token_id": vocab - 250, "target_layer_ids": taps}, depth, 2047


SHAPES = {
    "27b": shape(5120, 17408, 64),
    "9b": shape(4096, 12288, 32),
    "4b": shape(2560, 9216, 32),
    "embedded": (
        {"hidden_size": 320, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 4096},
        {"selector_rank": 128, "mask_token_id": 4079, "target_layer_ids": [1, 3, 5]},
        8,
        300,
    ),
    "tiny": (
        {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 5000},
        {"selector_rank": 32, "mask_token_id": 4990, "target_layer_ids": [1, 3]},
        4,
        300,
    ),
}  # fmt: skip


class Made:
    """A checkpoint and a target of random numbers. `bits`: of the target's head, too."""

    def __init__(self, shape: str, device: str, bits: int, ids: int | None = None):
        sizes, own, self.depth, self.context = SHAPES[shape]
        self.config = BOTH | sizes | {"dflash_config": BOTH["dflash_config"] | own}
        self.device, self.bits, self.bytes = torch.device(device), bits, 0
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.ids = min(ids or sizes["vocab_size"], sizes["vocab_size"])

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) * shape[-1] ** -0.5

    def tensors(self, device):
        return self

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        x = self.random(*shape)
        self.bytes += 0 if "codebook" in name else x.numel() * self.size
        return x

    @property
    def size(self) -> float:
        """Bytes a number of a matrix."""
        return 4.5 / 8 if self.bits == 4 and self.device.type == "cuda" else self.dtype.itemsize

    def leftover(self) -> list[str]:
        return []

    @cached_property
    def matrix(self) -> torch.Tensor:
        return self.random(self.config["vocab_size"], self.config["hidden_size"])

    def embedding(self) -> torch.Tensor:
        return self.matrix

    def head(self, size: int):
        self.bytes += size * self.matrix.shape[1] * self.size
        if self.device.type == "cpu":
            return lambda rows: torch.nn.functional.linear(rows, self.matrix[:size])
        q = quantize_rows(self.matrix) if self.bits == 4 else None
        w = affine.Affine(q.q, q.scales, q.biases, 4, q.group) if q else linear.Dense(self.matrix)
        w = w.first(size)
        return lambda rows: linear.logits(rows, w)


def median_ms(run, repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[5:])


def launch_ms(drafter: StaticDrafter, streams: int) -> float:
    """Of the graph alone, by the device's own clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(20):
        drafter.batches[streams].launch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="embedded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bits", type=int, choices=(4, 16), default=16)
    parser.add_argument("--form", choices=("static", "growing"), help="static on a GPU, growing on a CPU")
    parser.add_argument("--ids", type=int, help="guess of the first so many ids only")
    parser.add_argument("--bandwidth", type=float, default=4260, help="GB/s")
    asked = parser.parse_args()
    made = Made(asked.shape, asked.device, asked.bits, asked.ids)
    gpu = made.device.type == "cuda"
    static = (asked.form or ("static" if gpu else "growing")) == "static"

    drafter = (StaticDrafter if static else Drafter)(made, made, asked.device, size=made.ids, bits=asked.bits)
    print(f"{drafter.name}, {made.context} rows of context, {made.ids:,} ids; weights {made.bytes / 1e9:.3f} GB")
    if static:
        print(drafter.plan)
    c, width = drafter.config, len(drafter.layers) * made.config["hidden_size"]
    for streams in (1, 4, 16):
        contexts = [drafter.context() for _ in range(streams)]
        for context in contexts:
            drafter.extend(context, made.random(made.context, width), 0)
        rows = made.random(5, width)

        def draft(contexts=contexts, rows=rows):
            for context in contexts:
                drafter.extend(context, rows, context.end)
            drafter.lattices([Ask(context, 7, context.end, drafter.block - 1) for context in contexts])

        ms = median_ms(draft)
        held = 2 * streams * made.context * c.layers * c.kv_heads * c.head_dim * made.dtype.itemsize
        least = (made.bytes + held) / asked.bandwidth / 1e6
        alone = f", launch {launch_ms(drafter, streams):7.3f}" if static and gpu else ""
        print(f"{streams:3} streams: {ms:7.3f} ms{alone}, at least {least:.3f}: {least / ms:.0%} of the bandwidth")
        del contexts, draft, context


if __name__ == "__main__":
    main()
