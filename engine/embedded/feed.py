"""Worker processes that make batches in shared memory."""

import multiprocessing
import os
import random

from . import conversation, corpora, tokenizer, words


def make_talker(corpus, held=False, tokenizer_path=None, **options):
    """A conversation maker over the corpus file `corpus`."""
    encoder = tokenizer.Encoder(tokenizer_path or tokenizer.MODEL / "tokenizer.json")
    return conversation.Talker(encoder, words.Words(corpora.load(corpus), encoder.pieces(), held), **options)


def _work(memory, size, layout, corpus, tokenizer_path, seed, free, full):
    os.environ["OMP_NUM_THREADS"] = "1"
    talker, draw = make_talker(corpus, tokenizer_path=tokenizer_path), random.Random(seed)
    slots = {}
    while True:
        slot = free.get()
        if slot not in slots:
            slots[slot] = layout.views(memoryview(memory)[slot * size : (slot + 1) * size])
        conversation.fill(slots[slot], layout, talker, draw)
        full.put(slot)


class Feed:
    """Batches of one layout, made by `workers` processes in `slots` places of shared memory."""

    def __init__(self, layout, corpus, seed, workers, slots, tokenizer_path=None):
        self.size = layout.offsets()[1]
        context = multiprocessing.get_context("fork")
        self.memory = context.RawArray("B", slots * self.size)
        self.free, self.full, self.processes = context.Queue(), context.Queue(), []
        for slot in range(slots):
            self.free.put(slot)
        for worker in range(workers):
            arguments = (
                self.memory,
                self.size,
                layout,
                corpus,
                tokenizer_path,
                seed * 1009 + worker,
                self.free,
                self.full,
            )
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def take(self, target):
        """Copy the next batch into the CPU byte tensor `target`."""
        import torch

        slot = self.full.get()
        target.copy_(torch.frombuffer(self.memory, dtype=torch.uint8, count=self.size, offset=slot * self.size))
        self.free.put(slot)

    def close(self):
        for process in self.processes:
            process.terminate()
