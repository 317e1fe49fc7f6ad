"""Which numeric form runs where."""

from __future__ import annotations

import pytest
import torch

from tfmagic.engine.families import chosen_form
from tfmagic.errors import Refusal


def test_a_cpu_sums_exactly_unless_asked():
    assert chosen_form(None, "cpu") == "exact" and chosen_form("bf16", "cpu") == "bf16"


@pytest.mark.parametrize(("capability", "form"), [((8, 0), "exact"), ((9, 0), "bf16"), ((10, 0), "bf16")])
def test_a_gpu_runs_what_it_is_made_for(monkeypatch, capability, form):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert chosen_form(None, "cuda:0") == form and chosen_form("exact", "cuda:0") == "exact"


def test_what_cannot_run_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(Refusal, match=r"needs a GPU of compute capability 9\.0 or more; cuda:1 has 8\.6"):
        chosen_form("bf16", "cuda:1")
    with pytest.raises(Refusal, match="no numeric form 'fp4'"):
        chosen_form("fp4", "cpu")
