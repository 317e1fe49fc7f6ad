"""A short second training on the CPU from the shipped weights, for kinds of turns that came out weak.

    python -m tfmagic.engine.embedded.polish --out DIR --steps 250

The tower and the embedding stay as they are; small steps over conversations in which the weak kinds are
frequent and everything else occurs, so that nothing is forgotten. Deterministic for a seed.
"""

import argparse
import math
import random
import time
from pathlib import Path

import torch

from . import MODEL, conversation, talk, tasks
from .conversation import LONGEST_PICTURE, Layout
from .evaluate import load
from .export import save_weights
from .feed import make_talker

MIX = (
    (talk.story, 12),
    (tasks.copy, 5),
    (tasks.edit, 4),
    (tasks.lists, 3),
    (tasks.sums, 3),
    (talk.refuse, 2.5),
    (talk.chat, 2),
    (tasks.holders, 1.5),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--corpus", default=".data/corpus.json.gz")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    net = load(args.model)
    net.dtype = getattr(torch, args.dtype)
    trained = [w.requires_grad_() for n, w in net.weights.items() if "visual" not in n and "embed_tokens" not in n]
    adam = torch.optim.AdamW(trained, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
    makers, weights = zip(*MIX)
    talker = make_talker(
        args.corpus, tokenizer_path=args.model / "tokenizer.json", makers=makers, weights=weights, text_share=0.75
    )
    layout, draw = Layout(args.rows, 320), random.Random(args.seed)
    arrays = layout.views(memoryview(bytearray(layout.offsets()[1])))
    begun, mean = time.time(), 0.0
    for step in range(args.steps):
        rate = args.rate * min(1, (step + 1) / 15) * max(0.02, 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in adam.param_groups:
            group["lr"] = rate
        conversation.fill(arrays, layout, talker, draw)
        batch = {name: torch.from_numpy(a) for name, a in arrays.items()}
        losses, _ = net.judge(batch, LONGEST_PICTURE)
        weight = batch["weight"].float()
        loss = (losses * weight).sum() / weight.sum()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        adam.step()
        mean += (loss.item() - mean) / min(step + 1, 25)
        if step % 10 == 9 or step == 0:
            print(f"step {step + 1} loss {mean:.4f} {time.time() - begun:.0f} s", flush=True)
        if step % 50 == 49:
            save_weights(args.out, net.weights)
    save_weights(args.out, net.weights)


if __name__ == "__main__":
    main()
