"""The shipped model in transformers' own implementation, float32: the same greedy text, images included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from tfmagic.engine.checkpoint import resolve

from .conftest import straight
from .test_golden import all_logits, greedy

pytestmark = pytest.mark.slow

TEXTS = [
    "What is 12 + 7?",
    "Repeat: the red fox runs over the green hill and the lazy dog sleeps",
    "Tell me a story.",
    "Hello! What can you do?",
    "Replace red with blue: the red cat sat on the red mat and looked at the red moon. " * 3,
]


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(resolve(None), dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def text():
    from tfmagic.engine.checkpoint import Checkpoint
    from tfmagic.engine.prompt import TextSide

    return TextSide(Checkpoint(resolve(None)))


def scene() -> Image.Image:
    image = Image.new("RGB", (192, 160), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((20, 20, 70, 70), fill="red")
    pen.rectangle((110, 80, 160, 130), fill="blue")
    return image


@pytest.mark.parametrize("said", TEXTS)
def test_text(reference, shipped, text, said):
    ids = text.encode(f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n")
    with torch.inference_mode():
        theirs = reference.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False)[0, len(ids) :].tolist()
    logits, state = all_logits(shipped, ids, {}, straight(len(ids)))
    ours = greedy(shipped, logits[-1], state, len(theirs))
    assert ours == theirs


@pytest.mark.parametrize("said", ["Describe the picture.", "How many shapes are there?", "What colour is the circle?"])
def test_an_image(reference, shipped, text, said):
    patches, grid, tokens = shipped.prepare(scene())
    pad = "<|image_pad|>" * tokens
    ids = text.encode(f"<|im_start|>user\n<|vision_start|>{pad}<|vision_end|>{said}<|im_end|>\n<|im_start|>assistant\n")
    first = ids.index(shipped.image_token_id)
    kinds = torch.tensor([[int(id == shipped.image_token_id) for id in ids]], dtype=torch.int32)
    inputs = {
        "pixel_values": patches, "image_grid_thw": torch.tensor([grid]), "mm_token_type_ids": kinds,
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
    }  # fmt: skip
    with torch.inference_mode():
        theirs = reference.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False, **inputs)[
            0, len(ids) :
        ].tolist()
        features = reference.model.get_image_features(patches, torch.tensor([grid])).pooler_output
    ours = shipped.tower(patches, grid)
    assert float((ours - torch.cat(list(features))).abs().max()) < 1e-4

    class Placed:
        name, start = "scene.png", first

    Placed.tokens, Placed.grid = tokens, grid
    positions, delta = shipped.positions(ids, [Placed])
    logits, state = all_logits(shipped, ids, {first: ours}, positions)
    state.shift = delta
    assert greedy(shipped, logits[-1], state, len(theirs)) == theirs
    assert np.isfinite(logits.numpy()).all()
