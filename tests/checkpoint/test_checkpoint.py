"""Folders that work: names, dtypes, tying, side files."""

from __future__ import annotations

import pytest
import torch

from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.checkpoint.names import normalised
from tfmagic.errors import Refusal

TEXT = "model.language_model."


def test_the_shipped_model_opens():
    checkpoint = Checkpoint(resolve(None))
    assert resolve("embedded") == checkpoint.path
    assert checkpoint.name == "embedded"
    assert checkpoint.model_type == "qwen3_5"
    tensors = checkpoint.tensors()
    assert tensors[TEXT + "embed_tokens.weight"].shape[1] == checkpoint.config["text_config"]["hidden_size"]
    assert checkpoint.tokenizer_path.is_file()
    assert "<|im_start|>" in checkpoint.template
    assert checkpoint.preprocessor["patch_size"] == checkpoint.config["vision_config"]["patch_size"]
    assert checkpoint.generation["eos_token_id"]


@pytest.mark.parametrize(
    ("stored", "ours"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", TEXT + "layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", TEXT + "layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", TEXT + "norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("backbone.embeddings.weight", TEXT + "embeddings.weight"),
        ("visual.blocks.0.norm1.bias", "model.visual.blocks.0.norm1.bias"),
        ("model.visual.pos_embed.weight", "model.visual.pos_embed.weight"),
        ("model.vision_tower.patch_embedder.weight", "model.vision_tower.patch_embedder.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.norm.weight", "mtp.norm.weight"),
    ],
)
def test_names(stored, ours):
    assert normalised(stored) == ours
    assert normalised(ours) == ours


def test_one_file(folder):
    tensors = Checkpoint(folder.path).tensors()
    assert sorted(tensors) == ["lm_head.weight", TEXT + "norm.weight"]
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert torch.equal(tensors[TEXT + "norm.weight"], torch.ones(4))
    assert "model.norm.weight" not in tensors


def test_shards(empty):
    a, b = torch.arange(6.0).view(2, 3), torch.arange(3)
    empty.shards({"model.a.weight": a}, {"model.b.weight": b})
    tensors = Checkpoint(empty.path).tensors()
    assert torch.equal(tensors[TEXT + "a.weight"], a)
    assert torch.equal(tensors[TEXT + "b.weight"], b)
    assert tensors.shape(TEXT + "a.weight") == (2, 3)


def test_empty_and_scalar_tensors(empty):
    empty.weights({"model.none": torch.zeros(0, 5), "model.one": torch.tensor(3.0)})
    tensors = Checkpoint(empty.path).tensors()
    assert tensors[TEXT + "none"].shape == (0, 5)
    assert tensors[TEXT + "one"].item() == 3.0


def test_what_was_read_is_noted(folder):
    folder.weights(
        {name: torch.ones(1) for name in ("model.a", "model.b", "mtp.norm.weight", "model.rotary_emb.inv_freq")}
    )
    checkpoint = Checkpoint(folder.path)
    tensors = checkpoint.tensors()
    assert tensors.leftover() == [TEXT + "a", TEXT + "b", "mtp.norm.weight"]
    tensors.take(TEXT + "a", (1,))
    assert tensors.leftover(["mtp.*"]) == [TEXT + "b"]
    assert checkpoint.tensors().leftover(["mtp.*"]) == [TEXT + "a", TEXT + "b"]


def test_take_names_what_is_missing_or_misshaped(folder):
    tensors = Checkpoint(folder.path).tensors()
    with pytest.raises(Refusal, match=r"lacks the tensor model\.language_model\.gone"):
        tensors.take(TEXT + "gone")
    with pytest.raises(Refusal, match=r"has the shape \[4\], and config.json asks for \[5\]"):
        tensors.take(TEXT + "norm.weight", (5,))
    with pytest.raises(KeyError):
        tensors["gone"]


def test_tying_is_the_top_levels_word_then_text_configs(folder):
    assert not Checkpoint(folder.path).tied
    folder.json("config.json", {"model_type": "x", "text_config": {"tie_word_embeddings": True}})
    assert Checkpoint(folder.path).tied
    folder.json("config.json", {"model_type": "x"})
    assert not Checkpoint(folder.path).tied


def test_an_unknown_family_is_named_with_the_known_ones(folder):
    checkpoint = Checkpoint(folder.path)
    assert checkpoint.choose({"qwen3_5": "this"}) == "this"
    with pytest.raises(Refusal, match="'qwen3_5' model") as refusal:
        checkpoint.choose({"gemma4": 1, "nemotron_h": 2})
    assert refusal.value.fix == "Known are: gemma4, nemotron_h."


def test_side_files_are_optional_until_asked_for(folder):
    checkpoint = Checkpoint(folder.path)
    assert checkpoint.generation == checkpoint.preprocessor == {}
    with pytest.raises(Refusal, match="no chat template"):
        _ = checkpoint.template
    with pytest.raises(Refusal, match=r"no tokenizer\.json"):
        _ = checkpoint.tokenizer_path


def test_where_a_template_may_be(folder):
    folder.json("tokenizer_config.json", {"chat_template": [{"name": "tool_use", "template": "t"},
                                                            {"name": "default", "template": "listed"}]})  # fmt: skip
    assert Checkpoint(folder.path).template == "listed"
    folder.json("tokenizer_config.json", {"chat_template": "config"})
    assert Checkpoint(folder.path).template == "config"
    folder.json("chat_template.json", {"chat_template": "json"})
    assert Checkpoint(folder.path).template == "json"
    (folder.path / "chat_template.jinja").write_text("file")
    assert Checkpoint(folder.path).template == "file"


def test_where_the_preprocessor_may_be(folder):
    folder.json("processor_config.json", {"image_processor": {"patch_size": 14}})
    assert Checkpoint(folder.path).preprocessor == {"patch_size": 14}
    folder.json("preprocessor_config.json", {"patch_size": 16})
    assert Checkpoint(folder.path).preprocessor == {"patch_size": 16}


def test_names_of_folders(folder, tmp_path):
    assert Checkpoint(folder.path).name == "tiny"
    snapshot = tmp_path / "models--Qwen--Qwen3.5-0.8B" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    folder.path.rename(snapshot)
    assert Checkpoint(snapshot).name == "Qwen/Qwen3.5-0.8B"
