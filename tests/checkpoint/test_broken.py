"""Folders that do not work: each is refused by name, whatever is wrong with it, and nothing else is ever raised."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.errors import Refusal


def refused(folder, match):
    with pytest.raises(Refusal, match=match) as refusal:
        Checkpoint(folder.path)
    for line in (refusal.value.problem, refusal.value.fix):
        assert line and "\n" not in line


def test_no_folder(folder):
    folder.path = folder.path / "gone"
    refused(folder, "no model folder")


def test_no_config(folder):
    (folder.path / "config.json").unlink()
    refused(folder, r"has no config\.json")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "null", "[" * 100_000, '{"model_type": NaN'])
def test_config_is_no_object(folder, text):
    (folder.path / "config.json").write_bytes(text.encode("latin-1"))
    refused(folder, r"config\.json (is not|holds no)")


def test_config_is_a_folder(folder):
    (folder.path / "config.json").unlink()
    (folder.path / "config.json").mkdir()
    refused(folder, r"has no config\.json")


@pytest.mark.parametrize("config", [{"a": 1}, {"model_type": None}, {"model_type": 3}])
def test_no_model_type(folder, config):
    folder.json("config.json", config)
    refused(folder, "names no model_type")


def test_text_config_is_no_object(folder):
    folder.json("config.json", {"model_type": "qwen3_5", "text_config": [1]})
    refused(folder, "text_config")


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, r"quantised \(awq\)"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, r"quantised \(unnamed\)"),
        ({"quantization": "int4"}, r"quantised \(int4\)"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "MLX's mode 'mxfp4'"),
        ({"quantization": {"group_size": 64, "bits": 3}}, "packs the model in 3 bits by groups of 64"),
        ({"quantization": {"group_size": 10**40, "bits": 4}}, "packs the model in 4 bits by groups of 1000"),
        ({"quantization": {"group_size": "64", "bits": True}}, "packs the model in True bits by groups of '64'"),
        ({"quantization": {"bits": 4, "lm_head": {"bits": 5}}}, "packs lm_head in 5 bits"),
    ],
)
def test_quantised_by_config(folder, extra, match):
    folder.json("config.json", {"model_type": "qwen3_5", **extra})
    refused(folder, match)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_quantised_by_dtype(empty, dtype):
    empty.weights({"model.w": torch.zeros(4, dtype=dtype)})
    refused(empty, r"model\.w in model\.safetensors is quantised")


@pytest.mark.parametrize("suffix", ["scales", "weight_scale_inv", "qweight"])
def test_quantised_by_name(empty, suffix):
    empty.weights({f"model.q_proj.{suffix}": torch.zeros(4)})
    refused(empty, "is quantised")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("model-Q4_K_M.gguf", "GGUF"),
        ("pytorch_model.bin", "pickled weights only, which are never loaded"),
        ("model-00001-of-00002.safetensors", "shards but no model"),
        ("notes.txt", r"holds no model\.safetensors"),
    ],
)
def test_other_weights(empty, name, match):
    (empty.path / name).write_bytes(b"GGUF")
    refused(empty, match)


def test_gguf_alone(empty):
    (empty.path / "config.json").unlink()
    (empty.path / "model.gguf").write_bytes(b"GGUF")
    refused(empty, "GGUF is not read yet")
    empty.path = empty.path / "model.gguf"
    refused(empty, "GGUF file")


def test_missing_shards_are_named(empty):
    names = empty.shards({"model.a": torch.ones(1)}, {"model.b": torch.ones(1)}, {"model.c": torch.ones(1)})
    (empty.path / names[1]).unlink()
    refused(empty, f"lacks 1 of its 3 weight files: {names[1]}")


def test_a_shard_lacks_a_tensor(empty):
    names = empty.shards({"model.a": torch.ones(1)}, {"model.b": torch.ones(1)})
    empty.weights({"model.other": torch.ones(1)}, names[1])
    refused(empty, rf"promises model\.b in {names[1]}")


def test_a_tensor_twice(empty):
    empty.shards({"model.a": torch.ones(1)}, {"model.language_model.a": torch.ones(1)})
    refused(empty, "twice")


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a\\b.safetensors", "model.bin", 3, None])
def test_an_index_may_only_name_files_of_the_folder(empty, file):
    empty.json("model.safetensors.index.json", {"weight_map": {"model.a": file}})
    refused(empty, "no safetensors file of this folder")


@pytest.mark.parametrize("index", [[], {}, {"weight_map": {}}, {"weight_map": 3}, "x"])
def test_an_index_that_is_none(empty, index):
    empty.json("model.safetensors.index.json", index)
    refused(empty, "is not an index|lists no weights")


def test_a_lfs_pointer(folder):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
    (folder.path / "model.safetensors").write_text(text)
    refused(folder, "Git LFS pointer")


def test_a_truncated_file_is_named_at_every_length(folder):
    path = folder.path / "model.safetensors"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        refused(folder, r"model\.safetensors (is cut short|has [\d,]+ bytes and)")
    path.write_bytes(whole + b"x")
    refused(folder, "bytes and its header promises")


def write_header(folder, entries, data=b""):
    text = json.dumps(entries).encode()
    (folder.path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "fields",
    [
        None, 3, [], {}, {"dtype": "F32"}, {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}, {"dtype": 3, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": {"a": 1, "b": 2}},
    ],
)  # fmt: skip
def test_damaged_entries(folder, fields):
    write_header(folder, {"model.a": fields}, b"\0" * 4)
    refused(folder, r"damaged header entry for 'model\.a'")


def test_a_header_that_promises_the_world(folder):
    (folder.path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    refused(folder, "cut short or no safetensors")


@pytest.mark.parametrize(
    ("begin", "how"), [(0, r"'model\.b' overlaps another"), (2, "overlaps another"), (8, "leaves a hole before it")]
)
def test_tensors_lie_side_by_side(folder, begin, how):
    first = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    second = {"dtype": "F32", "shape": [1], "data_offsets": [begin, begin + 4]}
    write_header(folder, {"model.a": first, "model.b": second}, b"\0" * (begin + 4))
    refused(folder, how)


def test_a_file_that_shrinks_while_it_is_read(folder):
    tensors = Checkpoint(folder.path).tensors()
    path = folder.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(Refusal, match="has become shorter"):
        _ = [tensors[name] for name in tensors]


def test_a_file_that_goes_before_it_is_read(folder):
    tensors = Checkpoint(folder.path).tensors()
    (folder.path / "model.safetensors").unlink()
    with pytest.raises(Refusal, match="cannot be read: No such file"):
        _ = tensors["lm_head.weight"]


def test_a_tensor_that_no_memory_holds(empty):
    path = empty.path / "model.safetensors"
    text = json.dumps({"model.a": {"dtype": "F32", "shape": [1 << 41], "data_offsets": [0, 1 << 43]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        try:
            file.truncate(8 + len(text) + (1 << 43))
        except OSError:
            pytest.skip("this file system holds no file of 8 TiB")
    with pytest.raises(Refusal, match=r"no room for F32 \[2199023255552\]"):
        _ = Checkpoint(empty.path).tensors()["model.language_model.a"]


@settings(max_examples=150)
@given(data=st.data())
def test_any_damage_is_a_refusal_or_harmless(folder, data):
    name = data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    path = folder.path / name
    whole = path.read_bytes()
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        path.write_bytes(damaged)
        tensors = Checkpoint(folder.path).tensors()
        assert all(tensors[name].shape == tensors.shape(name) for name in tensors)
    except Refusal:
        pass
    finally:
        path.write_bytes(whole)
