"""A pytest plugin for tests on a GPU: `-p tests.gpu.isolation`.

A kernel that touches memory it may not leaves its process without a working device. From then on every test of that
process runs in a process of its own, so that one fault is one failure. What fails is told at once: a later test may
hang, and the run be stopped.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 200
"""That a test in a process of its own may take."""


class Isolation:
    broken = False

    def __init__(self, config: pytest.Config):
        self.config = config

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed and not self.broken and self.faulted():
            self.broken = True
            report.sections.append(("the device", "this process lost it: later tests run in processes of their own"))
        return report

    def pytest_runtest_logreport(self, report):
        if report.failed and not hasattr(self.config, "workerinput"):
            print(f"\nat once: {report.nodeid} failed\n{report.longreprtext[-3000:]}", file=sys.stderr, flush=True)

    @staticmethod
    def faulted() -> bool:
        """Whether this process has no working device any more. A failure of another kind leaves it whole."""
        import torch

        if not torch.cuda.is_initialized():
            return False
        try:
            torch.cuda.synchronize()
        except Exception:
            return True
        return False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if not self.broken:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        call = pytest.CallInfo.from_call(lambda: alone(f"{item.path}::{item.nodeid.partition('::')[2]}"), "call")
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def alone(test: str) -> None:
    """Run one test in a fresh process; raises what it failed with, in words."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "", test]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"still running after {error.timeout} s") from None
    if done.returncode:
        raise AssertionError(done.stdout[-6000:] + done.stderr[-2000:])


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Isolation(config), "isolation")
