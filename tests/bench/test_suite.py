"""The tool that runs everything on a GPU: order, limits, and going on behind whatever fails."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser
from importlib import import_module

import pytest

from tests.bench import suite
from tests.bench.suite import Command, run, summary


def python(text: str, limit: float = 120.0) -> Command:
    return Command([sys.executable, "-c", text], limit)


@pytest.mark.slow
def test_stages_run_in_order_and_whatever_fails_costs_its_own_time(tmp_path):
    hang = "import subprocess, time\nsubprocess.Popen(['sleep', '77.25'])\nprint('| a | row | 7 | |', flush=True)\n"
    hang += "time.sleep(60)"
    plan = {
        "good": [python("print('| 9b | decode | 200 tok/s | x |')"), python("print('second')")],
        "crash": [python("import os; print('E   why it fell', flush=True); os.abort()"), python("print('goes on')")],
        "hang": [python(hang, 10.0)],
        "none": [Command(["/no/such/program"], 1.0)],
        "last": [
            python("print('FAILED tests/a.py::b - bits'); print('1 failed, 2 passed in 3s'); raise SystemExit(1)")
        ],
    }
    ended = run(plan, 300.0, tmp_path)
    assert [one.stage for one in ended] == ["good", "good", "crash", "crash", "hang", "none", "last"]
    how = [one.how for one in ended]
    assert how[:2] == ["well", "well"] and how[2].startswith("with exit code -") and how[3] == "well"
    assert "limit" in how[4] and "not begun" in how[5] and how[6] == "with exit code 1"
    assert ended[1].lines == ["second"] and "goes on" in ended[3].lines
    assert "sleep 77.25" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    said = summary(ended)
    for part in ("| 9b | decode | 200 tok/s | x |", "| a | row | 7 | |", "E   why it fell", "FAILED tests/a.py::b"):
        assert part in said
    assert "1 failed, 2 passed in 3s" in said.split("----- in all")[1]
    log = (tmp_path / "suite.log").read_text()
    assert log.index("second") < log.index("why it fell") < log.index("goes on") < log.index("1 failed")


def test_nothing_is_begun_without_time(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "LEAST", 0.5)
    long = python("import time; time.sleep(60)", 60.0)
    ended = run({"long": [long], "later": [python("print(1)")]}, 3.0, tmp_path)
    assert "its limit of 3 s" in ended[0].how and "no time" in ended[1].how


def test_the_summary_is_short(tmp_path):
    text = "print('| r | ' + 'x' * 40 + ' |')\nprint('E   ' + 'y' * 3000)\nprint('z\\n' * 900)\nraise SystemExit(1)"
    said = summary(run({name: [python(text)] for name in "abcd"}, 300.0, tmp_path))
    assert len(said) < 12_000 and said.count("| r | xxx") == 4 and said.count("E   yyy") == 4


def test_every_stage_is_a_command_that_there_is():
    for commands in suite.stages().values():
        for command in commands:
            paths = [part for part in command.argv if part.startswith("tests/")]
            assert all((suite.ROOT / path).is_file() for path in paths), paths


@pytest.mark.parametrize("name", ["tiles", "gpu", "drafter", "start", "mixers"])
def test_the_options_of_every_stage_are_known(name, monkeypatch):
    """Each command of a stage, as its own parser reads it."""
    read, parse = [], ArgumentParser.parse_args

    def stop(parser):
        read.append(parse(parser))
        raise StopIteration

    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    own = [sys.executable, "-m", f"tests.bench.{name}"]
    asked = [c.argv for commands in suite.stages().values() for c in commands if c.argv[:3] == own]
    for argv in asked:
        monkeypatch.setattr(sys, "argv", argv[2:])
        with pytest.raises(StopIteration):
            import_module(own[2]).main()
    assert len(read) == len(asked) > 0


def test_an_unknown_stage_is_named():
    command = [sys.executable, "-m", "tests.bench.suite", "nonsense"]
    done = subprocess.run(command, cwd=suite.ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2 and "no stage nonsense" in done.stderr
