"""The `tfmagic` command."""

from __future__ import annotations

import pytest

from tfmagic import cli
from tfmagic.client import connect
from tfmagic.engine.resident import place


def said(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    return code, *capsys.readouterr()


def test_start_status_logs_stop(where, capsys):
    assert said(capsys, "status")[:2] == (3, "no engine is running; start one: tfmagic start\n")
    code, out, _ = said(capsys, "start")
    pid = where.engine()
    assert code == 0 and out.startswith(f"fake on cpu, process {pid}, ready in ")
    code, out, _ = said(capsys, "status")
    assert code == 0
    counts = ("1,000 tokens", "0 running, 0 waiting, 0 kept", "3 states")
    for words in ("fake", "ready", str(pid), *counts, str(where.path)):
        assert words in out
    code, out, _ = said(capsys, "logs", "-n", "2")
    assert code == 0 and out.splitlines()[0] == f"# {where.log}" and out.splitlines()[-1].endswith(" ready")
    assert said(capsys, "stop") == (0, f"stopped process {pid} ({where.path})\n", "")
    assert said(capsys, "stop") == (0, "no engine is running\n", "")


def test_start_passes_its_options_and_refuses_another_model(where, capsys):
    assert said(capsys, "start", "--context", "77", "--idle-minutes", "5", "--prompt-cache-gib", "0.5")[0] == 0
    settings = {"context": 77, "idle_minutes": 5.0, "prompt_cache_gib": 0.5}
    assert where.read().settings.items() >= settings.items()
    pid = where.engine()
    code, _, err = said(capsys, "start", "other")
    assert code == 1 and "tfmagic: The running engine has model fake, not other." in err and "Traceback" not in err
    assert said(capsys, "start", "other", "--restart")[0] == 0
    assert where.engine() != pid and where.read().model == "other"


def test_a_model_that_does_not_load_is_told_in_words(where, capsys):
    code, _, err = said(capsys, "start", "missing")
    assert (code, err) == (1, "tfmagic: The folder missing does not exist.\n  Give a folder with config.json.\n")


def test_logs_before_any_start(where, capsys):
    code, _, err = said(capsys, "logs")
    assert code == 1 and "no log yet" in err


def test_stop_all_ends_the_engines_of_every_directory(where, monkeypatch, capsys):
    connect().close()
    first = where.engine()
    (where.path / "other").mkdir(0o700)
    monkeypatch.setenv("TFMAGIC_RUNTIME_DIR", str(where.path / "other"))
    monkeypatch.setattr(place, "candidates", lambda: [where.path / "other", where.path, where.path / "missing"])
    connect().close()
    second = place.Place(where.path / "other").engine()
    code, out, _ = said(capsys, "stop", "--all")
    assert code == 0 and f"stopped process {first} " in out and f"stopped process {second} " in out
    assert where.engine() is None


@pytest.mark.parametrize(
    "argv",
    [[], ["nothing"], ["start", "--idle-minutes", "-1"], ["start", "--context", "x"], ["start", "a", "b"]],
)
def test_misuse_exits_with_2_and_no_traceback(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_unsafe_directory_is_told_in_words(where, capsys):
    where.path.chmod(0o755)
    code, _, err = said(capsys, "status")
    assert code == 1 and "chmod 700" in err
