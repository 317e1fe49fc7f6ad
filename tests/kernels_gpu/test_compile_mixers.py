"""Attention and Gated DeltaNet kernels built for an H200 at the shapes of real models: they fit, their loops keep to
registers, and products of 64 rows or more take Hopper's own instructions."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels_gpu.offline import SHARED, compiled, launches, loops
from tfmagic.kernels.gpu import attention, conv, delta, delta_rounds, packing, pages, step, tower
from tfmagic.kernels.gpu.conv import Heads

ATTENTION = {"27B": (24, 4, 256), "9B": (16, 4, 256), "embedded": (4, 2, 64), "Gemma": (32, 4, 512)}
MIXERS = {"27B": Heads(16, 48, 128, 128), "9B": Heads(16, 32, 128, 128), "embedded": Heads(4, 8, 64, 64)}
bf16, fp32, i32 = torch.bfloat16, torch.float32, torch.int32


def meta(*shape, dtype=bf16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def prompts():
    return packing.Prompts(*(meta(2, dtype=i32) for _ in range(3)), meta(64, dtype=i32), 4000, 3)


def windows(S, R):
    return packing.Windows(meta(S, dtype=i32), meta(S, R, dtype=i32), meta(S, R, 16, dtype=i32), meta(S, R, dtype=i32))


def placed(built, layout: str) -> str:
    """What a layout's name stands for."""
    return re.search(rf"^{layout} = (.*)$", built.ttgir, re.M)[1]


SPILLED = 8
"""Accesses to local memory in a loop without loops, at most: what does not change in it may wait there."""


def checked(call, *modules):
    found = launches(call, *modules)
    assert found
    built = {}
    for launch in found:
        made = built[launch.kernel.__name__] = compiled(launch)
        assert made.shared <= SHARED, launch.kernel.__name__
        spilled = [sum(op.startswith(("LDL", "STL")) for op in loop) for loop in loops(made.sass)]
        assert max(spilled, default=0) <= SPILLED, (launch.kernel.__name__, made.registers, made.stack, spilled)
    return built


@pytest.mark.long
@pytest.mark.parametrize(("name", "fp8"), [(name, fp8) for name in ATTENTION for fp8 in (False, True)][:-1])
def test_prompt_attention(name, fp8):
    heads, kv, d = ATTENTION[name]
    held, table = pages.pages(100, kv, d, fp8, "meta"), meta(16, 64, dtype=i32)
    built = checked(lambda: attention.prompt_attention(meta(4000, heads, d), held, table, prompts()), attention)
    sass = built["_prompt"].sass
    assert "UTMALDG" in sass
    if name == "9B":
        ahead = "memdesc<2x64x128xi16" if fp8 else "memdesc<2x64x256xbf16"
        assert ahead in built["_prompt"].ttgir, "a tile would be asked for when the last one is done with"
    for loop in loops(sass):
        # Products under way together: the assembler waits for each where it finds too few registers.
        assert sum("HGMMA" in op for op in loop) >= 2 * sum("WARPGROUP.ARRIVE" in op for op in loop)


@pytest.mark.long
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("R", [1, 4, 16])
@pytest.mark.parametrize("name", ["27B", "9B", "embedded"])
def test_round_attention(name, R, fp8):
    heads, kv, d = ATTENTION[name]
    held, table, ints = pages.pages(100, kv, d, fp8, "meta"), meta(16, 64, dtype=i32), meta(4, dtype=i32)
    rows = pages.Rows(
        *(meta(4, R, kv, d, dtype=held.k.dtype) for _ in range(2)),
        *(meta(4, R, kv, dtype=fp32) if fp8 else None for _ in range(2)),
    )
    room = attention.partials(4, R, heads, d, 256, "meta")
    built = checked(
        lambda: attention.round_attention(meta(4, R, heads, d), rows, held, table, ints, ints, windows(4, R), room),
        attention,
    )
    assert "kWidth = 4" not in built["_body"].ttgir, "few rows would be summed in another order than many"
    if fp8 and R * heads // kv < 64 and d == 256:
        # A warp's step of 64 keys: what is unpacked stays in registers, and two programs share a multiprocessor.
        loop = max(loops(built["_body"].sass), key=len)
        assert len(loop) <= 1150 and not [op for op in loop if op.startswith("STS.128")]
        assert 2 * (built["_body"].shared + 1024) <= 228 * 1024


@pytest.mark.long
@pytest.mark.parametrize(("heads", "d"), [(16, 72), (4, 32), (16, 64), (16, 80)])
def test_tower_attention(heads, d):
    x = tower.split(*meta(5000, 3, heads, d).unbind(1))
    built = checked(lambda: tower.tower_attention(x, meta(3, dtype=i32)), tower)["_attend"]
    assert "HGMMA" in built.sass and "UTMALDG" in built.sass


@pytest.mark.long
@pytest.mark.parametrize("name", MIXERS)
def test_prompt_rows_of_gated_deltanet(name):
    heads = MIXERS[name]
    width, hv = heads.channels, heads.values
    m, a, b = (x for x in meta(4000, width + 2 * hv).split([width, hv, hv], 1))
    weights = conv.Weights(meta(4, width), meta(hv, dtype=fp32), meta(hv, dtype=fp32))
    past = meta(16, 3, width)
    checked(lambda: conv.convolve(m, a, b, past, weights, heads, prompts()), conv)
    checked(lambda: conv.advance(m, past, prompts()), conv)
    states, x = meta(16, hv, heads.dk, heads.dv, dtype=fp32), conv.inputs((4000,), heads, "meta")
    built = checked(lambda: delta.delta_chunks(x, states, prompts()), delta)
    assert "HGMMA" in built["_scan"].sass and "HGMMA" in built["_factor"].sass


@pytest.mark.long
@pytest.mark.parametrize("name", MIXERS)
def test_window_rows_of_gated_deltanet(name):
    heads, S, R = MIXERS[name], 4, 16
    width, hv = heads.channels, heads.values
    m, a, b = (x for x in meta(S, R, width + 2 * hv).split([width, hv, hv], 2))
    weights = conv.Weights(meta(4, width), meta(hv, dtype=fp32), meta(hv, dtype=fp32))
    past, slots, steps, path = meta(16, 3, width), meta(S, dtype=i32), meta(S, dtype=i32), meta(S, R, dtype=i32)
    apart = checked(lambda: conv.convolve_tree(m, a, b, past, slots, weights, heads, windows(S, R)), conv)
    checked(lambda: conv.conv_commit(m[None], past[None], slots, path, steps), conv)
    states, x = meta(16, hv, heads.dk, heads.dv, dtype=fp32), conv.inputs((S, R), heads, "meta")
    tree = checked(lambda: delta_rounds.delta_tree(x, states, slots, windows(S, R)), delta_rounds)["_tree"]
    # A step's threads pass nothing on through memory, and twelve programs share a multiprocessor where there are many.
    assert tree.shared == 0 and tree.registers <= 168
    flat, counts = [part[:, 0] for part in (m, a, b)], meta(S, dtype=i32)
    alone = checked(lambda: step.delta_step(*flat, past, states, slots, counts, weights, heads), step)["_alone"]
    # Its sums over keys have the order of the tree's, a thread's own keys and then those of eight threads, and lengths
    # are summed as the convolution's own kernel does.
    lengths = [
        {placed(built, layout) for layout in re.findall(r"\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32", built.ttgir)}
        for built in (apart["_convolve_tree"], alone)
    ]
    assert lengths[0] == lengths[1] and len(lengths[0]) == 1
    sums = [re.findall(r"\}\) : \(tensor<(\d+x\d+x\d+(?:x\d+)?)xf32, (#\w+)>", built.ttgir) for built in (tree, alone)]
    whole = [(shape, layout) for shape, layout in sums[1] if shape.count("x") == 3]
    assert whole == 3 * [sums[1][0]], sums
    assert placed(tree, sums[0][0][1]) == placed(alone, sums[1][0][1])
    u = meta(1, S, R, hv, heads.dv, dtype=fp32)
    taken = states[None], x.k[None], x.decay[None], u
    checked(lambda: delta_rounds.delta_commit(*taken, slots, path, steps), delta_rounds)


@pytest.mark.long
def test_plans_and_pages():
    checked(lambda: packing.windows(meta(4, 16, dtype=i32), meta(4, dtype=i32)), packing)
    held, ints = pages.pages(100, 4, 256, True, "meta", layers=3), meta(4, dtype=i32)
    table, path = meta(16, 64, dtype=i32), meta(4, 16, dtype=i32)
    checked(lambda: pages.quantise(meta(4, 16, 4, 256)), pages)
    rows = pages.Rows(*(meta(3, 4, 16, 4, 256, dtype=pages.E4M3) for _ in range(2)),
                      *(meta(3, 4, 16, 4, dtype=fp32) for _ in range(2)))  # fmt: skip
    checked(lambda: pages.commit(rows, held, table, ints, ints, path, ints), pages)
    checked(lambda: pages.write(rows.layer(0).layer(0), held.layer(0), table, ints, ints), pages)
