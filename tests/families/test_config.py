"""A checkpoint that does not fit is refused by the name of what does not."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy

import pytest
from safetensors.torch import load_file, save_file

from tfmagic.engine import families
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.families.qwen3_5.config import read
from tfmagic.errors import Refusal

from .conftest import GOLDEN

CONFIG = json.loads((GOLDEN / "config.json").read_text())


def changed(where="text_config", **values):
    config = deepcopy(CONFIG)
    config[where] |= values
    return config


def test_the_golden_config_is_read():
    c = read(CONFIG, tied=False)
    assert c.text.full == (False, False, False, True) and c.text.rotary == 8 and c.text.section == (2, 1, 1)
    assert c.text.channels == 208 and c.vision.side == 6 and c.image_token_id == 240


def test_old_spellings_are_read_too():
    config = deepcopy(CONFIG)
    rope = config["text_config"].pop("rope_parameters")
    del config["text_config"]["layer_types"]
    config["text_config"] |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.25}
    config["text_config"]["rope_scaling"] = {"mrope_section": [2, 1, 1]}
    assert read(config, tied=False).text == read(CONFIG, tied=False).text


def test_a_text_only_config_is_read():
    config = CONFIG["text_config"] | {"model_type": "qwen3_5"}
    assert read(config, tied=False).vision is None


@pytest.mark.parametrize(
    "config, word",
    [
        (changed(num_attention_heads=3), "num_attention_heads"),
        (changed(linear_num_value_heads=5), "linear_num_value_heads"),
        (changed(layer_types=["full_attention"]), "layer_types"),
        (changed(layer_types=["sliding_attention"] * 4), "sliding_attention"),
        (changed(attention_bias=True), "bias"),
        (changed(rope_parameters=CONFIG["text_config"]["rope_parameters"] | {"rope_type": "yarn"}), "yarn"),
        (changed(hidden_size="wide"), "wide"),
        (changed("vision_config", out_hidden_size=32), "32"),
        (changed("vision_config", deepstack_visual_indexes=[1]), "deepstack"),
    ],
)
def test_what_cannot_run_is_refused(config, word):
    with pytest.raises(Refusal) as error:
        read(config, tied=False)
    assert word in error.value.problem and error.value.fix


@pytest.mark.parametrize(
    "key", ["hidden_size", "head_dim", "linear_key_head_dim", "rms_norm_eps", "max_position_embeddings"]
)
def test_a_missing_key_is_named(key):
    config = deepcopy(CONFIG)
    del config["text_config"][key]
    with pytest.raises(Refusal, match=key):
        read(config, tied=False)


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "generation_config.json"):
        shutil.copy(GOLDEN / name, tmp_path / name)
    return tmp_path


def test_tensors_that_are_missing_misshapen_or_left_over_are_named(folder):
    tensors, name = load_file(GOLDEN / "model.safetensors"), "model.language_model.layers.1.mlp.down_proj.weight"
    for harmed, word in (
        ({k: v for k, v in tensors.items() if k != name}, name),
        (tensors | {name: tensors[name].t().contiguous()}, name),
        (tensors | {"model.language_model.layers.9.extra": tensors[name].clone()}, "layers.9.extra"),
    ):
        save_file(harmed, folder / "model.safetensors")
        with pytest.raises(Refusal) as error:
            families.load(Checkpoint(folder), "cpu")
        assert word in error.value.problem


def test_an_unknown_family_is_refused_by_name(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "llama"}))
    shutil.copy(GOLDEN / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(Refusal, match="llama"):
        families.load(Checkpoint(folder), "cpu")
