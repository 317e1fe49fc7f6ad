"""The image side of Qwen3.5: the reference's bits and positions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tfmagic.engine.families.qwen3_5.images import Preprocessor, prepare
from tfmagic.engine.families.qwen3_5.positions import positions
from tfmagic.errors import Refusal

GOLDEN = json.loads((Path(__file__).parent / "positions.json").read_text())

RAW = Preprocessor(least=1024, mean=(0.0,) * 3, std=(1.0,) * 3, scale=1.0)


def pattern(width, height):
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(
        (np.stack([x * 7 + y * 3, x * 5 ^ y * 11, (x * x + y * 13) // 3], -1) % 256).astype(np.uint8)
    )


@pytest.mark.parametrize(
    ("size", "least", "most", "grid", "sha"),
    [
        ((640, 480), 65536, 16777216, (1, 30, 40), "da45de550b0dd76d"),
        ((640, 480), 25600, 102400, (1, 16, 22), "54fbf71d38f1929a"),
        ((37, 100), 65536, 16777216, (1, 28, 10), "078c90197abe6e05"),
        ((37, 100), 25600, 102400, (1, 18, 8), "14aae6eddf2a1905"),
        ((700, 33), 65536, 16777216, (1, 4, 74), "90f5f9abd31e4e87"),
        ((700, 33), 25600, 102400, (1, 4, 48), "9ee7df2f2d4bf7e3"),
        ((1, 200), 65536, 16777216, (1, 228, 2), "871a12f28bc9da64"),
        ((1, 200), 25600, 102400, (1, 142, 2), "5d9aa3587e978b21"),
    ],
)
def test_patches_are_the_references(size, least, most, grid, sha):
    """Hashes of what transformers 5.24's PIL backend gave for the same pictures."""
    patches, made, tokens = prepare(np.asarray(pattern(*size)), Preprocessor(least=least, most=most))
    assert made == grid
    assert tokens == grid[1] * grid[2] // 4
    assert patches.shape == (grid[1] * grid[2], 1536) and patches.dtype == torch.float32
    assert hashlib.sha256(patches.numpy().tobytes()).hexdigest()[:16] == sha


def test_patches_run_cell_by_cell():
    """A 64 x 64 picture whose every 16 x 16 square has one value: its number in reading order."""
    squares = np.arange(16, dtype=np.uint8).reshape(4, 4).repeat(16, 0).repeat(16, 1)
    picture = Image.fromarray(squares).convert("RGB")
    patches, _, _ = prepare(np.asarray(picture), RAW)
    assert patches[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert (patches == patches[:, :1]).all()


def test_values_of_a_patch_are_colour_frame_row_column():
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    patches, _, _ = prepare(noise, RAW)
    first = patches[0].view(3, 2, 16, 16)
    assert torch.equal(first[:, 0], first[:, 1])
    assert np.array_equal(first[:, 0].numpy(), noise[:16, :16].transpose(2, 0, 1))


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_sizes(width, height):
    preprocessor = Preprocessor(most=4096 * 1024)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError, match="aspect"):
            preprocessor.resized(width, height)
        return
    wide, high = preprocessor.resized(width, height)
    assert wide % 32 == high % 32 == 0 and min(wide, high) >= 32
    assert preprocessor.least <= wide * high <= preprocessor.most
    assert preprocessor.tokens(width, height) == preprocessor.tokens(height, width) <= 4096


def test_options_of_a_checkpoint():
    assert Preprocessor.read({}, {}) == Preprocessor(most=4096 * 1024)
    new = {"size": {"shortest_edge": 25600, "longest_edge": 102400}, "patch_size": 14, "image_mean": [0.1, 0.2, 0.3]}
    made = Preprocessor.read(new, {"patch_size": 16, "spatial_merge_size": 4})
    assert (made.least, made.most, made.patch, made.merge, made.mean) == (25600, 102400, 14, 4, (0.1, 0.2, 0.3))
    old = Preprocessor.read({"min_pixels": 3136, "max_pixels": 12544, "size": None}, {})
    assert (old.least, old.most) == (3136, 12544)
    assert Preprocessor.read({"size": {"longest_edge": 16777216}}, {}, tokens=100).most == 100 * 1024


@pytest.mark.parametrize(
    "options",
    [{"patch_size": 0}, {"patch_size": "x"}, {"image_mean": 3}, {"image_std": [0, 1, 1]}, {"image_mean": [1, 2]},
     {"size": [1, 2]}, {"size": {"shortest_edge": 100, "longest_edge": 10}}, {"merge_size": None}],
)  # fmt: skip
def test_impossible_options(options):
    with pytest.raises(Refusal, match=r"preprocessor_config\.json"):
        Preprocessor.read(options, {})


def test_the_fingerprint_names_every_option():
    prints = {Preprocessor().fingerprint, Preprocessor(least=1).fingerprint, Preprocessor(std=(1, 1, 1)).fingerprint}
    assert len(prints) == 3


def image(start, grid, merge=2):
    return SimpleNamespace(name="x", start=start, grid=grid, tokens=grid[1] * grid[2] // merge**2)


def test_positions_are_the_references():
    """Of the reference model for two images in a text."""
    images = [image(i["start"], tuple(i["grid"])) for i in GOLDEN["images"]]
    rows, delta = positions(GOLDEN["ids"], images, GOLDEN["image_token_id"])
    assert rows.tolist() == GOLDEN["positions"]
    assert delta == GOLDEN["rope_delta"]


def test_positions_of_text():
    rows, delta = positions([1, 2, 3], [], 9)
    assert rows.tolist() == [[0, 1, 2]] * 3 and delta == 0
    assert rows.dtype == torch.int64
    rows, delta = positions([], [], 9)
    assert rows.shape == (3, 0) and delta == 0


def test_adjacent_images_and_images_at_the_ends():
    rows, delta = positions([9] * 8, [image(0, (1, 4, 4)), image(4, (1, 4, 4))], 9)
    assert rows.tolist() == [[0] * 4 + [2] * 4, [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 2, 3, 2, 3]]
    assert delta == -4


def test_a_prefix_has_the_prefixs_positions():
    ids = [1, 9, 9, 9, 9, 9, 9, 2, 3]
    whole, _ = positions(ids, [image(1, (1, 4, 6))], 9)
    more, _ = positions([*ids, 4, 5], [image(1, (1, 4, 6))], 9)
    assert torch.equal(more[:, : len(ids)], whole)


@pytest.mark.parametrize(
    ("ids", "images"),
    [
        ([1, 9, 9, 9], [image(1, (1, 4, 4))]),
        ([1, 9, 9, 9, 9], [image(0, (1, 4, 4))]),
        ([9, 9, 9, 9, 9], [image(0, (1, 4, 4))]),
        ([9, 9, 9, 9], [image(0, (1, 4, 4)), image(0, (1, 4, 4))]),
        ([1, 9], []),
    ],
)
def test_images_must_lie_on_their_placeholders(ids, images):
    with pytest.raises(ValueError, match="placeholder"):
        positions(ids, images, 9)
