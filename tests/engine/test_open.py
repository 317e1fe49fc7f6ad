from __future__ import annotations

import pytest
import torch

from tfmagic import protocol
from tfmagic.engine.open import Settings, chosen
from tfmagic.engine.open import open as open_model
from tfmagic.errors import Refusal


def said(text):
    return [protocol.Message("user", [protocol.Text(text)])]


def test_the_embedded_model_opens_and_tells_what_it_does():
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
    assert opened.engine.status() == {
        "running": 0,
        "waiting": 0,
        "cache_states": 0,
        "cache_bytes": 0,
        "cache_budget": 1 << 30,
    }


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
