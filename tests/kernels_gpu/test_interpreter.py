"""Everything here that wants the interpreter, in a process that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_triton_forms_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
