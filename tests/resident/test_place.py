"""The runtime directory is private, and the lock tells the truth."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from tfmagic.client import connect
from tfmagic.engine.resident import place
from tfmagic.errors import TfmagicError


def mode(path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_only_the_user_can_use_what_the_engine_makes(where, engine):
    assert mode(where.path) == 0o700
    files = {path.name: mode(path) for path in where.path.iterdir()}
    assert {"engine.lock", "engine.log", "engine.json", "engine.sock"} <= set(files)
    assert all(bits & 0o077 == 0 for bits in files.values()), files


@pytest.mark.parametrize("bits", [0o755, 0o701, 0o720])
def test_a_directory_that_others_may_use_is_refused(where, bits):
    where.path.chmod(bits)
    with pytest.raises(TfmagicError, match=f"{bits:04o}.*\n.*chmod 700"):
        connect()
    assert not list(where.path.iterdir())


def test_a_link_and_a_file_are_refused(where, monkeypatch):
    link, file = where.path / "link", where.path / "file"
    link.symlink_to(where.path)
    file.touch()
    for path in (link, file):
        monkeypatch.setenv("TFMAGIC_RUNTIME_DIR", str(path))
        with pytest.raises(TfmagicError, match="not a directory"):
            place.find()


def test_a_foreign_directory_is_refused(where, monkeypatch):
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(TfmagicError, match=f"belongs to user id {own}"):
        place.find()


def test_a_path_too_long_for_a_socket_is_refused(monkeypatch):
    monkeypatch.setenv("TFMAGIC_RUNTIME_DIR", "/tmp/" + "x" * 100)
    with pytest.raises(TfmagicError, match="too long for a socket"):
        place.find()


def test_the_users_runtime_directory_is_used_only_when_it_is_private(where, monkeypatch):
    monkeypatch.delenv("TFMAGIC_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(where.path))
    assert place.candidates()[0] == where.path / "tfmagic"
    where.path.chmod(0o755)
    assert [str(path) for path in place.candidates()] == [f"/tmp/tfmagic-{os.getuid()}"]


def test_a_probe_takes_nothing_and_the_lock_ends_with_its_process(tmp_path):
    path = tmp_path / "lock"
    assert place.holder(path) is None
    code = f"""
from pathlib import Path
from tfmagic.engine.resident.place import take
take(Path({str(path)!r}))
print(flush=True)
input()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    assert [place.holder(path) for _ in range(3)] == [process.pid] * 3
    assert place.take(path) is None
    process.kill()
    process.communicate()
    assert place.holder(path) is None


def test_stale_files_are_no_obstacle(where):
    where.socket.write_text("not a socket")
    where.lock.touch()
    stale = place.Info(pid=1, started=0.0, protocol=99, package="9", model=None, device="cpu", settings={})
    where.write(stale)
    with connect() as engine:
        assert engine.status().phase == "ready"


def test_a_garbled_info_is_as_good_as_none(where):
    where.info.write_bytes(b"{]")
    assert where.read() is None
