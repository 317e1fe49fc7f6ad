"""One fault on the device is one failure: what comes behind it in the same process runs in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from .isolation import ROOT

FAULT = """
import os
from pathlib import Path

from tests.gpu.isolation import Isolation

Isolation.faulted = staticmethod(lambda: True)
with (Path(__file__).parent / "processes").open("a") as file:
    file.write(f"{os.getpid()} ")


def test_that_fails():
    raise RuntimeError("an illegal memory access")


def test_behind_it():
    pass


def test_that_fails_by_itself():
    raise AssertionError("one is not two")
"""


def test_a_fault_is_one_failure(tmp_path):
    (tmp_path / "test_fault.py").write_text(FAULT)
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.isolation", "-p", "no:cacheprovider", "-v", "-m", ""]
    variables = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to import
    command += [str(tmp_path / "test_fault.py")]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    for name, how in (("that_fails", "FAILED"), ("behind_it", "PASSED"), ("that_fails_by_itself", "FAILED")):
        assert f"::test_{name} {how}" in done.stdout, done.stdout
    assert "one is not two" in done.stdout and "illegal memory access" in done.stdout
    assert len((tmp_path / "processes").read_text().split()) == 3
