"""What NVIDIA's profilers are told: the parts of the time to first token and of a round, each closed again."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from tfmagic.engine import ranges
from tfmagic.run import TTFT_PARTS

from .conftest import Bench, picture_prompt
from .test_loop import ids


def test_ranges_are_the_parts_of_a_run(tiny, pictures, monkeypatch):
    told, open_ones = [], []

    @contextmanager
    def range(name):
        open_ones.append(name)
        told.append(name)
        try:
            yield
        finally:
            assert open_ones.pop() == name

    monkeypatch.setattr(torch.cuda.nvtx, "range", range)
    monkeypatch.setattr(ranges, "shown", lambda: True)
    run = Bench(tiny).run(picture_prompt(tiny, [ids(20), pictures[0], ids(90)]))
    assert run.status == "done" and not open_ones
    parts = [part for part in TTFT_PARTS if part in told]
    assert parts == ["restore", "tower", "prefill", "first"] == [*dict.fromkeys(told)][:4]
    rounds = len(run.streams[0].rounds)
    assert told[-3 * rounds :] == rounds * ["draft", "verify", "commit"]


def test_without_a_device_nothing_is_told(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda.nvtx, "range", None)
    assert torch.cuda.is_available() or Bench(tiny).run(picture_prompt(tiny, [ids(9)])).status == "done"
