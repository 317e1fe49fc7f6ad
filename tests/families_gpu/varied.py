"""A drafter in static form, so that rounds draft for themselves, whose candidates are as good or bad as is asked."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.families.qwen3_5.gpu.rounds import BUCKETS

from ..bench.chosen import Chosen
from ..drafting.conftest import changed, weights
from ..engine.drafters import GOOD, Fixed
from ..engine.test_fuzz import World


class Varied(Chosen):
    """Right candidates have any rank; the others are wrong, doubled or end the reply; and chances are any."""

    MOST, LONGEST = 512, 700

    def begin(self, seed: int, good: float) -> None:
        """`good`: the part of the places at which the first candidate is the right one."""
        g, k = torch.Generator().manual_seed(seed), self.config.candidates
        table = self.MOST, self.LONGEST, self.block - 1
        ranks = torch.randint(0, 2 * k, table, generator=g)  # half of them stand for none
        first = torch.rand(table, generator=g) < good
        others = torch.randint(1, 200, (*table[1:], k), generator=g)
        logits = torch.randn(*table[1:], k, generator=g).mul(2).sort(-1, descending=True).values
        edges, ends = torch.randn(*table[1:], k, k, generator=g), torch.rand(*table[1:], k, generator=g) < 0.02
        made = torch.where(first, 0, ranks), others, ends, logits, edges
        if not hasattr(self.tables, "varied"):
            self.tables.varied = [x.to(self.device) for x in made]
        for to, x in zip(self.tables.varied, made):
            to.copy_(x)
        self._known: list[list[int]] = []

    def knows(self, contexts: list[list[int]]) -> None:
        self._known += contexts
        super().knows(self._known)

    def replace(self, f: dict, out: dict) -> None:
        if not hasattr(self.tables, "varied"):
            self.begin(0, 0.0)
        ranks, others, ends, logits, edges = self.tables.varied
        which, at, id, there = self.following(f)
        place, k = (torch.arange(n, device=self.device) for n in (self.block - 1, self.config.candidates))
        at = at[:, None]
        right = there[..., None] & (k == ranks[which[:, None], at, place][..., None])
        beside = torch.where(ends[at, place], 250, (id[..., None] + others[at, place]) % self.config.guessed)
        out["ids"].copy_(torch.where(right, id[..., None], beside))
        out["logits"].copy_(logits[at, place])
        out["edges"].copy_(edges[at, place])


def varied(target, folder: Path, size: int) -> Varied:
    """For a target in the bf16 form. folder: where the drafter is written. size: ids that may be drawn."""
    vocab, hidden = target.embedding().shape
    fits = {"hidden_size": hidden, "vocab_size": vocab, "num_target_layers": target.depth, "mask_token_id": 249}
    wide = {"head_dim": 64, "conv_group_size": 16, "intermediate_size": 768, "sliding_window": 40, "block_size": 8}
    c = changed(**fits | wide | {"target_layer_ids": [0, 2]})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(c))
    save_file(weights(c), folder / "model.safetensors")
    return Varied(Checkpoint(folder), target, target.device, size)


class Drafted(World):
    """A world some of whose drafters are such, and are asked more often than not."""

    drafts, longest = ("on", "tree", "tree", "tree", "block", "tree", "tree", "copy", "off"), 20
    curves = None, *(Fixed({1: {1: 5.0, 16: last}, 16: {16: 6.0, 256: 30.0}}, BUCKETS) for last in (5.1, 9.0, 90.0))

    def __init__(self, model, pictures, drafter: Varied):
        super().__init__(model, pictures)
        self.varied = drafter

    def drafter(self, ways, seed: int):
        if seed % 3 == 0:
            return super().drafter(ways, seed)
        self.varied.__dict__.pop("lattices", None)  # a clock of the last schedule's
        self.varied.begin(seed, 0.7 if ways == list(GOOD) else 0.2)
        return self.varied
