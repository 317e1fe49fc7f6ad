"""MLX's affine checkpoints: unpacked as the format says, run like any other, refused by name where they do not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.bench import checkpoints
from tfmagic import protocol
from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.checkpoint.affine import Affine
from tfmagic.engine.families.qwen3_5 import Model
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model
from tfmagic.engine.stream import Request
from tfmagic.errors import Refusal
from tfmagic.run import Run, Stream

TEXT = "model.language_model."
THEIRS = "language_model.model."


def by_hand(words, scales, biases, bits, group):
    """float64 [N, K], value by value."""
    n, k = words.shape[0], words.shape[1] * 32 // bits
    out = np.empty((n, k))
    for i in range(n):
        for j in range(k):
            word = int(words[i, j * bits // 32]) & 0xFFFFFFFF
            q = word >> (j * bits % 32) & (1 << bits) - 1
            out[i, j] = float(scales[i, j // group]) * q + float(biases[i, j // group])
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_unpacked_as_the_format_says(bits, group):
    g = torch.Generator().manual_seed(bits * group)
    words = torch.randint(-(2**31), 2**31, (3, 256 * bits // 32), generator=g, dtype=torch.int64).to(torch.int32)
    scales = torch.randn(3, 256 // group, generator=g).bfloat16()
    biases = torch.randn(3, 256 // group, generator=g).bfloat16()
    packed = Affine(words.view(torch.uint32), scales, biases, bits, group)
    assert packed.shape == (3, 256)
    expected = by_hand(words, scales, biases, bits, group)
    assert np.array_equal(packed.dequantised().numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_writer_is_within_half_a_step(bits):
    w = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    pieces = checkpoints.quantised(w, bits, 64)
    step = pieces[1].float().repeat_interleave(64, 1)
    error = (Affine(*pieces, bits, 64).dequantised() - w.float()).abs()
    assert (error <= 0.5 * step + 2**-7 * w.float().abs().amax()).all()


def answer(folder) -> str:
    record = Run("mlx", 0.0, streams=[Stream()])
    opened = open_model(str(folder), "cpu", Settings(prompt_cache_gib=0), lambda event: record.apply(event))
    prompt = opened.prepare([protocol.Message("user", [protocol.Text("Tell me a story about a fox.")])], {})
    sampling = opened.sampling(protocol.Params(temperature=0, max_tokens=12), prompt)
    opened.engine.submit(Request("mlx", prompt, sampling, 1, 0.0, 0.0, opened.text.detokenizer, False))
    while opened.engine.step():
        pass
    assert record.status == "done"
    return record.streams[0].text


@pytest.fixture(scope="module", params=[(4, 64), (8, 32)], ids=["4 bits", "8 bits"])
def shipped(request, tmp_path_factory):
    """The shipped model, packed."""
    folder = tmp_path_factory.mktemp("mlx") / "packed"
    folder.mkdir()
    checkpoints.repacked(Checkpoint(resolve(None)), folder, *request.param)
    return folder, *request.param


def test_the_shipped_model_packed_answers(shipped):
    folder, bits, _ = shipped
    text = answer(folder)
    assert len(text.split()) >= 3
    if bits == 8:
        assert text.split()[:2] == answer(resolve(None)).split()[:2]


def test_packed_is_the_same_model_as_its_values_in_plain_numbers(shipped, tmp_path):
    folder, bits, group = shipped
    packed = Checkpoint(folder)
    tensors = packed.tensors()
    assert tensors.form(TEXT + "layers.0.mlp.up_proj.weight") == (bits, group)
    plain = {name: tensors.take(name, Checkpoint(resolve(None)).tensors().shape(name)) for name in tensors}
    assert tensors.leftover() == []
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja") and "index" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": False}))
    save_file(plain, tmp_path / "model.safetensors")
    ids, logits = [5, 99, 1000, 7], []
    for checkpoint in (packed, Checkpoint(tmp_path)):
        model = Model(checkpoint)
        logits.append(model.prompt_pass(model.new_state(), ids, {}, model.positions(ids, [])[0], [])[0])
    assert torch.equal(*logits)


def test_norms_and_convolutions_come_as_hugging_face_has_them(shipped):
    ours, theirs = Checkpoint(resolve(None)).tensors(), Checkpoint(shipped[0]).tensors()
    for name in ("layers.0.input_layernorm.weight", "layers.3.self_attn.k_norm.weight", "norm.weight",
                 "layers.0.linear_attn.norm.weight", "layers.0.linear_attn.conv1d.weight"):  # fmt: skip
        shape = ours.shape(TEXT + name)
        a, b = ours.take(TEXT + name, shape).float(), theirs.take(TEXT + name, shape).float()
        assert torch.allclose(a, b, atol=2**-8 * (1 + a.abs().max())), name
    patch = "model.visual.patch_embed.proj.weight"
    assert theirs.shape(patch)[-1] == 3
    assert torch.equal(ours.take(patch), theirs.take(patch, ours.shape(patch)))


def test_a_tower_that_was_left_out_is_not_asked_for(shipped, tmp_path):
    folder = shipped[0]
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja") and "index" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}
    save_file({n: x for n, x in tensors.items() if not n.startswith("vision_tower.")}, tmp_path / "model.safetensors")
    model = Model(Checkpoint(tmp_path))
    assert model.eyes is None and model.image_token_id is None
    assert "vision_config" in json.loads((tmp_path / "config.json").read_text())


# What does not fit -------------------------------------------------------------------------------


@pytest.fixture
def small(empty):
    """A folder with two packed modules and a plain norm, to break."""
    w = torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    tensors = {f"{THEIRS}norm.weight": torch.ones(128)}
    for name, bits in (("q_proj", 4), ("k_proj", 8)):
        parts = zip(("weight", "scales", "biases"), checkpoints.quantised(w, bits, 32))
        tensors |= {f"{THEIRS}layers.0.{name}.{part}": tensor for part, tensor in parts}
    empty.quantization = {"group_size": 32, "bits": 4, f"{THEIRS}layers.0.k_proj": {"group_size": 32, "bits": 8}}
    empty.weights(tensors)
    say(empty, quantization=empty.quantization)
    return empty


def say(folder, **keys):
    folder.json("config.json", {"model_type": "qwen3_5", **keys})


def refused(folder, match):
    with pytest.raises(Refusal, match=match) as refusal:
        Checkpoint(folder.path)
    for line in (refusal.value.problem, refusal.value.fix):
        assert line and "\n" not in line and len(line) < 400


def test_a_map_of_modules(small):
    tensors = Checkpoint(small.path).tensors()
    assert tensors.form(TEXT + "layers.0.q_proj.weight") == (4, 32)
    assert tensors.form(TEXT + "layers.0.k_proj.weight") == (8, 32)
    assert tensors.shape(TEXT + "layers.0.k_proj.weight") == tensors[TEXT + "layers.0.k_proj.weight"].shape == (4, 128)
    names = [TEXT + name for name in ("layers.0.k_proj.weight", "layers.0.q_proj.weight", "norm.weight")]
    assert sorted(tensors) == names
    assert len(tensors) == 3 and TEXT + "layers.0.k_proj.scales" not in tensors
    assert tensors.affine(TEXT + "norm.weight", (128,)) is None
    assert tensors.affine(TEXT + "layers.0.q_proj.weight", (4, 128)).q.dtype == torch.uint32
    assert tensors.fresh().leftover() == names and tensors.leftover() == names[2:]


def test_quantization_wins_over_text_config_and_the_other_key(small):
    say(small, quantization=small.quantization, text_config={"quantization_config": {"quant_method": "fp8"}})
    assert Checkpoint(small.path).tensors().form(TEXT + "layers.0.q_proj.weight")
    say(small, quantization=small.quantization, quantization_config={"quant_method": "fp8"})
    assert Checkpoint(small.path).tensors().form(TEXT + "layers.0.q_proj.weight")
    say(small, quantization_config=small.quantization)
    assert Checkpoint(small.path).tensors().form(TEXT + "layers.0.q_proj.weight")
    say(small, quantization=small.quantization, quantization_config=small.quantization)
    assert Checkpoint(small.path).tensors().form(TEXT + "layers.0.q_proj.weight")


@pytest.mark.parametrize("nothing", [False, None, {}, []])
def test_false_and_empty_are_unpacked(folder, small, nothing):
    say(small, quantization=nothing)
    refused(small, "is quantised .*config.json does not say how")
    small.weights({"model.norm.weight": torch.ones(4)})
    assert len(Checkpoint(small.path).tensors()) == 1


@pytest.mark.parametrize("value", [False, None, {}])
def test_a_module_said_to_be_plain_is_packed(small, value):
    say(small, quantization={**small.quantization, f"{THEIRS}layers.0.k_proj": value})
    refused(small, r"layers\.0\.k_proj\.\w+ in model\.safetensors is quantised")


def test_a_module_said_to_be_packed_is_plain(small):
    say(small, quantization={**small.quantization, f"{THEIRS}norm": {"bits": 4}})
    refused(small, r"says that model\.language_model\.norm is packed")


def test_a_modules_map_has_its_own_defaults(small):
    say(small, quantization={**small.quantization, f"{THEIRS}layers.0.k_proj": {"bits": 8}})
    refused(small, "not 8 bits in groups of 64")


def test_two_names_of_a_module_must_agree(small):
    alias = {"model.layers.0.k_proj": {"group_size": 32, "bits": 8}}
    say(small, quantization={**small.quantization, **alias})
    assert Checkpoint(small.path).tensors().form(TEXT + "layers.0.k_proj.weight") == (8, 32)
    alias["model.layers.0.k_proj"] = {"group_size": 64, "bits": 8}
    say(small, quantization={**small.quantization, **alias})
    refused(small, r"two things of model\.language_model\.layers\.0\.k_proj")


def test_two_keys_must_agree(small):
    say(small, quantization=small.quantization, quantization_config={"group_size": 64, "bits": 4})
    refused(small, "quantization and quantization_config differ")


@pytest.mark.parametrize(
    ("part", "change", "match"),
    [
        *((part, None, f"lacks its {part}") for part in ("weight", "scales", "biases")),
        ("scales", lambda t: t[:, :-1].clone(), "not 4 bits in groups of 32"),
        ("biases", lambda t: t[:-1].clone(), "not 4 bits in groups of 32"),
        ("weight", lambda t: t[:, :-1].clone(), "not 4 bits in groups of 32"),
        ("weight", lambda t: t.reshape(-1).clone(), "not 4 bits in groups of 32"),
        ("weight", lambda t: t[:0].clone(), "not 4 bits in groups of 32"),
        ("weight", lambda t: t.view(torch.int32).clone(), "packed in I32"),
        ("scales", lambda t: t.double(), "scales in F64"),
        ("biases", lambda t: t.float(), "biases in F32"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(small, part, change, match):
    path, name = small.path / "model.safetensors", f"{THEIRS}layers.0.q_proj.{part}"
    tensors = load_file(path)
    old = tensors.pop(name)
    if change is not None:
        tensors[name] = change(old)
    small.weights(tensors)
    refused(small, match)


def test_words_that_belong_to_nothing(small):
    small.weights({"model.odd": torch.zeros(4, dtype=torch.int32).view(torch.uint32)})
    refused(small, "lacks its weight")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["bits", "group_size", "mode", "quant_method", f"{THEIRS}layers.0.k_proj", "x"]),
        inner,
        max_size=4,
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=200)
@given(a=JSON, b=JSON)
def test_whatever_config_says_is_read_or_refused_in_a_line(small, a, b):
    say(small, quantization=a, text_config={"quantization_config": b})
    try:
        tensors = Checkpoint(small.path).tensors()
        assert all(tensors[name].shape == tensors.shape(name) for name in tensors)
    except Refusal as refusal:
        assert "\n" not in refusal.problem and len(refusal.problem) < 500


@settings(max_examples=150)
@given(data=st.data())
def test_any_damage_to_packed_weights_is_a_refusal_or_harmless(small, data):
    path = small.path / "model.safetensors"
    whole = path.read_bytes()
    damaged = bytearray(whole)
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    try:
        path.write_bytes(damaged[: data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))])
        tensors = Checkpoint(small.path).tensors()
        assert all(tensors[name].shape == tensors.shape(name) for name in tensors)
    except Refusal as refusal:
        assert "\n" not in refusal.problem
    finally:
        path.write_bytes(whole)
