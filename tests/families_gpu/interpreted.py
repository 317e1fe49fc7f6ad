"""A small model's passes, the tensors that they leave: `python -m tests.families_gpu.interpreted FOLDER KV OUT`.

With TRITON_INTERPRET=1 in the environment the Triton forms compute them, without it their twins.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.draft import Window
from tfmagic.engine.families.qwen3_5.gpu.model import GREEDY, Model
from tfmagic.engine.families.qwen3_5.gpu.pool import Plan
from tfmagic.engine.sampling import Draw
from tfmagic.kernels.gpu.common import INTERPRETED

from ..families.conftest import straight


def passes(folder: Path, kv: str) -> dict[str, torch.Tensor]:
    if INTERPRETED:
        from tests.kernels_gpu.mended import mend

        mend()
    model = Model(Checkpoint(folder), "cpu", kv=kv, planned=Plan(slots=6, pages=8, longest=4, views=1 << 20, kv=kv))
    ids, found = [(31 * i * i + 17 * i) % 4900 for i in range(70)], {}
    one, two, three = (model.new_state() for _ in range(3))
    found["captured"], _ = model.prompt_pass(one, ids, {}, straight(70), [64])
    packed = [(two, ids[:5], {}, straight(5), []), (three, ids[:66], {}, straight(66), [64])]
    for name, (logits, *_) in zip(("packed", "packed with a mark"), model.prompt_passes(packed)):
        found[name] = logits
    by = replace(GREEDY, size=5000, logprobs=1)
    windows = [Window([5, 6, 7, 8], [-1, 0, 0, 1]), Window([9], [-1])]
    outcomes = model.round([one, two], windows, [Draw(by, 1, 71), Draw(by, 1, 6)])
    rows = {"round 0": outcomes[0].walk.rows, "round 1": [4]}
    found |= {name: model.text.space.logits[own].clone() for name, own in rows.items()}
    for i, outcome in enumerate(outcomes):
        found[f"round {i}: logprobs"] = torch.tensor([one.drawn for one in outcome.likely])
    found |= {name: x.clone() for state in (one,) for name, x in state.named().items()}
    found["tower"] = model.tower(torch.randn(16, 1536, generator=torch.Generator().manual_seed(1)), (1, 4, 4))
    return found


if __name__ == "__main__":
    torch.save(passes(Path(sys.argv[1]), sys.argv[2]), sys.argv[3])
