"""A private runtime directory a test, and a scripted engine in the place of the real one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tfmagic.client
from tests.patience import PATIENT, patient
from tfmagic.engine.resident import launch, place

FAKE = Path(__file__).with_name("fake_engine.py")
ROOT = Path(tfmagic.__file__).parent.parent
PRELUDE = f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.path.insert(0, {str(ROOT)!r})
from tfmagic.engine.resident import launch
launch.COMMAND = [{str(FAKE)!r}]
import tfmagic.client
from tfmagic.client import connect
{PATIENT}"""


class Gates:
    """Where the scripted engine waits until a test lets it on; see `fake_engine.gate`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def reached(self, name: str) -> bool:
        return (self.folder / name).exists()

    def open(self, name: str) -> None:
        (self.folder / f"{name}.open").touch()


@pytest.fixture
def gates(tmp_path, monkeypatch):
    """Those of an engine that is started after this: a model and a prompt named `gated` wait at them."""
    monkeypatch.setenv("FAKE_GATES", str(tmp_path))
    return Gates(tmp_path)


@pytest.fixture
def where(monkeypatch):
    """The place of this test's engine; whatever runs there in the end is ended."""
    patient()
    path = Path(tempfile.mkdtemp(prefix="tfm-", dir="/tmp"))
    monkeypatch.setenv("TFMAGIC_RUNTIME_DIR", str(path))
    monkeypatch.setattr(launch, "COMMAND", [str(FAKE)])
    here = place.Place(path)
    yield here
    place.finish(here)
    shutil.rmtree(path)


@pytest.fixture
def engine(where):
    with tfmagic.client.connect() as engine:
        yield engine


@pytest.fixture
def client(where):
    """`client(code)` runs code as another client process: a Popen with piped output and input."""
    started = []

    def run(code: str, **options) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "TFMAGIC_RUNTIME_DIR": str(where.path)},
            **options,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()
