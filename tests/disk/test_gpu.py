"""States on disk of an engine on a GPU."""

from __future__ import annotations

import pytest

from tests.engine.conftest import GOLDEN, GREEDY, SEEDED, Bench, text_prompt
from tfmagic.engine import families
from tfmagic.engine.cache import namespace
from tfmagic.engine.checkpoint import Checkpoint, resolve

from .conftest import FREELY

pytestmark = pytest.mark.gpu


class Shelved(Bench):
    """A bench whose engine keeps states on disk; each one is an engine after a restart."""

    def __init__(self, model, shelf):
        super().__init__(model)
        self.disk = self.engine.store.disk = shelf.disk(FREELY)

    def run(self, *args, **kwargs):
        run = super().run(*args, **kwargs)
        assert run.status == "done", run.error
        assert self.disk.flush(10)
        return run


def tokens(run):
    return [stream.token_ids for stream in run.streams]


@pytest.mark.parametrize(("form", "kv"), [("exact", "bf16"), ("bf16", "bf16"), ("bf16", "fp8")])
def test_after_a_restart_resumed_is_cold_on_the_gpu(shelf, form, kv):
    model = families.load(Checkpoint(resolve(None) if form == "bf16" else GOLDEN), "cuda:0", form=form, kv=kv)
    prompt = text_prompt([(7 * i * i + 3 * i) % 240 for i in range(300)])
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
