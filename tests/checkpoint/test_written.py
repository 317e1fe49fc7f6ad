"""The checkpoints that benches write: real names and shapes, finite numbers, text that stays alive."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from tests.bench import checkpoints
from tfmagic import protocol
from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.families.qwen3_5 import Model, config
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model
from tfmagic.engine.prompt import TextSide
from tfmagic.engine.stream import Request
from tfmagic.run import Run, Stream

TINY = checkpoints.SIZES["tiny"]


@pytest.fixture(scope="module", params=[None, 4, 8])
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    checkpoints.write(folder, TINY, request.param, 32)
    return folder


@pytest.mark.parametrize(
    ("name", "text", "vision"), [("4b", 4.206, 0.334), ("9b", 8.954, 0.456), ("27b", 26.896, 0.461)]
)
def test_real_sizes_have_the_real_counts(name, text, vision):
    size = checkpoints.SIZES[name]
    counts = {True: 0, False: 0}
    for plan in checkpoints.planned(size):
        counts[plan.name.startswith("model.visual.")] += math.prod(plan.shape)
    assert round(counts[False] / 1e9, 3) == text
    assert round(counts[True] / 1e9, 3) == vision
    read = config.read(checkpoints.config(size, Checkpoint(resolve(None)).config), size.tied)
    assert (read.text.hidden, len(read.text.full), read.vision.out) == (size.hidden, size.layers, size.hidden)
    assert sum(read.text.full) == size.layers // 4 and sum(read.text.section) == read.text.rotary // 2


def test_it_is_read_whole_and_sees(tiny):
    model = Model(Checkpoint(tiny))
    rows = model.tower(torch.randn(64, 1536, generator=torch.Generator().manual_seed(0)), (1, 8, 8))
    assert rows.shape == (16, TINY.hidden) and rows.isfinite().all() and 0.001 < rows.std() < 0.1


def test_greedy_text_stays_alive(tiny):
    record = Run("tiny", 0.0, streams=[Stream()])
    opened = open_model(str(tiny), "cpu", Settings(prompt_cache_gib=0), lambda event: record.apply(event))
    prompt = opened.prepare([protocol.Message("user", [protocol.Text("Tell me a story.")])], {})
    sampling = opened.sampling(protocol.Params(temperature=0, max_tokens=64), prompt)
    opened.engine.submit(Request("tiny", prompt, sampling, 1, 0.0, 0.0, opened.text.detokenizer, False))
    while opened.engine.step():
        pass
    ids = record.streams[0].token_ids
    assert record.status == "done" and len(ids) == 64 and len(set(ids)) > 48
    assert record.streams[0].text.strip()


def test_the_tokenizer_has_every_id(tiny):
    side = TextSide(Checkpoint(tiny))
    assert side.tokenizer.get_vocab_size(with_added_tokens=True) == TINY.vocab
    assert side.decode([4999]).strip() and side.decode([4998]) != side.decode([4999])
    shipped = TextSide(Checkpoint(resolve(None)))
    text = "Hello <|im_start|>, tell me a story. 42"
    assert side.encode(text) == shipped.encode(text)
    spelt = [checkpoints.word(id) for id in range(4096, 60_000)]
    assert len(set(spelt)) == len(spelt)


def test_written_twice_is_the_same(tiny, tmp_path):
    again = tmp_path / "again"
    name = next(iter(tiny.glob("*.safetensors"))).name
    stored = Checkpoint(tiny).config.get("quantization")
    checkpoints.write(again, TINY, stored and stored["bits"], 32)
    a, b = load_file(tiny / name), load_file(again / name)
    assert a.keys() == b.keys() and all(torch.equal(a[key].view(torch.uint8), b[key].view(torch.uint8)) for key in a)


def test_packed_values_are_those_of_the_plain_checkpoint(tiny, tmp_path):
    stored = Checkpoint(tiny).config.get("quantization")
    checkpoints.write(tmp_path / "plain", TINY)
    packed, plain = Checkpoint(tiny).tensors(), Checkpoint(tmp_path / "plain").tensors()
    assert set(packed) == set(plain)
    for name in ("layers.1.mlp.down_proj.weight", "layers.0.linear_attn.A_log"):
        a, b = (tensors["model.language_model." + name].float() for tensors in (packed, plain))
        assert (a - b).abs().max() <= (0 if stored is None else b.abs().max() / (2 ** stored["bits"] - 1) * 1.1)
