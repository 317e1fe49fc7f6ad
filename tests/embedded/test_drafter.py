"""The drafter that ships: its files, that the engine reads it, and that it truly drafts."""

import json
import random

import pytest

from tfmagic.engine.embedded.drafter import DRAFTER

from .test_model import header
from .test_recipe import CORPUS

pytestmark = pytest.mark.skipif(not DRAFTER.is_dir(), reason="no drafter ships")


def test_weights_are_small_bf16_and_of_the_recipe():
    torch = pytest.importorskip("torch")
    from tfmagic.engine.embedded.drafter import net

    assert (DRAFTER / "model.safetensors").stat().st_size < 10e6
    tensors = {name: t for name, t in header(DRAFTER / "model.safetensors").items() if name != "__metadata__"}
    assert {t["dtype"] for t in tensors.values()} == {"BF16"}
    expected = net.initial(torch.ones(net.CONFIG["hidden_size"]))
    assert {name: t["shape"] for name, t in tensors.items()} == {name: list(t.shape) for name, t in expected.items()}
    assert json.loads((DRAFTER / "config.json").read_text()) == net.CONFIG


def test_card_shows_scores():
    card = (DRAFTER / "README.md").read_text()
    assert "Not measured" not in card and "| **all** |" in card


@pytest.fixture(scope="module")
def opened():
    from tfmagic.engine.embedded.drafter import evaluate

    return evaluate.ready(device="cpu")


@pytest.fixture(scope="module")
def questions():
    """(task, messages, encoded images): one of each task."""
    from tfmagic.engine.embedded.conversation import Talker
    from tfmagic.engine.embedded.drafter import evaluate
    from tfmagic.engine.embedded.tokenizer import Encoder
    from tfmagic.engine.embedded.words import Words

    encoder, draw = Encoder(), random.Random(6)
    talker = Talker(encoder, Words(CORPUS, encoder.pieces()))
    return [(task, *evaluate.ask(task, talker, draw)) for task in evaluate.MAKERS]


COPIES = {"edit", "copy", "list"}
"""Tasks that repeat the context: copied continuation has those."""


@pytest.mark.slow
def test_it_drafts_and_changes_no_reply(opened, questions):
    """A reply of each task, serial and drafted: the same tokens, and where nothing is to be copied half the rounds."""
    from tfmagic.engine.embedded.drafter.evaluate import reply

    assert opened.drafter.startswith("DFlash2")
    rounds = accepted = 0
    for task, messages, encoded in questions:
        plain = reply(opened, messages, encoded, temperature=0.0, draft="off")
        for draft in ("block", "tree"):
            drafted = reply(opened, messages, encoded, temperature=0.0, draft=draft)
            assert drafted.streams[0].token_ids == plain.streams[0].token_ids, (task, draft)
            if draft == "block" and task not in COPIES:
                rounds += len(drafted.streams[0].rounds)
                accepted += sum(r.accepted for r in drafted.streams[0].rounds)
    assert 1 + accepted / rounds > 2
