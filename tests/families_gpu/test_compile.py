"""Both passes over a 9B's shapes, launch by launch as the engine makes them, built for an H200 that is not here."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from tests.bench.checkpoints import SIZES, config
from tests.kernels_gpu.offline import SHARED, compiled, launches
from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.families.qwen3_5 import config as configs
from tfmagic.engine.families.qwen3_5.gpu.forward import Forward, Places
from tfmagic.engine.families.qwen3_5.gpu.pool import Plan, Pool
from tfmagic.engine.families.qwen3_5.gpu.rounds import fields, probabilities
from tfmagic.engine.families.qwen3_5.gpu.weights import Attention, Delta, Layer, TextWeights
from tfmagic.kernels.gpu import (
    affine,
    attention,
    bring,
    conv,
    delta,
    delta_rounds,
    linear,
    logprobs,
    norm,
    packing,
    pages,
    rope,
    sample,
    step,
    turn,
    walk,
)
from tfmagic.kernels.gpu.common import INTERPRETED
from tfmagic.kernels.gpu.packing import Prompts

pytestmark = [pytest.mark.long, pytest.mark.skipif(INTERPRETED, reason="what is interpreted cannot be compiled")]
META = torch.device("meta")
MODULES = (
    *(affine, attention, conv, delta, delta_rounds, linear, logprobs),
    *(norm, packing, pages, rope, sample, step, turn, walk),
)


def meta(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def model(kv: str) -> Forward:
    """One Gated DeltaNet layer and one of full attention."""
    described = config(SIZES["9b"], Checkpoint(resolve(None)).config)
    described["text_config"] |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    t = configs.read(described, False).text
    D, f32 = t.hidden, torch.float32
    values, width = t.value_heads * t.value_dim, t.heads * t.head_dim
    constants = conv.Weights(meta(t.conv, t.channels), *(meta(t.value_heads, dtype=f32) for _ in range(2)))
    inputs = linear.Dense(meta(t.channels + values + 2 * t.value_heads, D))
    mixers = [
        Delta(inputs, constants, meta(t.value_dim, dtype=f32), linear.Dense(meta(D, values))),
        Attention(
            linear.Dense(meta(2 * width + 2 * t.kv_heads * t.head_dim, D)),
            *(meta(t.head_dim, dtype=f32) for _ in range(2)), linear.Dense(meta(D, width)),
        ),
    ]  # fmt: skip
    up, down = linear.Dense(meta(2 * t.intermediate, D)), linear.Dense(meta(D, t.intermediate))
    layers = [Layer(meta(D, dtype=f32), mixer, meta(D, dtype=f32), up, down) for mixer in mixers]
    weights = TextWeights(meta(t.vocab, D), layers, meta(D, dtype=f32), linear.Dense(meta(t.vocab, D)))
    return Forward(t, weights, Pool(t, Plan(19, 64, 20, 0, kv), META), META)


def built(found: list) -> int:
    """Every distinct launch, compiled."""
    seen = {}
    for launch in found:
        kinds = [(x.dtype, x.data_ptr() % 16) if isinstance(x, torch.Tensor) else x for x in launch.args]
        seen[repr((launch.kernel.__name__, kinds, launch.options))] = launch
    for launch in seen.values():
        assert compiled(launch).shared <= SHARED, launch.kernel.__name__
    return len(seen)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_round(kv):
    forward, found = model(kv), []
    for streams, rows, greedy, more in ((1, 1, True, True), (4, 8, True, False), (16, 16, False, True)):
        f = {name: meta(*shape, dtype=dtype) for name, (dtype, shape) in fields(streams, rows).items()}
        out = {name: meta(streams, rows, dtype=torch.int32) for name in ("drawn", "path")}
        out["walked"] = meta(streams, dtype=torch.int32)
        for name, (dtype, shape) in probabilities((streams, rows)).items() if more else ():
            out[name] = meta(*shape, dtype=dtype)
        found += launches(partial(forward.round, f, out, None, 248_000, greedy), *MODULES)
    assert built(found) > 30


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_prompt_pass(kv):
    forward, found, i32 = model(kv), [], torch.int32
    for rows, sequences in ((64, 1), (4096, 3)):
        packed = Prompts(*(meta(n, dtype=i32) for n in (*[sequences] * 3, rows // 64)), rows, 2)
        at = Places(packed, meta(3, rows, dtype=i32), meta(rows, dtype=i32), meta(rows, dtype=i32))
        found += launches(partial(forward.prompt, meta(rows, forward.t.hidden), at), *MODULES)
    assert built(found) > 15


def test_what_is_brought_to_the_host():
    words = meta(100, dtype=torch.int32)
    assert built(launches(lambda: bring.bring(words, words), bring)) == 1


def test_the_towers_rotation():
    found = launches(lambda: turn.turn(meta(4096, 3, 16, 72), meta(4096, 36, dtype=torch.float32),
                                       meta(4096, 36, dtype=torch.float32)), turn)  # fmt: skip
    assert built(found) == 1
