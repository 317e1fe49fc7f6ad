"""Norms, rotation, stored keys and values, and draws on a GPU: against their twins, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.told import near, same
from tfmagic.engine.sampling import Sampling, draw
from tfmagic.kernels import rotary
from tfmagic.kernels.gpu import norm, pages
from tfmagic.kernels.gpu.bring import bring
from tfmagic.kernels.gpu.logprobs import TOP, Logprobs, logprobs, logprobs_twin
from tfmagic.kernels.gpu.rope import gated, norm_rope_write, norm_rope_write_twin, raw, tables
from tfmagic.kernels.gpu.sample import Rules, embed, sample, sample_twin

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 7, 16, 17, 64, 100, 256)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random(*shape):
    return torch.randn(*shape, device="cuda")


def close(out, ref, *facts):
    near(out, ref, 2**-7, 1e-3, *facts)


def rowwise(D):
    w, b, short = 1 + 0.1 * random(D), random(D), (1 + 0.1 * random(128)).bfloat16()
    o = D // 128, 128
    return {
        "rms": (lambda x: norm.rms(x, w, 1e-6), lambda x: norm.rms_twin(x, w, 1e-6)),
        "layer": (lambda x: norm.layer(x, w, b, 1e-6), lambda x: norm.layer_twin(x, w, b, 1e-6)),
        "add_rms": (
            lambda x: norm.add_rms(x, x.flip(1).contiguous(), w, 1e-6)[1],
            lambda x: norm.rms_twin((x.float() + x.flip(1).float()).bfloat16(), w, 1e-6),
        ),
        "gated_rms": (
            lambda x: norm.gated_rms(x.unflatten(1, o), x, short, 1e-6),
            lambda x: norm.gated_rms_twin(x.unflatten(1, o), x, short.cuda(), 1e-6),
        ),
    }


@pytest.mark.parametrize("D", [384, 1152, 4096, 5120, 6144])
@pytest.mark.parametrize("name", ["rms", "layer", "add_rms", "gated_rms"])
def test_norms(name, D):
    f, twin = rowwise(D)[name]
    x = (3 * random(300, D)).bfloat16()
    whole = f(x)
    if name != "gated_rms":
        close(whole, twin(x))
    else:
        n = norm.rms_twin(x.unflatten(1, (D // 128, 128)), torch.ones((), device="cuda"), 1e-6)
        assert (whole.float() - (n.flatten(1) * torch.nn.functional.silu(x.double())).float()).abs().mean() < 0.5
    for rows in ROWS:
        same(f(x[:rows]), whole[:rows], f"{rows} rows")
        same(f(x[30 : 30 + rows]), whole[30 : 30 + rows], f"rows 30+{rows}")


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_are_stored_alike_in_windows_and_pages(fp8):
    L, heads, kv, d, half = 300, 24, 4, 256, 32
    qkv = random(L, 2 * (heads + kv) * d).bfloat16()
    positions = torch.arange(260_000, 260_000 + L, dtype=torch.int32, device="cuda")
    cos, sin = tables(positions, rotary.frequencies(1e7, 2 * half, "cuda"), rotary.axes([11, 11, 10], half, "cuda"))
    args = qkv, 1 + 0.1 * random(d), 1 + 0.1 * random(d), 1e-6, cos, sin

    def window(rows):
        return pages.Rows(*(None if x is None else x[:, :, 0].clone() for x in pages.pages(rows, kv, d, fp8, "cuda")))

    into = window(L)
    q = norm_rope_write(*args, heads, into)
    expected = window(L)
    twin = norm_rope_write_twin(*args, heads, expected, None, None, None, torch.empty_like(q))
    close(q, twin, "queries")
    if fp8:
        same(into.v.float(), expected.v.float(), "values")  # as numbers: what rounds to zero has lost its sign
        same(into.v_scale, expected.v_scale, "values' scales")
        near(into.k_scale, expected.k_scale, 0.01, 1e-8, "keys' scales")
        again = pages.stored(qkv[:, -kv * d :].unflatten(1, (kv, d)).contiguous(), into.v.bfloat16(), True)
        same(raw(again.k), raw(into.v), "stored again")
        same(again.k_scale, into.v_scale, "stored again, scales")
    else:
        close(into.k, expected.k, "keys")
        same(into.v, expected.v, "values")
    held, table = pages.pages(9, kv, d, fp8, "cuda"), torch.tensor([[0, 0], [7, 3]], dtype=torch.int32, device="cuda")
    slots = torch.ones(L, dtype=torch.int32, device="cuda")
    places = torch.arange(400, 400 + L, dtype=torch.int32, device="cuda")
    same(norm_rope_write(*args, heads, held, table, slots, places), q, "into pages")
    page, place = table[1, places.long() // 512].long(), places.long() % 512
    for name, x, y in zip(held._fields, held, into):
        if x is not None:
            same(raw(x)[page, :, place], raw(y), "pages", name)
    for rows in (1, 5, 16):
        alone = window(rows)
        part = args[0][9 : 9 + rows], *args[1:4], cos[9 : 9 + rows], sin[9 : 9 + rows]
        same(norm_rope_write(*part, heads, alone), q[9 : 9 + rows], f"{rows} rows")
        for name, x, y in zip(alone._fields, alone, into):
            if x is not None:
                same(raw(x), raw(y)[9 : 9 + rows], f"{rows} rows", name)
    o = random(L, heads, d).bfloat16()
    gate = qkv[:, : 2 * heads * d].reshape(L, heads, 2 * d)[..., d:].double()
    close(gated(o, qkv), (o.double() * torch.sigmoid(gate)).flatten(1), "gated")


def rules_of(R, size):
    g = torch.Generator().manual_seed(1)
    heat, p = 1.5 * torch.rand(R, generator=g).double(), 0.4 + 0.6 * torch.rand(R, generator=g).double()
    k, floor = torch.randint(0, 80, (R,), generator=g, dtype=torch.int32), 0.1 * torch.rand(R, generator=g).double()
    heat[::5], k[::3], p[::4], floor[::2] = 0, 0, 1, 0
    k[7] = size + 5
    seed = torch.randint(0, 2**62, (R,), generator=g)
    position = torch.randint(0, 200_000, (R,), generator=g, dtype=torch.int32)
    return Rules(*(x.cuda() for x in (heat, k, p, floor, seed, position)), size)


@pytest.mark.parametrize("vocabulary", [248320, 4096])
def test_draws_are_the_hosts(vocabulary):
    R, size = 64, vocabulary - 5
    logits, rules = 4 * random(R, vocabulary), rules_of(R, size)
    logits[10:30] = torch.round(logits[10:30])  # ties
    logits[:, size:] = 99
    logits[3, 5], logits[4, 7] = float("nan"), float("inf")
    drawn = sample(logits, rules)
    host = Rules(*(x.cpu() for x in rules[:6]), size)
    said = sample_twin(logits.cpu(), host)
    wrong = [
        f"row {r}: {int(drawn[r])} where {int(said[r])} was expected; its rules {[x[r].item() for x in host[:6]]}"
        for r in (drawn.cpu() != said).nonzero().flatten().tolist()
    ]
    assert not wrong, "\n".join(wrong)
    for r in (0, 1, 8, 12, 33):
        one = [x[r].item() for x in host[:6]]
        said = Sampling(1, one[0], one[2], one[1], one[3], 0, "on", 0, [], frozenset(), size)
        assert int(drawn[r]) == draw(logits[r].cpu().numpy(), said, *map(int, one[4:]))
    for rows in (1, 2, 16, 17):
        part = Rules(*(x[8 : 8 + rows] for x in rules[:6]), size)
        same(sample(logits[8 : 8 + rows], part), drawn[8 : 8 + rows], f"{rows} rows")
    cold = rules._replace(temperature=torch.zeros_like(rules.temperature))
    same(sample(logits, cold, greedy=True), sample(logits, cold), "greedy")


def likely_of(S, R):
    shapes = ((S, R), torch.float64), ((S, R, TOP), torch.int32), ((S, R, TOP), torch.float64)
    return Logprobs(*(torch.full(shape, 7, dtype=dtype, device="cuda") for shape, dtype in shapes))


@pytest.mark.parametrize("vocabulary", [248320, 4096])
def test_log_probabilities_are_the_twins(vocabulary):
    S, R, size = 16, 4, vocabulary - 5
    logits = 4 * random(S * R, vocabulary)
    logits[10:30] = torch.round(logits[10:30])  # ties
    logits[5, 40:900] = -torch.inf
    logits[:, size:] = 99
    drawn = torch.randint(0, size, (S, R), dtype=torch.int32, device="cuda")
    path = torch.stack([torch.randperm(R) for _ in range(S)]).int().cuda()
    walked = (torch.arange(S, dtype=torch.int32) % (R + 1)).cuda()
    found, twin = likely_of(S, R), likely_of(S, R)
    logprobs(logits, drawn, path, walked, size, found)
    logprobs_twin(logits, drawn, path, walked, size, twin)
    same(found.top, twin.top, "ids")
    for x, y in ((found.logprob, twin.logprob), (found.logprobs, twin.logprobs)):
        near(x, y, 1e-14, 1e-12)
    for s, steps in enumerate(walked.tolist()):
        one, alone = slice(s, s + 1), likely_of(1, R)
        logprobs(logits[R * s : R * s + R], drawn[one], path[one], walked[one], size, alone)
        for i, row in enumerate(path[s, :steps].tolist()):
            single = likely_of(1, 1)
            told = drawn[one, row : row + 1].contiguous(), torch.zeros_like(path[:1, :1]), torch.ones_like(walked[:1])
            logprobs(logits[R * s + row][None], *told, size, single)
            for x, y, z in zip(found, alone, single):
                same(y[0, i], x[s, i], f"window {s} alone")
                same(z[0, 0], x[s, i], f"row {row} of window {s} alone")


def test_what_is_brought_waits_for_no_copy():
    """The copies of another stream are under way for long after it is there."""
    away, host = torch.arange(61_000, dtype=torch.int32, device="cuda"), torch.zeros(61_000, dtype=torch.int32)
    host, big = host.pin_memory(), torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    to, side = torch.empty(1 << 30, dtype=torch.uint8).pin_memory(), torch.cuda.Stream()
    copied, brought = (torch.cuda.Event() for _ in range(2))
    bring(away, host)
    torch.cuda.synchronize()
    host.zero_()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        to.copy_(big, non_blocking=True)
        copied.record()
    bring(away, host)
    brought.record()
    brought.synchronize()
    early = not copied.query()
    assert early and torch.equal(host, away.cpu())


def test_a_graph_draws_the_same():
    logits, rules = random(16, 248320), rules_of(16, 248320)
    out = torch.empty(16, dtype=torch.int32, device="cuda")
    sample(logits, rules, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, rules, out)
    logits.copy_(random(16, 248320))
    graph.replay()
    same(out, sample(logits, rules))


def test_embeddings():
    table, ids = random(1000, 4096).bfloat16(), torch.tensor([3, 999, 0], dtype=torch.int32, device="cuda")
    same(embed(ids, table), table[ids.long()])
