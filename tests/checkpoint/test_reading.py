"""Weights read ahead of their family, in threads and pieces: every byte, in any order, within bounds."""

from __future__ import annotations

import contextlib
import gc
import os
import random

import pytest
import torch
from safetensors.torch import load_file

from tests.patience import until
from tfmagic.engine.checkpoint import Checkpoint, pump, resolve, tensors
from tfmagic.engine.checkpoint.names import place
from tfmagic.engine.families.qwen3_5 import Model

TEXT = "model.language_model."


@pytest.fixture
def many(empty):
    """Three files of tensors of odd sizes and every dtype, layer names in the files' own order."""
    g, made = torch.Generator().manual_seed(0), {}
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool]
    for i in range(40):
        shape = [(3, 1 + i * 37), (i * 11,), (), (2, 3, 5 + i)][i % 4]
        x = torch.randn(shape, generator=g) * 100
        made[f"model.layers.{i}.mlp.x.weight"] = x.to(dtypes[i % len(dtypes)])
    names = sorted(made)
    empty.shards(*({name: made[name] for name in names[part::3]} for part in range(3)))
    return empty, {TEXT + name.removeprefix("model."): x for name, x in made.items()}


@pytest.mark.parametrize("order", ["natural", "reversed", "shuffled"])
@pytest.mark.parametrize("piece", [64, 1000, 1 << 20])
def test_every_tensor_comes_whole_in_any_order(many, order, piece, monkeypatch):
    monkeypatch.setattr(pump, "PIECE", piece)
    monkeypatch.setattr(tensors, "AHEAD", {"cpu": 5000})
    folder, made = many
    names = sorted(made, key=place)
    names = {"natural": names, "reversed": names[::-1], "shuffled": random.Random(1).sample(names, len(names))}[order]
    read = Checkpoint(folder.path).tensors()
    for name in names:
        x = read.take(name, made[name].shape)
        assert x.dtype == made[name].dtype and torch.equal(x, made[name]), name
    assert read.leftover() == [] and read._ahead == {}
    assert torch.equal(read[names[0]], made[names[0]])


def test_what_is_read_ahead_is_bounded(many, monkeypatch):
    monkeypatch.setattr(tensors, "AHEAD", {"cpu": 20_000})
    folder, made = many
    largest = max(x.nbytes for x in made.values())
    read = Checkpoint(folder.path).tensors()
    for name in sorted(made, key=place):
        read.take(name)
        assert sum(coming.tensor.nbytes for coming in read._ahead.values()) < 20_000 + largest


def test_layers_are_read_in_the_order_of_their_numbers():
    names = [TEXT + f"layers.{i}.mlp.up_proj.weight" for i in (2, 10, 9)]
    others = ["model.visual.blocks.0.norm1.bias", "lm_head.weight", TEXT + "norm.weight", TEXT + "embed_tokens.weight"]
    ordered = sorted([*names, *others], key=place)
    assert ordered == [others[3], names[0], names[2], names[1], others[2], others[1], others[0]]
    assert place("mtp.norm.weight") is None


def test_one_look_reads_nothing_else(many):
    folder, made = many
    read = Checkpoint(folder.path).tensors()
    name = min(made)
    assert torch.equal(read[name], made[name])
    assert read._ahead == {} and read._pump.bytes == made[name].nbytes


def test_progress_is_told_up_to_the_end():
    checkpoint, told = Checkpoint(resolve(None)), []
    checkpoint.on_read = lambda done, total: told.append((done, total))
    Model(checkpoint)
    assert told == sorted(told) and len({total for _, total in told}) == 1
    assert told[-1][0] == told[-1][1] == sum(x.nbytes for path in checkpoint.path.glob("*.safetensors")
                                             for x in load_file(path).values())  # fmt: skip


def test_open_says_so_in_words(monkeypatch):
    from tfmagic.engine.open import reading

    said = []
    tell = reading("m", said.append)
    for done in (0, 1, 40_000_000, 3_140_000_000, 3_149_000_000):
        tell(done, 15_900_000_000)
    tell(3_000_000, 27_000_000)
    assert said == [
        "reading the weights of m",
        "reading the weights of m: 0.0 of 15.9 GB",
        "reading the weights of m: 3.1 of 15.9 GB",
        "reading the weights of m: 3 of 27 MB",
    ]


def test_threads_and_files_are_given_back(many):
    def held() -> list[str]:
        """The files of weights that are open now and were not before."""
        gc.collect()
        found = []
        for n in set(os.listdir("/proc/self/fd")) - before:
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/self/fd/{n}"))
        return [path for path in found if path.endswith(".safetensors")]

    folder, made = many
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    read = Checkpoint(folder.path).tensors()
    for name in made:
        read.take(name)
    assert held()
    del read
    until(lambda: not held())


@pytest.mark.gpu
def test_a_gpu_gets_the_same_bytes(many, monkeypatch):
    monkeypatch.setattr(pump, "PIECE", 1000)
    folder, made = many
    read = Checkpoint(folder.path).tensors("cuda:0")
    busy = torch.randn(4096, 4096, device="cuda:0")
    for _ in range(20):
        busy = busy @ busy / 64  # the stream is busy while memory changes hands
    for name in sorted(made, key=place):
        x = read.take(name)
        assert x.device.type == "cuda" and torch.equal(x.cpu(), made[name]), name
