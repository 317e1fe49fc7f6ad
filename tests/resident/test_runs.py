"""Runs, conversations and images, as clients see them."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections import deque

import pytest
from PIL import Image

from tests.patience import LONG, best, until
from tfmagic.client import connect
from tfmagic.errors import EngineFailed, Refusal, TfmagicError


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), colour).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def sent(engine, monkeypatch):
    """The frames that this client sends from now on."""
    frames = []

    class Outbox(deque):
        def append(self, frame):
            frames.append(frame)
            super().append(frame)

    monkeypatch.setattr(engine._held, "_outbox", Outbox())
    return frames


def test_a_run_and_its_record(engine):
    run = engine.run("hello big world", streams=2, temperature=0.5, seed=7, max_tokens=5)
    assert (run.status, run.text, run.model, run.device) == ("done", "hello big world!", "fake", "cpu")
    assert [s.text for s in run.streams] == ["hello big world!"] * 2 and [s.seed for s in run.streams] == [7, 8]
    assert (run.params["temperature"], run.params["seed"], run.params["max_tokens"]) == (0.5, 7, 5)
    assert run.ttft["total"] > 0 and run.total_ms > 0 and run.prompt_tokens == 10
    assert engine.show(run.id) == run
    [listed] = engine.runs()
    assert listed.id == run.id and not listed.streams[0].tokens and listed.streams[0].rounds == run.streams[0].rounds


def test_greedy_streams_have_no_seed(engine):
    assert engine.run("hello", temperature=0).streams[0].seed is None


def test_streaming_gives_every_piece_once(engine):
    stream = engine.stream("slow 5")
    assert list(stream) == ["w0", " w1", " w2", " w3", " w4!"]
    assert stream.record.status == "done"


def test_leaving_the_loop_stops_the_run(engine):
    stream = engine.stream("forever")
    next(pieces := iter(stream))
    pieces.close()
    assert stream.handle.wait(LONG) and stream.record.status == "stopped"


def test_a_refused_prompt_is_no_run(engine):
    with pytest.raises(Refusal) as caught:
        engine.run("refuse")
    assert (caught.value.problem, caught.value.fix) == ("The script refuses.", "Say something else.")
    with pytest.raises(Refusal, match="temperature"):
        engine.run("hello", temperature=-1)
    assert engine.runs() == []


def test_a_failed_run_says_why(engine):
    with pytest.raises(EngineFailed) as caught:
        engine.run("fail")
    assert (caught.value.problem, caught.value.fix) == ("The script says fail.", "Say something else.")
    assert engine.run("fine").status == "done"


def test_an_event_that_does_not_fit_costs_its_run_alone(engine):
    other = engine.submit("slow 10")
    with pytest.raises(EngineFailed, match="record broke at Committed: IndexError"):
        engine.run("misfit")
    assert other.wait(LONG) and other.record.status == "done"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "x", "streams": 0}, "0 streams"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "not a user's"),
        ({"prompt": "x", "system": "a", "messages": [{"role": "system", "content": "b"}]}, "system message stands"),
    ],
)
def test_a_malformed_submission_is_refused_by_name(engine, arguments, words):
    with pytest.raises(Refusal, match=words):
        engine.run(**arguments)


def test_cancel_one_run_of_another_client_and_all_of_mine(engine):
    mine, other = engine.submit("forever"), None
    with connect() as second:
        other = second.submit("forever")
        engine.cancel()
        assert mine.wait(LONG) and not other.record.finished
        engine.cancel(other.id[:6])
        assert other.wait(LONG)
    assert {mine.record.status, other.record.status} == {"stopped"}
    engine.cancel(mine.id)  # finished: nothing to do
    with pytest.raises(Refusal, match="No run 'zzz'"):
        engine.cancel("zzz")


def test_a_run_can_be_stopped_while_it_is_prepared(gates, engine):
    def stop():
        until(lambda: gates.reached("prepare"))
        engine.cancel()
        gates.open("prepare")

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Refusal, match="stopped before it began"):
        engine.run("gated")
    thread.join(LONG)


def test_an_interrupt_is_prompt_and_stops_the_run(where, client):
    code = """
e = connect(); h = e.submit("forever")
try: print(h.id, flush=True); h.wait()
except KeyboardInterrupt: print(time.monotonic(), flush=True); h.cancel(); h.wait(); print(h.record.status, flush=True)
"""

    def interrupt() -> float:
        c = client(code)
        c.stdout.readline()
        time.sleep(0.1)
        sent = time.monotonic()
        c.send_signal(signal.SIGINT)
        took = float(c.stdout.readline()) - sent
        assert c.stdout.readline() == "stopped\n"
        return took

    best(interrupt, 0.1)


def test_a_foreground_run_dies_with_its_client_and_a_background_run_does_not(where, engine, client):
    code = """
e = connect()
print(e.submit("forever").id, e.submit("forever", background=True).id, flush=True)
input()
"""
    c = client(code)
    foreground, background = map(engine.follow, c.stdout.readline().split())
    os.kill(c.pid, signal.SIGKILL)
    assert foreground.wait(LONG) and foreground.record.status == "stopped"
    assert not background.wait(0.3)
    engine.cancel(background.id)
    assert background.wait(LONG)
    until(lambda: len(list(where.path.glob("client-*"))) == 1)


def test_a_client_that_leaves_in_order_stops_its_foreground_run(engine):
    with connect() as second:
        handle = engine.follow(second.submit("forever").id)
    assert handle.wait(LONG) and handle.record.status == "stopped"


def test_a_client_that_stands_still_keeps_its_run_and_loses_no_token(engine, client):
    code = """
h = connect().submit("fast 20000"); r = h.record; print(h.id, flush=True)
h.wait(); print(r.streams[0].token_sha, r.status, flush=True)
"""
    c = client(code)
    handle = engine.follow(c.stdout.readline().strip())
    os.kill(c.pid, signal.SIGSTOP)
    assert handle.wait(LONG)
    time.sleep(0.5)
    os.kill(c.pid, signal.SIGCONT)
    assert c.stdout.readline().split() == [handle.record.streams[0].token_sha, "done"]
    assert len(handle.record.streams[0].tokens) == 20000


def test_a_second_client_follows_to_the_same_record(where, engine):
    handle = engine.submit("slow 10")
    handle.changed(handle.version, 1)
    with connect() as second:
        followed = second.follow(handle.id)
        assert followed.wait(LONG) and handle.wait(LONG)
        assert followed.record == handle.record and followed.record is not handle.record
        assert second.follow().record == handle.record


def test_finished_runs_and_chats_survive_their_client(where, client):
    c = client("e = connect(); r = e.chat('talk').send('one'); print(r.id, flush=True)")
    run = c.stdout.readline().strip()
    c.wait(LONG)
    with connect(start=False) as engine:
        assert engine.show(run).text == "one!"
        assert engine.chat("talk").send("turns").text == "user: one assistant: one! user: turns!"


def test_a_chats_turns_add_up(engine):
    chat = engine.chat("t", system="be brief")
    assert chat.send("one").turn == 1
    second = chat.send("turns")
    assert second.turn == 2 and second.chat == "t"
    assert second.text == "system: be brief user: one assistant: one! user: turns!"
    with pytest.raises(EngineFailed):
        chat.send("fail")
    with pytest.raises(Refusal):
        chat.send("refuse")
    third = chat.send("turns")
    assert third.turn == 3 and "fail" not in third.text and "refuse" not in third.text
    with pytest.raises(Refusal, match=r"(?s)has begun.*begin another --chat"):
        engine.run("x", chat="t", system="be long")


def test_a_chats_system_text_may_be_said_again(engine):
    for turn in (1, 2):
        run = engine.run("turns", chat="t", system="be brief")
        assert (run.turn, run.system) == (turn, "be brief")
    assert run.text == "system: be brief user: turns assistant: system: be brief user: turns! user: turns!"
    assert engine.run("x", chat="t").system == "be brief"


def test_a_stopped_turn_keeps_what_was_said_unless_nothing_was(engine):
    chat = engine.chat("t")
    handle = chat.submit("forever")
    until(lambda: len(handle.record.streams[0].tokens) >= 3)
    with pytest.raises(Refusal, match=r"(?s)still answering.*%tfold cancel"):
        chat.send("and?")
    handle.cancel()
    handle.wait(LONG)
    assert f"assistant: {handle.record.text} user:" in chat.send("turns").text


def test_an_image_is_sent_once(engine, sent):
    red, blue = png("red"), png("blue")
    first = engine.run("look", images=[red])
    assert [p.name for p in first.pictures] == ["image"] and first.images_encoded == 1
    assert len(sent) == 2 and red in sent[1]
    engine.run("look again", images=[red])
    assert len(sent) == 3 and red not in sent[2]
    engine.run(["look at ", red, " and ", blue])
    assert len(sent) == 5 and red not in sent[4] and blue in sent[4]


def test_an_image_of_an_earlier_turn_need_not_be_sent_again(engine, client):
    engine.chat("t").send("look", images=[("sun", png("red"))])
    c = client("print(connect().chat('t').send('turns').text)")
    assert c.stdout.readline() == "user: <sun> look assistant: look! user: turns!\n"


def test_a_client_that_dies_before_it_sends_its_images_leaves_nothing(where, engine, client):
    c = client("""
from tfmagic import connection, protocol
take = connection.Connection._take
def deaf(self, reply): print("asked", flush=True) if isinstance(reply, protocol.Need) else take(self, reply)
connection.Connection._take = deaf
connect().submit("x", images=[b"x"], chat="t")
""")
    assert c.stdout.readline() == "asked\n"
    with pytest.raises(Refusal, match="still answering"):
        engine.chat("t").send("hello")
    os.kill(c.pid, signal.SIGKILL)
    until(lambda: len(list(where.path.glob("client-*"))) == 1)
    assert engine.chat("t").send("hello").turn == 1


def test_images_and_text_keep_their_order(engine):
    red = png("red")
    assert engine.run(["turns", ("a", red), ("b", red)], images=[("c", red)]).pictures[0].name == "c"
    earlier = [{"role": "user", "content": ["x", ("a", red), "y"]}, {"role": "assistant", "content": "ok"}]
    run = engine.run("turns", messages=earlier)
    assert run.text == "user: x <a> y assistant: ok user: turns!"


def test_a_forked_process_gets_its_own_connection(engine):
    handle = engine.submit("forever")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            text = engine.run("child").text
            try:
                handle.wait(1)
            except TfmagicError as error:
                text += error.problem
            os.write(write, text.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "child!This run belongs to the process that forked this one."
    os.waitpid(child, 0)
    time.sleep(0.7)
    assert not handle.record.finished and engine.run("parent").text == "parent!"


def test_many_threads_share_a_connection(engine):
    texts: list[str] = []
    threads = [threading.Thread(target=lambda i=i: texts.append(engine.run(f"thread {i}").text)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert sorted(texts) == sorted(f"thread {i}!" for i in range(16))


def test_a_handle_alone_keeps_its_connection(where):
    handle = connect().submit("slow 5")
    assert handle.wait(LONG) and handle.record.status == "done"


def test_status_counts(engine):
    engine.run("one")
    state = engine.status()
    assert (state.phase, state.runs, state.cache_states, state.context) == ("ready", 1, 3, 1000)
    assert state.memory > 1 << 20
