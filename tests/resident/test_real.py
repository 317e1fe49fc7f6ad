"""The process with the real engine and the model that ships."""

from __future__ import annotations

import pytest
from PIL import Image

from tests.patience import LONG, until
from tfmagic.client import connect
from tfmagic.engine.resident import launch
from tfmagic.errors import TfmagicError

pytestmark = pytest.mark.slow


@pytest.fixture
def real(where, monkeypatch):
    monkeypatch.setattr(launch, "COMMAND", ["-m", "tfmagic.engine.resident"])
    return where


def test_a_run_a_chat_and_an_image_survive_their_client(real):
    told: list[str] = []
    with connect(progress=told.append) as engine:
        assert "importing torch" in told
        run = engine.run("What is 2 + 3?", temperature=0, max_tokens=12)
        assert run.status == "done" and run.text and run.streams[0].seed is None
        assert sum(run.ttft[part] for part in run.ttft if part != "total") == pytest.approx(run.ttft["total"])
        seen = engine.run("What is this?", images=[Image.new("RGB", (64, 64), "red")], max_tokens=4)
        assert (seen.tower_calls, seen.images_encoded) == (1, 1) and seen.pictures[0].tokens > 0
        engine.chat("c").send("Hello.", max_tokens=4)
    with connect(start=False) as engine:
        assert engine.show(run.id) == run
        again = engine.run("What is 2 + 3?", temperature=0, max_tokens=12)
        assert again.streams[0].token_sha == run.streams[0].token_sha
        assert engine.chat("c").send("And now?", max_tokens=4).turn == 2
        with pytest.raises(TfmagicError):
            engine.run("x", temperature=-1)
        with pytest.raises(TfmagicError):
            engine.run("x " * 100_000)
        long = engine.submit("Tell me a long story.", streams=16, max_tokens=2000, temperature=10, top_k=0, top_p=1)
        long.cancel()
        assert long.wait(LONG) and long.record.status == "stopped"


def test_a_model_that_is_not_there_is_refused_with_the_fix(real):
    with pytest.raises(TfmagicError) as caught:
        connect("/nonexistent/model")
    assert "/nonexistent/model" in caught.value.problem and "Traceback" not in str(caught.value)


def test_a_chats_reply_is_settled_before_its_next_turn(real):
    first, second = "Tell me a story about a girl and a cat.", "And what happened then?"
    with connect() as engine:
        chat = engine.chat("kites")
        one = chat.send(first, max_tokens=100, temperature=0)
        assert one.prompt_tokens < 64 < one.prompt_tokens + len(one.streams[0].tokens)
        until(lambda: (status := engine.status()).cache_states and not status.settling)
        two = chat.send(second, max_tokens=12, temperature=0)
        assert two.cached_tokens > one.prompt_tokens and two.settled == two.cached_tokens
        assert f"{two.settled} of them settled while idle" in str(two)
        told = [{"role": "user", "content": first}, {"role": "assistant", "content": one.text}]
        cold = engine.run(second, messages=told, max_tokens=12, temperature=0, cache="off", draft="off")
        assert cold.cached_tokens == 0 and cold.miss == "asked to run cold"
        assert cold.streams[0].token_ids == two.streams[0].token_ids
        edited = engine.run(second, messages=[{"role": "user", "content": "Sing!"}, told[1]], max_tokens=4)
        assert "parts from chat “kites”, turn" in edited.miss and edited.miss in str(edited)
