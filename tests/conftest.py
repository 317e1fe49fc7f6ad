"""What every test shares: no test reaches the user's own engine, and none fails because the machine is busy."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

import pytest

# One thread: two pytest runs or an engine beside the tests must not fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # a machine that runs the GPU's tests alone may be without
    from hypothesis import HealthCheck, settings

    # No example fails for the time it took, and every run tries the same ones.
    settings.register_profile(
        "steady",
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile("steady")


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
