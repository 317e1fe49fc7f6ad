from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tfmagic.engine import families
from tfmagic.engine.checkpoint import Checkpoint, resolve

GOLDEN = Path(__file__).parent.parent / "golden" / "qwen3_5_tiny"


@pytest.fixture(scope="session")
def tiny():
    """A random model of 4 layers, 256 ids and a 2-layer tower."""
    return families.load(Checkpoint(GOLDEN), "cpu")


@pytest.fixture(scope="session")
def tiny_fp8():
    """`tiny` with keys and values in e4m3."""
    return families.load(Checkpoint(GOLDEN), "cpu", kv="fp8")


@pytest.fixture(scope="session")
def shipped():
    return families.load(Checkpoint(resolve(None)), "cpu")


@pytest.fixture(scope="session")
def golden():
    """Reference inputs and outputs for `tiny`; see recipe.md beside them."""
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="session")
def features(tiny, golden):
    """First row -> feature rows, of the golden image prompt."""
    ids, found, start = golden["ids_img"][0].tolist(), {}, 0
    places = [i for i, id in enumerate(ids) if id == tiny.image_token_id and ids[i - 1] != id]
    for place, grid in zip(places, golden["image_grid_thw"].tolist(), strict=True):
        patches = golden["pixel_values"][start : start + grid[0] * grid[1] * grid[2]]
        found[place] = tiny.tower(patches, tuple(grid))
        start += len(patches)
    return found


def straight(rows: int) -> torch.Tensor:
    """Text positions [3, rows]."""
    return torch.arange(rows).expand(3, -1)
