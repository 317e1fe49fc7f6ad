"""The bf16 form on a GPU, the shipped model's weights: beside the twins, and the row law over whole states, schedules
and processes."""

from __future__ import annotations

import gc
import hashlib
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tfmagic.engine import families
from tfmagic.engine.cache.segments import memory
from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.families.qwen3_5.gpu.pinned import pinned
from tfmagic.engine.prompt import PreparedImage

from ..engine.conftest import GREEDY, SEEDED, Bench, text_prompt
from ..engine.test_fuzz import Play
from ..families.conftest import straight
from ..families_gpu.conftest import Reply, cold, ids_of, rounds
from ..families_gpu.test_state_law import tree
from ..families_gpu.varied import Drafted, varied
from .told import parted, same

pytestmark = pytest.mark.gpu


def load(kv: str = "bf16", device: str = "cuda:0"):
    return families.load(Checkpoint(resolve(None)), device, form="bf16", kv=kv)


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def model(request):
    made = load(request.param)
    made.pin(1 << 26)
    assert made.pool.pinned.grown.wait(60)
    return made


def alike(found: dict, expected: dict, *facts) -> None:
    """Two whole states, bit for bit."""
    assert found.keys() == expected.keys()
    for name in found:
        same(*(x[name].contiguous().view(torch.uint8) for x in (found, expected)), *facts, name)


def like(found: torch.Tensor, expected: torch.Tensor, most: float, *facts) -> str:
    """Nothing, or how far they are apart where that is more than `most` of the expected one's length."""
    found, expected = found.double().cpu(), expected.double().cpu()
    error = float((found - expected).norm() / expected.norm())
    return "" if error < most else parted(found, expected, *facts)


def of_passes(model) -> dict[str, torch.Tensor]:
    """What a prompt, a round over a tree, and the round behind it leave, by name."""
    ids, found = ids_of(200), {}
    found["the prompt's logits"], state, kept = cold(model, ids, [64])
    found |= {f"row 64: {name}": x for name, x in kept[64].items()}
    found |= {f"row 200: {name}": x for name, x in state.named().items()}
    reply = Reply(state, 200, 7, replace(GREEDY, size=4000))
    for name, draft in (("a tree", ([1, 2, 3], [0, 0, 1])), ("behind it", ([], []))):
        rounds(model, [reply], [draft])
        found[f"{name}: logits"] = model.text.space.logits[:1].clone()
        reply.ids[-1] = 9
    return found | {f"after two rounds: {name}": x for name, x in reply.state.named().items()}


def test_passes_are_near_the_twins(model):
    """Pass by pass and layer by layer: the first that is far is where to look."""
    found, expected = of_passes(model), of_passes(load(model.kv, "cpu"))
    assert found.keys() == expected.keys()
    most = {torch.float8_e4m3fn: 0.08}
    wrong = [said for name, x in expected.items() if (said := like(found[name], x, most.get(x.dtype, 0.04), name))]
    assert not wrong, "\n".join(wrong)[:8000]


def test_pictures_are_near_the_twins():
    model, twin, g = load(), load(device="cpu"), torch.Generator().manual_seed(5)
    for grid in ((1, 4, 6), (1, 16, 24)):
        patches = torch.randn(grid[1] * grid[2], 1536, generator=g)
        if said := like(model.tower(patches, grid), twin.tower(patches, grid), 0.04, grid):
            raise AssertionError(said)


def replies(model, prompts, sampling, tokens: int = 40) -> list[list[int]]:
    """Each alone, cold and undrafted."""
    plain = replace(sampling, draft="off", max_tokens=tokens)
    return [Bench(model, budget=0).run(text_prompt(ids), plain).streams[0].token_ids for ids in prompts]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_sixteen_streams_are_each_alone_and_again_cold(model, sampling):
    prompts = [ids_of(n, seed=n) for n in (1, 5, 63, 64, 65, 127, 128, 129, 200, 511, 512, 513, 700, 1025, 1500, 3000)]
    alone = replies(model, prompts, sampling)
    bench = Bench(model, memory=model.memory)
    for _ in range(2):
        runs = [bench.submit(text_prompt(ids), replace(sampling, max_tokens=40)) for ids in prompts]
        bench.drain()
        for run, expected, ids in zip(runs, alone, prompts):
            assert run.status == "done", run.error
            assert run.streams[0].token_ids == expected, f"the prompt of {len(ids)} rows"
    assert all(run.cached_tokens == (len(ids) - 1) // 64 * 64 for run, ids in zip(runs, prompts))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_drafted_is_serial(model, sampling):
    rng, sampling = random.Random(2), replace(sampling, size=4000)
    prompts = [ids_of(n, seed=n) for n in (70, 5, 64, 505, 1000, 16, 2047, 300)]
    begun = [cold(model, ids) for ids in prompts]
    serial = [Reply(s.fork(), len(ids), int(row.argmax()), sampling) for (row, s, _), ids in zip(begun, prompts)]
    for _ in range(80):
        rounds(model, serial)
    drafted = [Reply(s, len(ids), int(row.argmax()), sampling) for (row, s, _), ids in zip(begun, prompts)]
    while going := [(a, b) for a, b in zip(drafted, serial) if len(a.ids) < 60]:
        right = [b.ids[len(a.ids) :] for a, b in going]
        chains = [(ids[:9], list(range(len(ids[:9])))) for ids in right]
        drafts = [rng.choice([tree(ids, rng), chain, ([], [])]) for ids, chain in zip(right, chains)]
        rounds(model, [reply for reply, _ in going], drafts)
    for reply, whole, ids in zip(drafted, serial, prompts):
        n = len(reply.ids)
        assert reply.ids == whole.ids[:n], f"the prompt of {len(ids)} rows"
        again = Reply(cold(model, ids)[1], len(ids), reply.ids[0], sampling)
        for _ in range(n - 1):
            rounds(model, [again])
        alike(reply.state.named(), again.state.named(), f"the prompt of {len(ids)} rows, {n} tokens on")


@pytest.mark.parametrize("rows", [65, 700, 2100])
def test_resumed_is_cold(model, rows):
    ids, mark = ids_of(rows, seed=rows), (rows - 1) // 64 * 64
    logits, state, kept = cold(model, ids, sorted({64, mark}))
    for at in {64, mark}:
        for tensors in (kept[at], dict(kept[at].items())):
            resumed = model.restore(tensors, at)
            again, _ = model.prompt_pass(resumed, ids[at:], {}, straight(rows)[:, at:], [])
            same(again, logits, f"logits, resumed at {at} from {type(tensors).__name__}")
            alike(resumed.named(), state.named(), f"resumed at {at} from {type(tensors).__name__}")
    for cut in (64, 640):
        pieces = model.new_state()
        for low in range(0, rows, cut):
            part = slice(low, min(low + cut, rows))
            again, _ = model.prompt_pass(pieces, ids[part], {}, straight(rows)[:, part], [])
        same(again, logits, f"logits, in pieces of {cut}")
        alike(pieces.named(), state.named(), f"in pieces of {cut}")


def test_kept_states_lie_in_memory_that_was_pinned_before(model):
    def kept():
        return cold(model, ids_of(700), [64, 640])[2]

    first, low = kept(), model.pool.pinned.address
    places = [[x.data_ptr() for x in tensors.values()] for tensors in first.values()]
    assert all(low <= place < low + model.pool.pinned.size for own in places for place in own)
    assert all(x.is_pinned() for tensors in first.values() for x in tensors.values())
    expected = {mark: dict(tensors.items()) for mark, tensors in first.items()}
    expected = {mark: {name: x.clone() for name, x in tensors.items()} for mark, tensors in expected.items()}
    del first
    for _ in range(40):  # more than there is room for at a time
        again = kept()
        for mark, tensors in again.items():
            alike(tensors, expected[mark], f"row {mark}")
            assert all(low <= x.data_ptr() < low + model.pool.pinned.size for x in tensors.values())


def test_pinned_memory_goes_with_its_pool():
    pool = pinned(1 << 26, torch.device("cuda:0"))
    assert pool.grown.wait(60)
    x, away = pool.take((1 << 20,), torch.uint8), torch.arange(1 << 20, device="cuda").byte()
    assert x.is_pinned() and x.copy_(away).equal(away.cpu())
    del pool
    gc.collect()
    assert not x.is_pinned() and x.equal(away.cpu())  # whose memory stays for as long as it is held
    torch.cuda.synchronize()


def pictures_of() -> list[PreparedImage]:
    g = torch.Generator().manual_seed(3)
    shapes = [("one.png", (1, 4, 6)), ("two.png", (1, 6, 4))]
    return [
        PreparedImage(name, name, 96, 64, 0, 6, grid, torch.randn(24, 1536, generator=g), name.encode() * 4)
        for name, grid in shapes
    ]


def test_images_together_are_images_alone(model):
    pictures = pictures_of()
    together = model.towers([one.patches for one in pictures], [one.grid for one in pictures])
    for one, rows in zip(pictures, together):
        same(model.tower(one.patches, one.grid), rows, one.grid)


class Game(Play):
    """One schedule, with room for a few of this model's states where a test of it asks for a few."""

    def new_store(self):
        self.budget = 4_000_000 if self.budget == 300_000 else self.budget
        return super().new_store()


def test_schedules(model, tmp_path):
    model.slices = None
    world, counts = Drafted(model, pictures_of(), varied(model, tmp_path / "drafter", GREEDY.size)), {}
    try:
        for seed in range(20):
            with pytest.MonkeyPatch.context() as patch:
                for name, n in Game(world, patch, tmp_path, seed).play().items():
                    counts[name] = counts.get(name, 0) + n
    finally:
        del model.slices
        model.tap([])
    assert all(counts.get(what) for what in ("accepted", "rejected", "cached", "cancelled", "packed")), counts


def of_a_process() -> str:
    """A digest of tokens and states: prompts in one pass, drafted rounds, keys in fp8 and bf16."""
    seen = hashlib.sha256()
    for kv in ("bf16", "fp8"):
        model, rng = load(kv), random.Random(5)
        prompts = [ids_of(n, seed=n) for n in (90, 600, 1300)]
        begun = [cold(model, ids) for ids in prompts]
        by = replace(SEEDED, size=4000)
        streams = [Reply(s, len(ids), int(row.argmax()), by) for (row, s, _), ids in zip(begun, prompts)]
        for _ in range(20):
            drafts = [tree([rng.randrange(4000) for _ in range(9)], rng) for _ in streams]
            rounds(model, streams, drafts)
        for reply in streams:
            seen.update(str(reply.ids).encode())
            for name, x in reply.state.named().items():
                seen.update(name.encode() + bytes(memory(x.contiguous())))
    return seen.hexdigest()


def test_two_processes_are_alike():
    command = [sys.executable, "-c", "from tests.gpu.test_gpu_engine import of_a_process; print(of_a_process())"]
    begun = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate() for process in begun]
    assert [process.returncode for process in begun] == [0, 0], said[0][1][-3000:] + said[1][1][-3000:]
    assert said[0][0].split()[-1] == said[1][0].split()[-1]


def test_nothing_is_made_anew_once_every_shape_was_met(model):
    def after(tokens: int) -> tuple[int, int]:
        """Graphs, and bytes of the device, behind a reply."""
        Bench(model).run(text_prompt(ids_of(100)), replace(GREEDY, max_tokens=tokens, draft="off"))
        gc.collect()
        return model.graphs.count, torch.cuda.memory_allocated()

    after(20)
    shapes, held = after(20)
    later = after(200)
    assert later[0] == shapes and later[1] <= held + (1 << 20), (shapes, held, later)
