"""Drafter folders that are wrong: refused by name in one line, and never anything but refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.block import Ask, Drafter
from tfmagic.engine.drafting.dflash import config
from tfmagic.errors import Refusal

from .conftest import FIRST, GOLDEN, SMALL, Target, changed, shapes, taps, weights

TARGET = config.Target(32, 6, 80, 80)


def refusal(c: dict) -> str:
    with pytest.raises(Refusal) as caught:
        config.read(c, TARGET)
    assert "\n" not in caught.value.problem and caught.value.fix and len(caught.value.problem) < 200
    return caught.value.problem


def test_the_small_one_is_read():
    c = config.read(SMALL, TARGET)
    assert (c.second, c.windows, c.causal, c.taps) == (True, (12, None), (False, False), (1, 4))
    assert (c.reach, config.read(changed(layer_types=["sliding_attention"] * 2), TARGET).reach) == (None, 11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "'None', not DFlashDraftModel or DFlash2DraftModel"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "'Qwen3ForCausalLM', not"),
        ({"architectures": ["DFlashDraftModel", "DFlash2DraftModel"]}, "architectures names"),
        ({"hidden_size": 64}, "64 features (hidden_size) and the model's 32"),
        ({"hidden_size": "32"}, "hidden_size is 32; it must be a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "layer_types must list 3 layers"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim is 7; it must be even"),
        ({"num_target_layers": 8}, "made for a model of 8 layers (num_target_layers) and this one has 6"),
        ({"target_layer_ids": [1, 6]}, "asks for layer 6 and the model's last is 5"),
        ({"target_layer_ids": [-1, 2]}, "target_layer_ids must count up"),
        ({"target_layer_ids": [4, 1]}, "target_layer_ids must count up"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids must count up"),
        ({"target_layer_ids": []}, "target_layer_ids must list"),
        ({"target_layer_ids": [1.0]}, "target_layer_ids must list"),
        ({"mask_token_id": 80}, "mask_token_id is 80; it must be a whole number from 0 to 79"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"vocab_size": 100}, "guesses 100 ids (vocab_size) and the model has 80"),
        ({"vocab_size": 10}, "16 candidates a place are to be chosen of 10 ids"),
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": 1000}, "block_size is 1000"),
        ({"conv_group_size": 5}, "conv_group_size 5 does not divide hidden_size 32"),
        ({"conv_kernel_size": 0}, "conv_kernel_size is 0"),
        ({"selector_rank": None}, "lacks selector_rank"),
        ({"sliding_window": None}, "lacks sliding_window"),
        ({"sliding_window": 1}, "sliding_window is 1"),
        ({"use_sliding_window": False}, "sliding layers and use_sliding_window is false"),
        ({"layer_types": None}, "use_sliding_window is set without layer_types"),
        ({"layer_types": ["full_attention", "chunked"]}, "'chunked'; known are"),
        ({"layer_types": ["full_attention", {}]}, "layer_types has"),
        ({"is_causal": "yes"}, "is_causal is 'yes'"),
        ({"rope_theta": None}, "lacks rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "another rotary embedding (yarn)"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "another rotary embedding"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, "'mrope_section', which is not known"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is 1e-6; it must be a number"),
        ({"output_multiplier": 10**400}, "output_multiplier is 1000"),
        ({"final_logit_softcapping": -2.0}, "final_logit_softcapping is -2"),
        ({"query_pre_attn_scalar": 4}, "'query_pre_attn_scalar' is not known"),
        ({"dflash_config": {**SMALL["dflash_config"], "sample_from_anchor": True}}, "'sample_from_anchor' is"),
        ({"dflash_config": []}, "dflash_config is no object"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit(changes, message):
    own = {k: v for k, v in changes.items() if k in SMALL["dflash_config"]}
    c = changed(**own) | {k: v for k, v in changes.items() if k not in own}
    assert message in refusal({k: v for k, v in c.items() if v is not None})


def test_what_says_nothing_is_let_pass():
    more = {"transformers_version": "5", "rope_scaling": None, "sample_from_anchor": False, "tie_word_embeddings": True}
    assert config.read(SMALL | more, TARGET) == config.read(SMALL, TARGET)
    own = SMALL["dflash_config"]
    flat = {k: v for k, v in SMALL.items() if k != "dflash_config"} | own
    assert config.read(flat, TARGET) == config.read(SMALL, TARGET)


def test_taps_where_the_config_is_silent():
    depth = config.Target(32, 64, 80, 80)
    c = changed(**FIRST, target_layer_ids=None, num_target_layers=64, num_hidden_layers=5, layer_types=None,
                use_sliding_window=None)  # fmt: skip
    assert config.read(c, depth).taps == (1, 16, 31, 46, 61)
    assert config.read(c | {"num_hidden_layers": 1}, depth).taps == (32,)


def test_the_golden_one_for_another_model():
    with pytest.raises(Refusal, match=r"64 features .* 32"):
        Drafter(Checkpoint(GOLDEN / "dflash_tiny"), Target())


# Weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(shapes(SMALL)))
def test_a_tensor_is_missing_misshaped_or_not_finite(write, name):
    for spoil, message in (
        (lambda x: None, f"lacks the tensor {name}"),
        (lambda x: x[..., :-1], f"{name} has the shape"),
        (lambda x: x.index_fill(0, torch.tensor([1]), float("nan")), f"{name} holds numbers that are not finite"),
        (lambda x: x.to(torch.int64), f"{name} is of type int64"),
    ):
        tensors = weights(SMALL)
        spoilt = spoil(tensors.pop(name))
        if spoilt is not None:
            tensors[name] = spoilt.contiguous()
        with pytest.raises(Refusal) as caught:
            Drafter(Checkpoint(write(SMALL, tensors)), Target())
        assert message in caught.value.problem


def test_a_tensor_is_left_over(write):
    folder = write(SMALL, weights(SMALL) | {"markov.weight": torch.ones(3)})
    with pytest.raises(Refusal, match=r"1 tensors of no known part, markov\.weight first"):
        Drafter(Checkpoint(folder), Target())


def test_the_second_kind_s_tensors_in_the_first_kind_s_folder(write):
    with pytest.raises(Refusal, match="of no known part, candidate_selector"):
        Drafter(Checkpoint(write(changed(**FIRST), weights(SMALL))), Target())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_read(write, dtype):
    tensors = {name: x.to(dtype) for name, x in weights(SMALL).items()}
    drafter = Drafter(Checkpoint(write(SMALL, tensors)), Target())
    assert drafter.weights.norm.dtype == torch.float32


def test_shards_are_read(tmp_path):
    tensors = weights(SMALL)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Drafter(Checkpoint(tmp_path), Target()).block == 6


# Anything at all --------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 100), st.integers(), st.floats(), st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 9), st.sampled_from(["full_attention", "sliding_attention"])), max_size=4),
    st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "x"]), st.integers(-1, 9), max_size=2),
)  # fmt: skip
KEYS = sorted([*config.READ - {"dflash_config"}, *config.OWN, "factor"])


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_config_opens_or_is_refused_in_one_line(changes):
    c = copy.deepcopy(SMALL)
    for key, value in changes.items():
        (c["dflash_config"] if key in config.OWN else c)[key] = value
    try:
        read = config.read(c, TARGET)
    except Refusal as refused:
        assert "\n" not in refused.problem and len(refused.problem) < 250 and refused.fix
    else:
        assert 2 <= read.block <= config.BLOCK and read.candidates <= read.guessed <= 80 and read.taps[-1] < 6


@settings(max_examples=30)
@given(
    st.sampled_from(
        [{"head_dim": 4}, {"block_size": 2}, {"num_attention_heads": 2}, {"conv_group_size": 1}, {"selector_top_k": 1},
         {"sliding_window": 2}, {"intermediate_size": 1}, {"eps": 1e-12}, {"conv_kernel_size": 9}, {"selector_rank": 1},
         {"input_embedding_scale": -3.0}, {"is_causal": True}, {"target_layer_ids": [0, 1, 2, 3, 4, 5]}]
    )
)  # fmt: skip
def test_sizes_at_their_ends(write, changes):
    c = changed(**{k: v for k, v in changes.items() if k != "eps"})
    drafter = Drafter(Checkpoint(write(c)), Target())
    context = drafter.context()
    drafter.extend(context, taps(20, width=32 * len(drafter.layers)), 0)
    [lattice] = drafter.lattices([Ask(context, 1, 20, 99)])
    places, k = drafter.block - 1, drafter.config.candidates
    assert lattice.ids.shape == (places, k) and lattice.edges.shape == (places, k, k)
