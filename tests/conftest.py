"""What every test shares: no test reaches the user's own engine."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

# One thread: two pytest runs or an engine beside the tests must not fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_dir():
    """A private, short runtime directory, so that tests neither meet nor stop an engine of the user's."""
    if "TFMAGIC_RUNTIME_DIR" in os.environ:
        yield
        return
    path = tempfile.mkdtemp(prefix="tfm-")
    os.environ["TFMAGIC_RUNTIME_DIR"] = path
    yield
    os.environ.pop("TFMAGIC_RUNTIME_DIR", None)
    shutil.rmtree(path, ignore_errors=True)
