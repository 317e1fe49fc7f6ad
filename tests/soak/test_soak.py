"""The short form of `python -m tests.soak`."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
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


SIGHTS = ("done", "stopped", "resumed", "pictures", "kernel deaths", "evicted")


@pytest.mark.slow
def test_a_storm_leaves_no_trace(where):
    with Storm(seed=1) as storm:
        for _ in range(12):  # a slow machine takes longer to see everything
            storm.rage(10)
            seen = storm.counts | Counter(storm.engine.status().cache_counts)
            if all(seen[what] for what in SIGHTS):
                break
        storm.check()
        said = storm.report()
        assert all(seen[what] for what in SIGHTS), said
        assert storm.growth() < 100 << 20, said
