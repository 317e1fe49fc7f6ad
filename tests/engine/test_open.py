from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tfmagic import protocol
from tfmagic.engine.open import Settings, cache_budget, chosen, room_for_runs
from tfmagic.engine.open import open as open_model
from tfmagic.errors import Refusal


def said(text):
    return [protocol.Message("user", [protocol.Text(text)])]


def test_the_embedded_model_opens_and_tells_what_it_does(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 << 30))
    words = []
    opened = open_model(None, "auto", Settings(context=200), lambda event: None, words.append)
    assert opened.name == "embedded" and opened.context == 200 and words[-1] == "ready"
    assert opened.device == ("cuda:0" if torch.cuda.is_available() else "cpu")
    prompt = opened.prepare(said("Hello!"), {})
    sampling = opened.sampling(protocol.Params(), prompt)
    assert sampling.max_tokens == 200 - len(prompt.ids) and sampling.size <= opened.engine.model.vocab
    assert opened.text.encode("<|im_end|>")[0] in sampling.stop_ids
    with pytest.raises(Refusal, match="context of 200"):
        opened.sampling(protocol.Params(), opened.prepare(said("word " * 300), {}))
    status = opened.engine.status()
    assert {"running", "waiting", "cache_states", "cache_bytes", "cache_note", "settling"} <= status.keys()
    assert status["cache_budget"] == 1 << 30 and not any(status["cache_counts"].values()) and not status["cache_note"]


def test_a_context_over_the_checkpoints_own_is_the_checkpoints_own():
    assert open_model(None, "cpu", Settings(context=1 << 20), lambda event: None).context < 1 << 20


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "cuda:x", "CPU", ""])
def test_devices_that_are_not_there_are_refused(device):
    with pytest.raises(Refusal):
        chosen(device)


@pytest.mark.parametrize(
    "settings", [Settings(prompt_cache_gib=-1), Settings(prompt_cache_gib=float("nan")), Settings(context=1)]
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(Refusal):
        open_model(None, "cpu", settings, lambda event: None)


def test_the_cache_gets_at_most_half_of_the_available_memory(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=3 << 30))
    assert cache_budget(1.0) == (1 << 30, "")
    assert cache_budget(2.0) == (3 << 29, "2 GiB were asked for; half of the available memory is 1.5 GiB")
    assert room_for_runs("cpu", 1 << 30) == int(0.9 * (2 << 30))
    opened = open_model(None, "cpu", Settings(prompt_cache_gib=2.0), lambda event: None)
    status = opened.engine.status()
    assert status["cache_budget"] == 3 << 29 and "half of the available memory" in status["cache_note"]
    assert opened.engine.schedule.memory == int(0.9 * (3 << 29))
