"""The short form of `python -m tests.soak`."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.patience import patient
from tfmagic.engine.resident import place

from .storm import Storm


@pytest.fixture
def where(monkeypatch):
    patient()
    path = Path(tempfile.mkdtemp(prefix="tfm-", dir="/tmp"))
    monkeypatch.setenv("TFMAGIC_RUNTIME_DIR", str(path))
    yield path
    place.finish(place.Place(path))
    shutil.rmtree(path)


SIGHTS = ("done", "stopped", "resumed", "pictures", "kernel deaths", "evicted")
MOST = 100 << 20
"""Bytes that an engine may grow in the second half of a storm. One that is being warmed up may grow more, in a storm
that is not long enough yet."""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_storm_leaves_no_trace(where):
    with Storm(seed=1) as storm:
        end = time.monotonic() + 900
        while True:  # a slow machine takes longer to see everything
            storm.rage(10)
            seen = storm.counts | Counter(storm.engine.status().cache_counts)
            steady = len(storm.memory) >= 12 and storm.growth() < MOST
            if (all(seen[what] for what in SIGHTS) and steady) or time.monotonic() > end:
                break
        storm.check()
        said = storm.report()
        assert all(seen[what] for what in SIGHTS), said
        assert steady, said
