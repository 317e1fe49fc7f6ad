"""Train the embedded model: one command, resumable, one or several GPUs of a host.

    python -m tfmagic.engine.embedded.corpora .data/corpus.json.gz      # once: fetch the texts
    python -m tfmagic.engine.embedded.tokenizer                         # once: make the tokenizer
    python -m tfmagic.engine.embedded.train --out out --seconds 1000
    python -m tfmagic.engine.embedded.train --out out --seconds 1000 --resume
    python -m tfmagic.engine.embedded.train --out out2 --seconds 175 --start engine/embedded/model --peak 0.3

The schedule follows the time trained, not a step count: warm-up, flat, cosine to 1 %. Every minute the whole
state goes to `OUT/state.pt`; bf16 weights go to `OUT/model` every other minute and at the end. Without a GPU
it runs the twins on the CPU (for tests; add --rows 2 --length 320 --steps 3).
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from . import conversation
from .conversation import KINDS, LONGEST_PICTURE, Layout
from .feed import Feed, make_talker

WARM_UP, FLAT = 150, 0.35  # steps; share of the time
BLOCK = 16  # steps between looks at the clock


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    add("--corpus", default=".data/corpus.json.gz")
    add("--tokenizer", help="a tokenizer.json other than the model folder's")
    add("--seconds", type=float, default=1000, help="time to train in all, earlier parts counted in")
    add("--steps", type=int, default=10**9, help="stop after so many steps")
    add("--rows", type=int, default=128, help="conversations a step and GPU")
    add("--length", type=int, default=320, help="tokens of a conversation")
    add("--long", type=int, default=1024, help="tokens of the long conversations (0: none)")
    add("--workers", type=int, default=8, help="processes a GPU that make conversations")
    add("--seed", type=int, default=1)
    add("--resume", action="store_true")
    add("--start", type=Path, help="a model folder to start from in place of random weights")
    add("--peak", type=float, default=1.0, help="the highest factor of the learning rates")
    add("--log", type=float, default=20, help="seconds between log lines")
    add("--examine", type=float, default=120, help="seconds between evaluations")
    add("--rank", type=int, default=0, help=argparse.SUPPRESS)
    add("--world", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


class Log:
    def __init__(self, path, quiet):
        self.start, self.path, self.quiet = time.time(), path, quiet

    def __call__(self, *parts):
        if not self.quiet:
            line = f"[{time.time() - self.start:6.1f}] " + " ".join(map(str, parts))
            print(line, flush=True)
            with open(self.path, "a") as file:
                file.write(line + "\n")


def choose_kernels(torch, say):
    """-> delta, segments, compile_ for this machine, each checked against its twin; the twin where it fails."""
    from . import delta, net

    if not torch.cuda.is_available():
        return delta.delta_twin, net.segments_twin, lambda f: f
    rule, segments = torch.compile(delta.delta_twin, dynamic=False), net.segments_twin
    try:
        errors = delta.compare(delta.delta_kernel, "cuda")
        say("delta kernel errors", [f"{e:.1e}" for e in errors], f"{_time_rule(torch, delta.delta_kernel):.2f} ms")
        if max(errors) < 0.01:
            rule = delta.delta_kernel
    except Exception as error:
        say("delta kernel failed:", repr(error)[:300])
    if rule is not delta.delta_kernel:
        say("the torch twin takes the place of the delta kernel")
    try:
        from torch.nn.attention.varlen import varlen_attn

        def packed(q, k, v, ends, longest):
            return varlen_attn(q, k, v, ends, ends, longest, longest)

        q, k, v = (torch.randn(384, 4, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        ends = torch.tensor([0, 100, 384, 384, 384], device="cuda", dtype=torch.int32)
        twin = net.segments_twin(q, k, v, ends, 284)
        error = ((packed(q, k, v, ends, 284) - twin).float().norm() / twin.float().norm()).item()
        say(f"packed attention error {error:.1e}")
        segments = packed if error < 0.02 else segments
    except Exception as error:
        say("packed attention failed:", repr(error)[:300])
    return rule, segments, lambda f: torch.compile(f, dynamic=False, fullgraph=True)


def _time_rule(torch, rule):
    """Milliseconds of forward and backward at training size."""

    def new(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    inputs = [torch.nn.functional.normalize(new(128, 320, 4, 64), dim=-1) for _ in range(2)] + [new(128, 320, 8, 64)]
    inputs += [-torch.rand(128, 320, 8, device="cuda"), torch.rand(128, 320, 8, device="cuda")]
    inputs = [a.requires_grad_() for a in inputs]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(6):
        if i == 1:
            start.record()
        rule(*inputs).sum().backward()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 5


class Step:
    """Forward and backward of one layout over a fixed device buffer; a CUDA graph where there is CUDA."""

    def __init__(self, torch, net, store, layout, device):
        self.torch, self.net, self.store, self.graph = torch, net, store, None
        table, size = layout.offsets()
        self.cuda = device.type == "cuda"
        self.blob = torch.zeros(size, dtype=torch.uint8, device=device)
        self.stages = [torch.zeros(size, dtype=torch.uint8, pin_memory=self.cuda) for _ in range(4)]
        self.events, self.turn = [None] * 4, 0
        self.batch = {}
        for name, (at, dtype, shape) in table.items():
            part = self.blob[at : at + int(np.prod(shape)) * np.dtype(dtype).itemsize]
            self.batch[name] = part.view(getattr(torch, np.dtype(dtype).name)).view(shape)
        self.loss = self.right = self.ok = None

    def load(self, feed):
        """Bring the feed's next batch to the device."""
        i = self.turn = (self.turn + 1) % 4
        if self.events[i]:
            self.events[i].synchronize()
        feed.take(self.stages[i])
        self.blob.copy_(self.stages[i], non_blocking=True)
        if self.cuda:
            self.events[i] = self.torch.cuda.Event()
            self.events[i].record()

    def compute(self):
        self.store.grad.zero_()
        losses, ok = self.net.judge(self.batch, LONGEST_PICTURE)
        weight = self.batch["weight"].float()
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        self.torch.nan_to_num_(self.store.grad, 0.0, 0.0, 0.0)  # one bad batch must not spoil the weights
        self.loss, self.ok = loss.detach(), ok
        self.right = (ok * weight).sum() / weight.sum()

    def capture(self):
        """Compile by running, then record one pass."""
        if not self.cuda:
            return
        try:
            self.graph = record(self.torch, self.compute)
        except Exception as error:
            print("no CUDA graph, kernels are issued one by one:", repr(error)[:400], flush=True)

    def run(self):
        self.graph.replay() if self.graph else self.compute()


def record(torch, function, warm_up=3):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def exam(torch, args, layout, held, batches, seed):
    """Fixed batches of unseen conversations as byte tensors."""
    import random

    talker, draw, out = make_talker(args.corpus, held, args.tokenizer), random.Random(seed), []
    for _ in range(batches):
        blob = bytearray(layout.offsets()[1])
        conversation.fill(layout.views(memoryview(blob)), layout, talker, draw)
        out.append(torch.frombuffer(blob, dtype=torch.uint8))
    return out


def examine(step, blobs):
    """Exact answers by kind, in per cent: an answer counts when each of its tokens is the argmax."""
    right, total = {}, {}
    for blob in blobs:
        step.blob.copy_(blob)
        step.run()
        used = step.batch["weight"].bool().cpu().numpy()
        ok, kind, answer = (a.cpu().numpy()[used] for a in (step.ok, step.batch["kind"], step.batch["answer"]))
        first = np.flatnonzero(np.diff(answer, prepend=-1))
        for good, k in zip(np.logical_and.reduceat(ok, first), kind[first]):
            total[KINDS[k]] = total.get(KINDS[k], 0) + 1
            right[KINDS[k]] = right.get(KINDS[k], 0) + int(good)
    return {kind: round(100 * right[kind] / total[kind], 1) for kind in KINDS if kind in total}


def scale_at(step, share):
    """Factor of the learning rates."""
    warm = min(1.0, (step + 1) / WARM_UP)
    return warm * (
        1.0 if share < FLAT else max(0.01, 0.5 * (1 + math.cos(math.pi * min(1.0, (share - FLAT) / (1 - FLAT)))))
    )


def is_long(step, share):
    """Which steps train on long conversations: one in eight, in the last two fifths one in three."""
    return step % 3 == 0 if share > 0.6 else step % 8 == 0


def launch_others(args):
    """Start one more process for every further GPU. -> (world, processes)"""
    if args.world:
        return args.world, []
    listing = (
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True) if os.path.exists("/dev/nvidia0") else None
    )
    world = max(1, listing.stdout.count("GPU ")) if listing else 1
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--world", str(world)]
    return world, [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(1, world)]


class Trainer:
    def __init__(self, args, world):
        args.out.mkdir(parents=True, exist_ok=True)
        self.args, self.world, self.say = args, world, Log(args.out / "log.txt", args.rank > 0)
        self.layouts = [Layout(args.rows, args.length)]
        if args.long:
            self.layouts.append(Layout(args.rows * args.length // args.long, args.long))
        workers = (args.workers, max(1, args.workers // 3))
        self.feeds = [  # forked before CUDA starts
            Feed(layout, args.corpus, self.seed(i), workers[i], (40, 16)[i], args.tokenizer)
            for i, layout in enumerate(self.layouts)
        ]
        import torch

        self.torch = torch
        torch.set_num_threads(1)
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", args.rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        if world > 1:
            torch.distributed.init_process_group("nccl" if self.cuda else "gloo", rank=args.rank, world_size=world)
        self.build()

    def seed(self, i):
        """Of the conversations of layout `i`; a resumed run sees new ones."""
        again = int(time.time()) if self.args.resume else 0
        return self.args.seed + 100 * self.args.rank + 7 * i + 1000 * again

    def build(self):
        from . import net as model
        from .export import load_weights
        from .optim import Optimizer, Store

        torch, args, say = self.torch, self.args, self.say
        rule, segments, compile_ = choose_kernels(torch, say)
        start = load_weights(args.start) if args.start else model.initial(seed=args.seed)
        self.store = Store(start, self.device)
        tower = sum(t.numel() for n, t in start.items() if "visual" in n)
        say(
            "text parameters",
            sum(t.numel() for t in start.values()) - tower,
            "tower",
            tower,
            "GPUs",
            self.world,
            "layouts",
            *self.layouts,
        )
        self.optimizer = Optimizer(self.store)
        self.step_number, self.before, self.rows_seen = 0, 0.0, 0
        if args.resume:
            self.restore()
        dtype = torch.bfloat16 if self.cuda else torch.float32
        net = model.Net(self.store.weights, dtype=dtype, delta=rule, segments=segments, compile_=compile_)
        self.steps = [Step(torch, net, self.store, layout, self.device) for layout in self.layouts]
        for step, feed in zip(self.steps, self.feeds):
            step.load(feed)
            begun = time.time()
            step.capture()
            say(f"captured {time.time() - begun:.1f} s")
        self.update = self.optimizer.step
        if self.cuda:
            keep = {
                k: v.clone() if torch.is_tensor(v) else {a: b.clone() for a, b in v.items()}
                for k, v in self.optimizer.state().items()
            }
            graph = record(torch, self.optimizer.step, 1)
            self.optimizer.load(keep)
            self.update = graph.replay
            say(f"optimizer captured; peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        if args.rank == 0:
            first, count = self.layouts[0], 4 if self.cuda else 1
            self.exams = {
                name: exam(torch, args, first, held, count, 10**9 + 7)
                for name, held in (("seen", False), ("held", True))
            }

    def one(self, share):
        """One step of all GPUs."""
        long = len(self.steps) > 1 and is_long(self.step_number, share)
        step = self.steps[long]
        waiting = time.time()
        step.load(self.feeds[long])
        self.waited += time.time() - waiting
        step.run()
        if self.world > 1:
            self.torch.distributed.all_reduce(self.store.grad, op=self.torch.distributed.ReduceOp.SUM)
            self.store.grad.mul_(1 / self.world)
        self.optimizer.prepare(self.step_number, self.args.peak * scale_at(self.step_number, share))
        self.update()
        self.sums += self.torch.stack([step.loss, step.right, self.optimizer.norm])
        self.step_number += 1
        self.rows_seen += self.layouts[long].rows * self.world

    def clock(self):
        """Seconds trained so far, the same number on every GPU's process."""
        seconds = self.before + time.time() - self.begun
        if self.world > 1:
            box = [seconds]
            self.torch.distributed.broadcast_object_list(box, src=0)
            seconds = box[0]
        return seconds

    def train(self):
        args, torch, say = self.args, self.torch, self.say
        self.begun, self.waited = time.time(), 0.0
        self.sums = torch.zeros(3, device=self.device)
        noted = {
            "log": self.begun,
            "exam": self.begun,
            "save": self.begun,
            "step": self.step_number,
            "rows": self.rows_seen,
        }
        seconds = self.clock()
        while seconds < args.seconds and self.step_number < args.steps:
            for _ in range(min(BLOCK, args.steps - self.step_number)):
                self.one(seconds / args.seconds)
            seconds = self.clock()
            if args.rank == 0:
                self.report(noted, seconds)
        say(
            "trained",
            self.step_number,
            "steps,",
            self.rows_seen,
            "conversations,",
            self.step_number * self.layouts[0].tokens * self.world / 1e6,
            "M tokens in",
            round(seconds, 1),
            "s",
        )
        if args.rank == 0:
            self.before = seconds
            self.save(state=True, weights=True, seconds=seconds)
            self.show_exam("END")
        for feed in self.feeds:
            feed.close()

    def report(self, noted, seconds):
        now = time.time()
        if now - noted["log"] > self.args.log:
            number, span = self.step_number - noted["step"], now - noted["log"]
            loss, right, norm = (self.sums / number).tolist()
            rows = (self.rows_seen - noted["rows"]) / span
            self.say(
                f"step {self.step_number}, {seconds:.0f} s: loss {loss:.4f} right {100 * right:.2f} % grad {norm:.2f} "
                f"rows/s {rows:.0f} ms/step {1000 * span / number:.1f} waited {100 * self.waited / span:.0f} %"
            )
            if not math.isfinite(loss):
                self.say("a loss was not finite: its gradients counted as zero")
            self.sums.zero_()
            self.waited = 0.0
            noted.update(log=now, step=self.step_number, rows=self.rows_seen)
        if now - noted["save"] > 60:
            self.save(state=True, weights=int(seconds / 60) % 2 == 0, seconds=seconds)
            noted["save"] = time.time()
        if now - noted["exam"] > self.args.examine:
            self.show_exam(f"EXAM at {seconds:.0f} s")
            noted["exam"] = time.time()

    def show_exam(self, title):
        for name, blobs in self.exams.items():
            result = examine(self.steps[0], blobs)
            self.say(title, name, " ".join(f"{k}={v}" for k, v in result.items()))
            with open(self.args.out / "exams.jsonl", "a") as file:
                file.write(json.dumps(dict(title=title, set=name, rows=self.rows_seen, **result)) + "\n")

    def save(self, state, weights, seconds):
        from .export import save_weights

        if state:
            box = dict(self.optimizer.state(), step=self.step_number, seconds=seconds, rows=self.rows_seen)
            self.torch.save(box, self.args.out / "state.new")
            os.replace(self.args.out / "state.new", self.args.out / "state.pt")
        if weights:
            save_weights(self.args.out / "model", self.store.weights)

    def restore(self):
        box = self.torch.load(self.args.out / "state.pt", map_location=self.device, weights_only=True)
        self.optimizer.load(box)
        self.step_number, self.before, self.rows_seen = box["step"], box["seconds"], box["rows"]
        self.say("resumed at step", self.step_number, "after", round(self.before), "s")


def main():
    args = parse()
    world, others = launch_others(args)
    failed = False
    try:
        Trainer(args, world).train()
    except Exception:
        traceback.print_exc()
        failed = True
    for process in others:
        process.kill() if failed else process.wait()
    sys.stdout.flush()
    os._exit(failed)  # at once: queues of the feeds and NCCL would keep the process


if __name__ == "__main__":
    main()
