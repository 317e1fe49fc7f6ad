"""States on disk of an engine on a GPU."""

from __future__ import annotations

import pytest

from tests.engine.conftest import GOLDEN, GREEDY, SEEDED, Bench, text_prompt
from tfmagic.engine import families
from tfmagic.engine.cache import namespace
from tfmagic.engine.checkpoint import Checkpoint

from .test_engine import Shelved, ids, tokens

pytestmark = pytest.mark.gpu


def test_after_a_restart_resumed_is_cold_on_the_gpu(shelf):
    model = families.load(Checkpoint(GOLDEN), "cuda:0")
    prompt = text_prompt(ids(300))
    for sampling in (GREEDY, SEEDED):
        cold = Bench(model).run(prompt, sampling, streams=2)
        first = Shelved(model, shelf).run(prompt, sampling, streams=2)
        again = Shelved(model, shelf).run(prompt, sampling, streams=2)
        assert (again.cache_source, again.cached_tokens) == ("disk", 256)
        assert tokens(first) == tokens(again) == tokens(cold)


def test_the_gpu_s_facts_are_not_the_processor_s():
    checkpoint = Checkpoint(GOLDEN)
    facts = [namespace.facts(checkpoint, device) for device in ("cuda:0", "cuda:0", "cpu")]
    assert facts[0] == facts[1] and facts[0]["device"] != facts[2]["device"] and "cuda" in facts[0]["device"]
