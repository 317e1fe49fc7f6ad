"""The short form of `python -m tests.soak`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tfmagic.engine.resident import place

from .storm import Storm


@pytest.fixture
def where(monkeypatch):
    path = Path(tempfile.mkdtemp(prefix="tfm-", dir="/tmp"))
    monkeypatch.setenv("TFMAGIC_RUNTIME_DIR", str(path))
    yield path
    place.finish(place.Place(path))
    shutil.rmtree(path)


@pytest.mark.slow
def test_a_storm_leaves_no_trace(where):
    with Storm(seed=1) as storm:
        storm.rage(10)
        storm.check()
        said = storm.report()
        assert all(storm.counts[what] for what in ("done", "stopped", "resumed", "pictures", "kernel deaths")), said
        assert storm.engine.status().cache_counts["evicted"] and storm.growth() < 100 << 20, said
