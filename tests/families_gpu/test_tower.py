"""The tower around its kernels: tables that are kept, and frames of one picture."""

from __future__ import annotations

from dataclasses import replace

import torch

from tfmagic.engine.families.qwen3_5.gpu import tower


def test_tables_of_the_last_sizes_are_kept(tiny, monkeypatch):
    monkeypatch.setattr(tower, "MOST_PATCHES", 64)
    v, w = tiny.config.vision, replace(tiny.eyes, laid={})
    first, *_ = (tower.laid_out(*size, v, w) for size in ((4, 6), (6, 4), (2, 8)))
    assert tower.laid_out(4, 6, v, w) is first
    tower.laid_out(2, 4, v, w)
    assert list(w.laid) == [(2, 8), (4, 6), (2, 4)]


def test_frames_of_a_picture_see_themselves_alone(tiny):
    patches = torch.randn(48, tiny.eyes.patch.k, generator=torch.Generator().manual_seed(0))
    frames = [tiny.tower(frame, (1, 4, 6)) for frame in patches.split(24)]
    assert torch.equal(tiny.tower(patches, (2, 4, 6)), torch.cat(frames))
