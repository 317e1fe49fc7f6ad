from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

CONFIG = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}


class Folder:
    """A small model folder to break."""

    def __init__(self, path):
        self.path = path

    def json(self, name, value):
        (self.path / name).write_text(json.dumps(value))

    def weights(self, tensors, name="model.safetensors"):
        save_file(tensors, self.path / name)

    def shards(self, *tensors):
        names = [f"model-{i + 1:05}-of-{len(tensors):05}.safetensors" for i in range(len(tensors))]
        for name, shard in zip(names, tensors):
            self.weights(shard, name)
        weight_map = {tensor: name for name, shard in zip(names, tensors) for tensor in shard}
        self.json("model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
        return names


@pytest.fixture
def empty(tmp_path):
    """A folder with config.json alone."""
    folder = Folder(tmp_path / "tiny")
    folder.path.mkdir()
    folder.json("config.json", CONFIG)
    return folder


@pytest.fixture
def folder(empty):
    """A folder with config.json and one weights file."""
    empty.weights({"model.norm.weight": torch.ones(4), "lm_head.weight": torch.zeros(2, 4, dtype=torch.bfloat16)})
    return empty
