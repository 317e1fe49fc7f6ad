"""The models on this machine that the engine can open. Reads configurations only; imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from .engine.families import FAMILIES

EMBEDDED = Path(__file__).parent / "engine" / "embedded" / "model"


class Model(NamedTuple):
    name: str
    family: str
    size: int
    """Bytes on disk."""


def models() -> list[Model]:
    """The embedded model, then those in the local Hugging Face cache."""
    size = sum(file.stat().st_size for file in EMBEDDED.rglob("*") if file.is_file())
    embedded = Model("embedded", _family(EMBEDDED), size)
    return [embedded] * (embedded.family in FAMILIES) + sorted(_cached())


def _cached() -> list[Model]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repo in repos:
        families = {_family(revision.snapshot_path) for revision in repo.revisions}
        if repo.repo_type == "model" and (known := families.intersection(FAMILIES)):
            found.append(Model(repo.repo_id, known.pop(), repo.size_on_disk))
    return found


def _family(folder: Path) -> str:
    """The `model_type`, or "" when there is no configuration that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return str(config.get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""
