"""The block drafter on a GPU: bf16, and 4-bit matrices that stay packed, against the CPU's float32; and its graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tfmagic.engine import families
from tfmagic.engine.cache.store import Store
from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.drafting.block import Ask, Drafter
from tfmagic.engine.drafting.dflash import weights
from tfmagic.engine.drafting.static import CONTEXTS, StaticDrafter
from tfmagic.engine.loop import Engine
from tfmagic.kernels.gpu import block, relay, tree
from tfmagic.kernels.gpu.block import Ring, Seen

from ..engine.conftest import GREEDY, SEEDED, Bench, letter, text_prompt
from ..kernels_gpu import test_relay as handed
from ..kernels_gpu import test_tree as trees
from .conftest import FIRST, Target, changed, taps

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "block_size": 8, "num_hidden_layers": 2}
SHAPES = [{}, {"is_causal": True}, FIRST, {"sliding_window": 4}, {"sliding_window": 100}]


class OnGpu(Target):
    def __init__(self):
        super().__init__(hidden=64)
        self.matrices = [x.cuda().bfloat16() for x in self.matrices]

    def head(self, size: int):
        return lambda rows: (rows @ self.matrices[1][:size].t()).float()


def shared(a, b) -> float:
    """Of the candidates of two lattices, the part that both have."""
    return float(np.mean([len({*x} & {*y}) / len(x) for x, y in zip(a.ids, b.ids)]))


def apart(a, b) -> float:
    """How far the logits of b are from those of a, as a part of them."""
    return float(np.linalg.norm(a.logits - b.logits) / np.linalg.norm(a.logits))


@pytest.mark.parametrize("changes", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [16, 4])
def test_a_gpu_drafts_as_a_cpu_does(write, changes, bits):
    folder = write(changed(**WIDE | changes))
    found = []
    for form, device, target in (
        (Drafter, "cpu", Target(hidden=64)), (Drafter, "cuda:0", OnGpu()), (StaticDrafter, "cuda:0", OnGpu())
    ):  # fmt: skip
        drafter = form(Checkpoint(folder), target, device, bits=bits)
        asks = []
        for i, rows in enumerate((1, 30, 300, 7, 0)):
            context = drafter.context()
            for at in range(0, rows, 40):
                drafter.extend(context, taps(rows, i, 128)[at : at + 40].to(drafter.device), at)
            asks.append(Ask(context, 7 + i, rows, 7))
        found.append([drafter.lattices(asks), *(drafter.lattices([ask]) for ask in asks)])
    exact, *others = [[lattice for lattices in each for lattice in lattices] for each in found]
    for other in others:
        for a, b in zip(exact, other, strict=True):
            assert b.ids.shape == a.ids.shape and np.isfinite(b.logits).all() and np.isfinite(b.edges).all()
            # In bf16 on a CPU logits differ by 0.06; in 4 bits, where rounding first to bf16 turns values, by 0.28.
            assert apart(a, b) < (0.12 if bits == 16 else 0.5)
        # Compared together: one place alone may be unlucky.
        assert np.mean([shared(a, b) for a, b in zip(exact, other)]) > (0.85 if bits == 16 else 0.6)


def test_rounds_of_streams_that_come_and_go(write):
    """Every bucket's graph, forks, restarts and slots used again, against the same form on a CPU in bf16."""
    folder, rng = write(changed(**WIDE)), np.random.default_rng(5)
    forms = [StaticDrafter(Checkpoint(folder), OnGpu(), "cuda:0")]
    target = Target(hidden=64)
    target.matrices = [x.bfloat16().float() for x in target.matrices]
    forms.append(StaticDrafter(Checkpoint(folder), target, dtype=torch.bfloat16))
    held, alike = [[], []], []
    for step in range(60):
        action = rng.integers(4)
        if action == 0 and len(held[0]) < CONTEXTS:
            rows, start = int(rng.integers(0, 200)), int(rng.integers(0, 50))
            for form, own in zip(forms, held):
                own.append(form.context())
                form.extend(own[-1], taps(rows, step, 128).to(form.device), start)
        elif action == 1 and 0 < len(held[0]) < CONTEXTS:
            i = int(rng.integers(len(held[0])))
            for own in held:
                own.append(own[i].fork())
        elif action == 2 and len(held[0]) > 3:
            i = int(rng.integers(len(held[0])))
            for own in held:
                del own[i]
        for i, rows in enumerate(rng.integers(1, 16, len(held[0]))):
            for form, own in zip(forms, held):
                form.extend(own[i], taps(int(rows), 100 * step + i, 128).to(form.device), own[i].end)
        asking = [i for i in range(len(held[0])) if rng.random() < 0.8][:16]
        found = [form.lattices([Ask(own[i], 3 + i, own[i].end, 7) for i in asking]) for form, own in zip(forms, held)]
        alike += [(shared(a, b), apart(a, b)) for a, b in zip(*found, strict=True)]
    # Both round to bf16, in other orders. A row of another context would share few of the candidates.
    assert np.mean([part for part, _ in alike]) > 0.9 and np.median([error for _, error in alike]) < 0.12
    assert sorted(forms[0].free) == sorted(forms[1].free)


@pytest.mark.parametrize(("S", "R", "B", "W"), [(1, 1, 8, 5 * 5120), (16, 16, 16, 5 * 4096), (4, 8, 8, 2 * 320)])
def test_what_a_round_hands_on(S, R, B, W):
    ours, twin = (handed.case(S, R, B, W) for _ in range(2))
    *given, to = ours
    given, to = [x.cuda() for x in given], relay.Blocks(*(x.cuda() for x in to))
    relay.relay(*given, to)
    relay.relay_twin(*twin)
    for made, said in zip((given[4], *to[:-1]), (twin[4], *twin[5][:-1])):
        assert torch.equal(made.cpu(), said)
    assert int(to.done) > 0, "the device's clock"


@pytest.mark.parametrize(("R", "P", "K"), trees.SHAPES)
def test_trees_made_on_the_device(R, P, K):
    ours, twin = trees.case(R, P, K), trees.case(R, P, K)
    candidates, *told, seats, f, out = ours
    candidates, seats, out = (type(one)(*(x.cuda() for x in one)) for one in (candidates, seats, out))
    f = {name: x.cuda() for name, x in f.items()}
    tree.grow(candidates, *(x.cuda() for x in told), seats, f, out)
    tree.grow_twin(*twin)
    for made, said in zip((*f.values(), *out[:-1]), (*twin[5].values(), *twin[6][:-1])):
        torch.testing.assert_close(made.cpu(), said, rtol=1e-4, atol=1e-6)
    assert int(out.times[1]) > int(out.times[0]) == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("S", "R", "heads", "kv", "d"), [(1, 8, 32, 8, 128), (16, 8, 32, 8, 128), (4, 16, 4, 2, 64)])
def test_attention_at_real_shapes(S, R, heads, kv, d, causal):
    g = torch.Generator("cuda").manual_seed(1)
    bf16 = {"device": "cuda", "dtype": torch.bfloat16, "generator": g}
    ring = Ring(*(torch.randn(CONTEXTS + 1, 2, kv, 2048, d, **bf16) for _ in range(2)))
    ends = [0, 5, 2047, 2048, 9000, 100000, 130, 2100] * 2
    starts = [0, 0, 0, 0, 100, 99000, 130, 60] * 2
    whole = {"device": "cuda", "dtype": torch.int32}
    seen = Seen(*(torch.tensor(x[:S], **whole) for x in (range(1, 17), starts, ends, ends)))
    qk = torch.randn(S * R, heads + kv, d, **bf16) * d**-0.25
    v = torch.randn(S * R, kv * d, **bf16)
    for window in (2048, 100, None):
        told = qk, v, ring, 1, seen, window, causal
        found, expected = block.attend(*told).double(), block.attend_twin(*told)
        assert float((found - expected).abs().max()) < 2e-2 * float(expected.abs().max())


def test_the_likeliest_of_a_large_vocabulary():
    for rows, V in ((7, 248320), (112, 248077), (5, 98592), (7, 4096)):
        logits = torch.randn(rows, V, device="cuda")
        found, expected = block.likeliest(logits, 16), torch.topk(logits, 16)
        assert torch.equal(found[0], expected[0]) and torch.equal(logits.gather(1, found[1]), expected[0])


def test_packed_matrices_give_what_rounded_ones_give():
    g = torch.Generator().manual_seed(2)
    for rows, inputs in ((40, 192), (1536, 320), (80, 320), (5120, 25600)):
        matrix = torch.randn(rows, inputs, generator=g).bfloat16().cuda()
        x = torch.randn(2, 8, inputs, generator=g).bfloat16().cuda()
        ours, expected = weights.product(matrix, 4)(x).float(), weights.product(matrix.float(), 4)(x.float())
        assert float((ours - expected).abs().max()) < 0.01 * float(expected.abs().max())


@pytest.mark.parametrize("bits", [16, 4])
def test_no_drafter_changes_a_token(write, bits):
    """The embedded model with a drafter of random weights, several streams."""
    target = families.load(Checkpoint(resolve(None)), "cuda:0", form="bf16")
    vocab, hidden = target.embedding().shape
    fits = {"hidden_size": hidden, "vocab_size": vocab, "num_target_layers": target.depth, "head_dim": 64}
    c = changed(**fits | {"conv_group_size": 16, "intermediate_size": 768, "block_size": 8, "sliding_window": 64})
    drafter = StaticDrafter(Checkpoint(write(c)), target, "cuda:0", bits=bits)
    ids = torch.randint(0, 4000, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    said = {}
    for draft in ("off", "tree", "block"):
        bench = Bench(target)
        bench.engine = Engine(target, Store(1 << 30, target.grain), bench.take, letter, drafter=drafter)
        for sampling in (GREEDY, SEEDED):
            run = bench.run(text_prompt(ids), replace(sampling, draft=draft, max_tokens=40, size=vocab), 5)
            said.setdefault(draft, []).append([[token.id for token in stream.tokens] for stream in run.streams])
            assert draft == "off" or any(r.drafted for stream in run.streams for r in stream.rounds)
    assert said["off"] == said["tree"] == said["block"]
    assert len(drafter.free) == CONTEXTS, "every context came back"
