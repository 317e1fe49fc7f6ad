"""The process's life: it starts once, outlives what it should, and ends when it should."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.patience import LONG, best, until
from tfmagic.client import connect
from tfmagic.engine.resident import place
from tfmagic.errors import EngineDied, EngineFailed, Refusal, TfmagicError

pytestmark = pytest.mark.slow
IDLE = 0.03
"""Minutes."""


def test_six_clients_at_once_start_one_engine(client):
    code = "input(); e = connect(); print(e.status().pid, flush=True); input()"
    clients = [client(code) for _ in range(6)]
    for c in clients:
        c.stdin.write("\n")
        c.stdin.flush()
    assert len({c.stdout.readline() for c in clients}) == 1


def test_it_leaves_session_group_directory_and_environment(where, monkeypatch):
    for name in ("JPY_PARENT_PID", "PYTHONSTARTUP", "IPYTHONDIR", "MPLBACKEND"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with connect() as engine:
        pid = engine.status().pid
    with open(f"/proc/{pid}/stat") as file:
        parent, group, session = file.read().rpartition(")")[2].split()[1:4]
    assert int(group) != os.getpgrp() and int(session) != os.getsid(0) and int(parent) != os.getpid()
    assert int(session) != pid  # not a session's leader: it can never get a terminal
    assert os.readlink(f"/proc/{pid}/cwd") == "/" and os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{pid}/fd/2") == str(where.log)
    with open(f"/proc/{pid}/environ") as file:
        environment = dict(entry.partition("=")[::2] for entry in file.read().split("\0"))
    assert environment["CUDA_VISIBLE_DEVICES"] == "7"
    assert not {"JPY_PARENT_PID", "PYTHONSTARTUP", "IPYTHONDIR", "MPLBACKEND"} & set(environment)


def test_an_interrupt_of_the_clients_group_does_not_reach_it(where, client):
    c = client("e = connect(); print(e.status().pid, flush=True); time.sleep(60)", start_new_session=True)
    pid = int(c.stdout.readline())
    os.killpg(c.pid, signal.SIGINT)
    c.wait(LONG)
    assert where.engine() == pid
    with connect(start=False) as engine:
        assert engine.run("still here").text == "still here!"


def test_a_crash_is_told_within_a_second_and_the_next_connect_starts_afresh(where):
    died = []

    def crash() -> float:
        with connect() as engine:
            handle, pid = engine.submit("forever"), engine.status().pid
            assert pid not in died and engine.run("again").text == "again!"
            died.append(pid)
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(EngineDied, match=f"process {pid}.*died"):
                handle.wait(LONG)
            took = time.monotonic() - began
            assert not engine.alive
            with pytest.raises(EngineDied):
                engine.run("again")
        return took

    best(crash, 1.0)
    with connect() as fresh:
        assert fresh.status().pid not in died and fresh.run("again").text == "again!"


def test_an_engine_that_aborts_leaves_its_last_words(engine):
    with pytest.raises(EngineDied, match=r"(?s)Fatal Python error: Aborted"):
        engine.run("abort")


def test_an_exception_in_the_engine_fails_its_runs_and_ends_it(where, engine):
    other = engine.submit("forever")
    with pytest.raises(EngineFailed, match=r"(?s)RuntimeError: the script says crash"):
        engine.run("crash")
    assert other.record.status == "failed"
    until(lambda: where.engine() is None)
    until(lambda: not engine.alive)
    with pytest.raises(EngineFailed, match=r"(?s)the script says crash.*Traceback"):
        engine.run("again")


def test_a_model_that_cannot_be_loaded_is_told_with_the_logs_end(where):
    with pytest.raises(EngineFailed, match=r"(?s)OSError: no such tensor.*engine.log"):
        connect("broken")
    until(lambda: where.engine() is None)
    with connect() as engine:
        assert engine.status().phase == "ready"


def test_a_model_that_is_refused_is_told_with_the_fix_alone(where):
    with pytest.raises(TfmagicError) as caught:
        connect("missing")
    assert caught.value.problem == "The folder missing does not exist."
    assert caught.value.fix == "Give a folder with config.json."


def test_a_launcher_that_fails_is_told(where, monkeypatch):
    from tfmagic.engine.resident import launch

    monkeypatch.setattr(launch, "COMMAND", ["-c", "raise SystemExit('no such module')"])
    with pytest.raises(EngineFailed, match=r"(?s)could not be started.*no such module"):
        connect()


def test_it_answers_while_it_loads_and_refuses_runs_until_then(where, gates):
    told = []

    def progress(text):
        told.append(text)
        if text == "reading weights 1 of 2":
            gates.open("load")

    with connect("gated", ready=False) as early:
        assert early.status().phase in ("starting", "loading")
        with pytest.raises(Refusal, match="not ready"):
            early.run("too early")
        with connect(progress=progress) as engine:
            assert engine.status().phase == "ready"
    assert "reading weights 1 of 2" in told and "reading weights 2 of 2" in told


def test_one_engine_at_a_time(where, engine):
    pid = engine.status().pid
    for wish in ({"model": "other"}, {"device": "cuda:3"}, {"context": 5}):
        with pytest.raises(TfmagicError, match=r"(?s)running engine has.*restart"):
            connect(**wish)
    for wish in ({}, {"model": "fake"}, {"model": "embedded"}, {"device": "cpu"}, {"idle_minutes": 60}):
        with connect(**wish) as same:
            assert same.status().pid == pid
    with connect("other", restart=True) as fresh:
        assert fresh.status().pid != pid


def test_no_engine_is_started_unasked(where):
    with pytest.raises(TfmagicError, match="No engine is running"):
        connect(start=False)


def test_another_protocol_is_refused_clearly(where, engine):
    info = where.read()
    info.protocol = 99
    where.write(info)
    with pytest.raises(TfmagicError, match=r"(?s)another protocol.*%tfold restart"):
        connect()
    with connect(restart=True) as fresh:
        assert fresh.run("new").text == "new!"


def test_idle_exit_leaves_only_the_log_and_the_lock(where):
    with connect(idle_minutes=IDLE):
        until(lambda: where.engine() is None)
    until(lambda: not list(where.path.glob("client-*")))  # a client's thread removes its own lock
    left = {path.name for path in where.path.iterdir()}
    assert left - {"engine.log.1"} == {"engine.lock", "engine.log"}  # of one that was idle before it was used


def test_it_is_not_idle_while_a_run_goes_on(where):
    with connect(idle_minutes=IDLE) as engine:
        handle = engine.submit("forever")
        time.sleep(2 * 60 * IDLE)
        assert engine.alive and not handle.record.finished
        handle.cancel()
        assert handle.wait(LONG) and handle.record.status == "stopped"
        until(lambda: where.engine() is None)


@pytest.mark.parametrize("busy", [False, True])
def test_a_termination_ends_it_in_order(where, monkeypatch, busy):
    monkeypatch.setenv("FAKE_GRACE", str(LONG))
    with connect() as engine:
        handle = engine.submit("forever" if busy else "hello")
        handle.changed(handle.version, LONG)
        os.kill(engine.status().pid, signal.SIGTERM)
        until(lambda: where.engine() is None)
        if busy:
            assert handle.wait(LONG) and handle.record.status == "stopped"
            assert handle.record.streams[0].finish_reason == "cancelled"
    assert where.tail(1)[0].endswith("ended in order")


def test_stop_waits_until_it_is_gone(where, engine):
    engine.stop()
    assert where.engine() is None
    with pytest.raises(TfmagicError):
        engine.status()


def test_a_stopped_process_is_ended_by_force(where, engine):
    os.kill(engine.status().pid, signal.SIGSTOP)
    assert place.finish(where, grace=0.1)
    assert where.engine() is None


def test_the_log_is_kept_and_rotated(where):
    for _ in range(2):
        with connect() as engine:
            engine.stop()
    assert where.log.stat().st_size and where.log.with_suffix(".log.1").stat().st_size
    assert where.log.stat().st_mode & 0o777 == 0o600


def test_a_client_imports_nothing_heavy():
    heavy = ("torch", "IPython", "PIL", "numpy", "rich", "psutil")
    code = f"import sys, tfmagic.client; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_an_engine_that_nobody_can_find_any_more_ends(where, engine):
    pid = where.engine()
    where.lock.unlink()
    until(lambda: not os.path.exists(f"/proc/{pid}"))
    with connect() as fresh:
        assert fresh.status().pid != pid


def test_a_connect_to_an_engine_that_is_just_leaving_starts_a_fresh_one(where, engine):
    pid = engine.status().pid
    handle = engine.submit("stubborn")
    os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(EngineDied):  # it has left before it could be asked
        until(lambda: engine.status().phase == "stopping")
    with connect() as fresh:
        assert fresh.status().pid != pid
    assert handle.record.status == "stopped"


def test_it_does_not_serve_in_a_directory_that_others_may_use(where):
    where.path.chmod(0o755)
    code = [sys.executable, "-m", "tfmagic.engine.resident", "--runtime-dir", str(where.path)]
    ended = subprocess.run(code, capture_output=True, text=True)
    assert ended.returncode == 1 and "others may use it" in ended.stderr
    assert not list(where.path.iterdir())


def test_a_full_log_is_begun_anew(where):
    code = f"""
import os, sys
from pathlib import Path
from tfmagic.engine.resident import log, place
here = place.Place(Path({str(where.path)!r}))
fd = os.open(here.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.dup2(fd, 2)
log.LIMIT = 100
for i in range(9):
    log.log(f"line {{i}}")
    log.cap(here)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert where.log.stat().st_size < 130 and "line 8" in where.tail(1)[0]
    assert "line 7" in where.log.with_suffix(".log.1").read_text()


def test_it_survives_a_real_kernels_interrupt_and_restart(where):
    from jupyter_client import KernelManager

    from .conftest import PRELUDE

    def execute(code: str) -> str:
        """What the cell prints, or the name of its error."""
        said: list[dict] = []
        kernel.execute_interactive(code, timeout=LONG, output_hook=lambda message: said.append(message["content"]))
        return "".join(content.get("text") or content.get("ename") or "" for content in said)

    def interrupt_the_second_run() -> None:
        with connect(start=False) as watcher:
            until(lambda: len(runs := watcher.runs()) == 2 and runs[0].status == "decoding")
        manager.interrupt_kernel()

    manager = KernelManager()
    manager.start_kernel()
    kernel = manager.client()
    kernel.start_channels()
    try:
        kernel.wait_for_ready(LONG)
        run = execute(PRELUDE + "e = connect(); print(e.submit('forever', background=True).id)").strip()
        pid = where.engine()
        threading.Thread(target=interrupt_the_second_run).start()
        assert execute("e.run('forever')") == "KeyboardInterrupt"
        assert where.engine() == pid
        manager.restart_kernel(now=True)
        kernel.wait_for_ready(LONG)
        show = f"e = connect(start=False); print(e.status().pid, e.show({run!r}).status)"
        assert execute(PRELUDE + show) == f"{pid} decoding\n"
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
