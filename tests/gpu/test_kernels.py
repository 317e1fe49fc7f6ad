"""The row law on a GPU, and its agreement with the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.test_row_law import ROWS, random, rowwise
from tfmagic.engine import families
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.draft import chain
from tfmagic.kernels import exact

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parent.parent / "golden" / "qwen3_5_tiny"


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus", "gelu", "gelu_tanh", "unit"])
def test_elementwise_rows_keep_their_bits(name):
    f, x = rowwise()[name], 3 * random(256, 96).cuda()
    alone = torch.cat([f(x[i : i + 1]) for i in range(len(x))])
    assert all(torch.equal(f(x[:rows]), alone[:rows]) for rows in ROWS)


def test_an_exact_product_has_the_bits_of_the_cpu():
    a, b = random(200, 320), random(320, 77, seed=1)
    assert torch.equal(exact.matmul(a.cuda(), b.cuda()).cpu(), exact.matmul(a, b))


def test_passes_keep_the_promises_and_say_what_the_cpu_says():
    ids = torch.randint(0, 240, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    positions, said = torch.arange(300).expand(3, -1), {}
    for device in ("cpu", "cuda:0"):
        model = families.load(Checkpoint(GOLDEN), device, form="exact")
        state = model.new_state()
        row, kept = model.prompt_pass(state, ids, {}, positions, [256])
        resumed = model.restore(kept[256].named(), 256)
        again, _ = model.prompt_pass(resumed, ids[256:], {}, positions[:, 256:], [])
        assert torch.equal(again, row)
        window, alone = [int(row.argmax()), *ids[:7]], state.fork()
        together, _ = model.round_pass([state, resumed, state.fork()], [chain(window[:n]) for n in (8, 1, 3)])
        for i, id in enumerate(window):
            rows, change = model.round_pass([alone], [chain([id])])
            model.commit([alone], change, [[0]])
            assert torch.equal(rows[0], together[i])
        assert torch.equal(together[8], together[0]) and torch.equal(together[9:], together[:3])
        said[device] = together.cpu()
    assert float((said["cpu"] - said["cuda:0"]).abs().max()) < 5e-4
