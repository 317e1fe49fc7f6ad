"""Keys and values in e4m3: the row law holds, sums stay exact, and only the rounding differs from the ordinary form."""

from __future__ import annotations

import random

import pytest
import torch

from tests.patience import LONG
from tfmagic import protocol
from tfmagic.engine import families
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.draft import Window, chain
from tfmagic.engine.families.qwen3_5.state import room
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model
from tfmagic.engine.stream import Request
from tfmagic.errors import Refusal
from tfmagic.kernels import attention
from tfmagic.kernels.gpu import pages
from tfmagic.run import Run, Stream

from .conftest import GOLDEN
from .test_state_law import cold, ids_of, same, serial


def case(rows=90, heads=4, groups=2, d=32, keys=4096, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (2 * torch.randn(rows, n, d, generator=g) for n in (heads, groups, groups))
    bits = attention.Bits(d, keys, fp8=True)
    return q, k, v, bits, attention.prepare(k, v, bits)


def test_e4m3_is_the_gpu_forms():
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0] = 0
    x[1] *= 1e-30
    x[2, :, 1:] *= 1e-4
    values, scales = attention.e4m3(x.float())
    theirs, their_scales = pages.quantise_twin(x)
    assert torch.equal(values, theirs.double())
    assert torch.equal(scales, their_scales.double())
    assert values.abs().amax() == 448 and not values[0].any()


def test_a_value_is_off_by_a_sixteenth_of_itself_at_most():
    _, k, v, _, (k8, v8, scale) = case()
    for x, units, by in ((k, k8, scale[..., 1]), (v, v8, scale[..., 0])):
        x = x.transpose(0, 1).double()
        least = x.abs().amax(-1, keepdim=True) / 448 * 2**-10
        assert ((units * by[..., None] - x).abs() <= x.abs() / 16 + least).all()


def test_attention_is_that_of_the_rounded_keys():
    q, _, _, bits, stored = case()
    k, v, scale = stored
    plain = [(x * by[..., None]).transpose(0, 1).float() for x, by in ((k, scale[..., 1]), (v, scale[..., 0]))]
    expected = attention.attend_twin(q, *plain, 0)
    assert (attention.attend(q, *stored, 0, bits) - expected).abs().max() < 2e-5


@pytest.mark.parametrize("keys", [16, 4096, 1 << 18])
def test_sums_are_exact(keys):
    """Widths add up: no product of a weight, a value and the number of keys needs more than 53 bits."""
    bits = attention.Bits(256, keys, fp8=True)
    assert bits.weight + attention.E4M3_BITS + (keys - 1).bit_length() <= 53
    assert bits.query + attention.E4M3_BITS + 8 <= 53
    units = torch.arange(-448, 449, dtype=torch.float32).to(torch.float8_e4m3fn).double() * 2**9
    assert torch.equal(units, units.round()) and units.abs().max() < 2**attention.E4M3_BITS


def test_attention_rows_keep_their_bits_in_any_window_and_order_of_keys():
    q, _, _, bits, (k, v, scale) = case()
    whole = attention.attend(q, k, v, scale, 0, bits)
    for start in (0, 1, 5, 63, 80):
        for rows in (1, 2, 10):
            end = start + rows
            part = attention.attend(q[start:end], k[:, :end], v[:, :end], scale[:, :end], start, bits)
            assert torch.equal(part, whole[start:end]), (start, rows)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(3))
    mixed = attention.attend(q, k[:, order], v[:, order], scale[:, order], None, bits)
    assert torch.equal(mixed, attention.attend(q, k, v, scale, None, bits))


def test_a_tree_is_its_paths(tiny_fp8):
    draw = random.Random(5)
    for rows in (70, 64, 5):
        state = cold(tiny_fp8, ids_of(rows))[1]
        window = Window([draw.randrange(256) for _ in range(9)], [-1, 0, 1, 0, 3, 3, 2, 5, 1])
        logits, change = tiny_fp8.round_pass([state.fork()], [window])
        for row in range(9):
            path = [row]
            while window.parents[path[0]] >= 0:
                path.insert(0, window.parents[path[0]])
            alone, moved = state.fork(), state.fork()
            expected = serial(tiny_fp8, alone, [window.ids[r] for r in path])
            assert torch.equal(logits[row], expected[-1])
            _, change = tiny_fp8.round_pass([moved], [window])
            tiny_fp8.commit([moved], change, [path])
            same(moved.named(), alone.named())


def test_a_kept_state_takes_half_and_is_the_forms_own(tiny, tiny_fp8):
    ordinary, narrow = (cold(model, ids_of(128))[1].named() for model in (tiny, tiny_fp8))
    assert ordinary.keys() == narrow.keys()
    assert narrow["3.k"].nbytes * 2 == ordinary["3.k"].nbytes
    with pytest.raises(ValueError, match=r"3\.k"):
        tiny.restore(narrow, 128)
    with pytest.raises(ValueError, match=r"3\.k"):
        tiny_fp8.restore(ordinary, 128)
    assert (tiny.kv, tiny_fp8.kv) == ("own", "fp8")
    assert sum(x.nbytes for x in narrow.values()) < room(128, tiny.config.text)


def test_it_is_the_same_model_but_for_the_rounding(tiny, tiny_fp8):
    a, b = (cold(model, ids_of(200))[0] for model in (tiny, tiny_fp8))
    assert not torch.equal(a, b)
    assert (a - b).abs().max() < 0.1 * a.std()


def test_windows_and_single_steps_agree_over_a_long_reply(tiny_fp8):
    ids = ids_of(100, seed=9)
    one, many = cold(tiny_fp8, ids_of(70))[1], cold(tiny_fp8, ids_of(70))[1]
    expected = serial(tiny_fp8, one, ids)
    at, draw = 0, random.Random(1)
    while at < len(ids):
        window = chain(ids[at : at + draw.randrange(1, 17)])
        logits, change = tiny_fp8.round_pass([many], [window])
        assert torch.equal(logits, expected[at : at + len(window.ids)])
        tiny_fp8.commit([many], change, [list(range(len(window.ids)))])
        at += len(window.ids)
    same(one.named(), many.named())


def test_other_forms_are_refused_by_name():
    with pytest.raises(Refusal, match="'int4'"):
        families.load(Checkpoint(GOLDEN), "cpu", kv="int4")


class Box:
    """The shipped model in one form, its states on disk."""

    def __init__(self, kv: str, states):
        settings = Settings(kv_cache=kv, learn_conversations=True, learn_dir=str(states), learn_min_free_gib=0)
        self.opened = open_model(None, "cpu", settings, lambda event: self.record.apply(event))
        self.opened.engine.drafting.curve = None  # every guess is verified, whatever rounds take here

    def run(self, cache=True, draft="on") -> Run:
        self.record, opened = Run("fp8", 0.0, streams=[Stream()]), self.opened
        told = "Repeat this: the red fox runs over the tall hill and the red fox runs over the tall hill. " * 4
        prompt = opened.prepare([protocol.Message("user", [protocol.Text(told)])], {})
        sampling = opened.sampling(protocol.Params(temperature=0, max_tokens=24, draft=draft), prompt)
        opened.engine.submit(Request("fp8", prompt, sampling, 1, 0.0, 0.0, opened.text.detokenizer, cache))
        while opened.engine.step():
            pass
        return self.record


def test_the_engine_says_the_same_cold_resumed_drafted_and_restarted(tmp_path):
    """The shipped model with fp8 keys, through the whole engine; its states on disk are the form's own."""
    box = Box("fp8", tmp_path)
    runs = [box.run(cache, draft) for cache, draft in ((False, "off"), (True, "on"), (True, "on"), (False, "on"))]
    assert runs[1].stats["accepted"] > 0
    assert box.opened.engine.store.disk.flush(LONG)
    box.opened.close(LONG)
    box = Box("fp8", tmp_path)
    runs.append(box.run())
    box.opened.close(LONG)
    assert [run.cache_source for run in runs] == [None, None, "exact", None, "disk"]
    assert len({tuple(run.streams[0].token_ids) for run in runs}) == 1
    box = Box("bf16", tmp_path)
    assert box.run().cached_tokens == 0
    box.opened.close(LONG)
