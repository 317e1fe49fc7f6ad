"""Train the drafter of the shipped model: one command, resumable.

    python -m tfmagic.engine.embedded.corpora .data/corpus.json.gz           # once: fetch the texts
    python -m tfmagic.engine.embedded.drafter.train --out out --seconds 420  # an H200
    python -m tfmagic.engine.embedded.drafter.train --out out --seconds 420 --resume
    python -m tfmagic.engine.embedded.drafter.export out                     # into the shipped folder

A command that may run for ten minutes has room for `--seconds 420`: its start takes about a minute. On a CPU:
`--rows 8 --anchors 24 --pool 1024 --reuse 6 --seconds 5400`.

A pool of read conversations is drawn from again and again, each time with other anchors; one in `reuse` of a step's
conversations is new. The schedule follows the time trained: warm-up, flat, cosine to 1 %. Every minute the whole
state, but for the pool, goes to `OUT/state.pt`; what is exported is the running average of the weights.
"""

import argparse
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path

from ..conversation import Layout
from ..train import Log, choose_kernels
from .data import Source

WARM_UP, FLAT = 100, 0.35  # steps; share of the time
FIRST = 1 / 8  # of the pool is filled before the first step
AVERAGE = 0.998  # of the running average of the weights, a step


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    add("--corpus", default=".data/corpus.json.gz")
    add("--seconds", type=float, default=420, help="time to train in all, earlier parts counted in")
    add("--steps", type=int, default=10**9, help="stop after so many steps")
    add("--rows", type=int, default=128, help="conversations a step")
    add("--anchors", type=int, default=32, help="drafts learnt from in each of them")
    add("--pool", type=int, default=8192, help="conversations kept")
    add("--reuse", type=int, default=3, help="steps that a conversation is used in, on the average")
    add("--spoken", type=float, default=0.25, help="share of conversations in the target's own words")
    add("--voices", type=int, default=2048, help="conversations spoken at a time")
    add("--length", type=int, default=320, help="tokens of a conversation")
    add("--workers", type=int, default=8, help="processes that make conversations; 0: made in between")
    add("--seed", type=int, default=1)
    add("--resume", action="store_true")
    add("--log", type=float, default=20, help="seconds between log lines")
    add("--examine", type=float, default=120, help="seconds between evaluations")
    add("--exam-rows", type=int, default=64, help="conversations of an evaluation")
    return parser.parse_args(arguments)


def scale_at(step, share):
    """Factor of the learning rates."""
    late = max(0.0, min(1.0, (share - FLAT) / (1 - FLAT)))
    return min(1.0, (step + 1) / WARM_UP) * max(0.01, 0.5 * (1 + math.cos(math.pi * late)))


class Pool:
    """The conversations that steps draw from: filled batch by batch, the oldest replaced."""

    def __init__(self, size):
        self.size, self.rows, self.filled, self.at = size, None, 0, 0

    def put(self, fresh):
        if self.rows is None:
            self.rows = type(fresh)(*(part.new_zeros(self.size, *part.shape[1:]) for part in fresh))
        many = min(len(fresh.ids), self.size - self.at)
        for kept, part in zip(self.rows, fresh):
            kept[self.at : self.at + many] = part[:many]
        self.at = (self.at + many) % self.size
        self.filled = min(self.size, self.filled + many)

    def draw(self, number, torch):
        return self.rows.take(torch.randint(self.filled, (number,), device=self.rows.ids.device))


class Trainer:
    def __init__(self, args):
        args.out.mkdir(parents=True, exist_ok=True)
        self.args, self.say = args, Log(args.out / "log.txt", False)
        self.source = Source(  # its workers are forked before CUDA starts
            args.corpus,
            Layout(args.rows, args.length),
            args.workers,
            args.seed + 1000 * int(time.time()) * args.resume,
            args.spoken,
            args.voices,
        )
        import torch

        from ..optim import Optimizer, Store
        from . import data, net

        self.torch, cuda = torch, torch.cuda.is_available()
        torch.set_num_threads(1)
        torch.manual_seed(args.seed)
        device = torch.device("cuda" if cuda else "cpu")
        self.device_name = torch.cuda.get_device_name() if cuda else "one CPU core"
        rule, segments, _ = choose_kernels(torch, self.say)
        layers = net.CONFIG["dflash_config"]["target_layer_ids"]
        self.target = data.Target(layers, device=device, rule=rule, segments=segments)
        start = net.initial(self.target.final_scale, seed=args.seed)
        self.store = Store(start, device)
        self.optimizer = Optimizer(self.store)
        self.average = self.store.flat.clone()
        self.drafter = net.Drafter(self.store.weights, self.target.embedding, dtype=self.target.net.dtype)
        self.say("parameters", sum(t.numel() for t in start.values()), "on", device, self.source.layout)
        self.step_number, self.before = 0, 0.0
        if args.resume:
            self.restore()
        self.pool, self.due = Pool(args.pool), 0.0
        self.exams = data.exam(args.corpus, self.target, args.exam_rows, args.length) if args.exam_rows else {}
        self.say("exams read")

    def one(self, share):
        """One step -> measures (net.Drafter.loss)."""
        from .data import blocks, choose

        self.due += 1 / self.args.reuse
        while self.due >= 1 or self.pool.filled < self.pool.size * FIRST:
            self.pool.put(self.source.fresh(self.target))
            self.due = max(0.0, self.due - 1)
        rows = self.pool.draw(self.args.rows, self.torch)
        at, real = choose(rows, self.args.anchors)
        self.store.grad.zero_()
        loss, measures = self.drafter.loss(rows, at, real, *blocks(rows, at, self.drafter.block))
        loss.backward()
        self.torch.nan_to_num_(self.store.grad, 0.0, 0.0, 0.0)  # one bad batch must not spoil the weights
        self.optimizer.prepare(self.step_number, scale_at(self.step_number, share))
        self.optimizer.step()
        self.step_number += 1
        self.average.lerp_(self.store.flat, 1 - min(AVERAGE, self.step_number / (self.step_number + 10)))
        return measures

    def train(self):
        args, say, begun = self.args, self.say, time.time()
        noted = {"log": begun, "exam": begun, "save": begun, "step": self.step_number}
        sums = self.torch.zeros(3, device=self.store.flat.device)
        seconds = self.before
        while seconds < args.seconds and self.step_number < args.steps:
            sums += self.one(seconds / args.seconds)
            now = time.time()
            seconds = self.before + now - begun
            if now - noted["log"] > args.log:
                many = self.step_number - noted["step"]
                plain, chosen, right = (sums / many).tolist()
                say(
                    f"step {self.step_number}, {seconds:.0f} s: loss {plain:.4f} selector {chosen:.4f} first right "
                    f"{100 * right:.1f} % ms/step {1000 * (now - noted['log']) / many:.0f} pool {self.pool.filled}"
                )
                sums.zero_()
                noted.update(log=now, step=self.step_number)
            if now - noted["save"] > 60:
                self.save(seconds)
                noted["save"] = now
            if now - noted["exam"] > args.examine:
                self.examine(seconds)
                noted["exam"] = time.time()
        self.save(seconds)
        self.examine(seconds)
        self.source.close()

    def examine(self, seconds):
        """Tokens a round of the averaged weights over the fixed conversations, to the log and to `exams.jsonl`."""
        from .evaluate import table

        trained = self.store.flat.clone()
        self.store.flat.copy_(self.average)
        for name, rows in self.exams.items():
            result = table(self.drafter, rows)
            self.say(f"EXAM {name}", " ".join(f"{kind}={value:.2f}" for kind, (value, _) in result.items()))
            with open(self.args.out / "exams.jsonl", "a") as file:
                file.write(json.dumps({"set": name, "step": self.step_number, "seconds": seconds, **result}) + "\n")
        self.store.flat.copy_(trained)

    def save(self, seconds):
        box = dict(self.optimizer.state(), average=self.average, step=self.step_number, seconds=seconds)
        box["how"] = {n: getattr(self.args, n) for n in ("rows", "anchors", "reuse", "spoken", "length")}
        box["how"]["device"] = self.device_name
        box["spans"] = {name: (at, list(self.store.weights[name].shape)) for name, at in self.store.spans.items()}
        self.torch.save(box, self.args.out / "state.new")
        os.replace(self.args.out / "state.new", self.args.out / "state.pt")

    def restore(self):
        box = self.torch.load(self.args.out / "state.pt", map_location=self.store.flat.device, weights_only=True)
        self.optimizer.load(box)
        self.average.copy_(box["average"])
        self.step_number, self.before = box["step"], box["seconds"]
        self.say("resumed at step", self.step_number, "after", round(self.before), "s")


def main():
    failed = False
    try:
        Trainer(parse()).train()
    except Exception:
        traceback.print_exc()
        failed = True
    sys.stdout.flush()
    os._exit(failed)  # at once: queues of the feed would keep the process


if __name__ == "__main__":
    main()
