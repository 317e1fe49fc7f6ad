"""Writers that are killed, and two engines on one directory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import until

from .conftest import digest, find, same, state

ROOT = Path(__file__).parents[2]
WRITER = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.disk.conftest import Shelf, digest, find, same, state
shelf = Shelf(Path(sys.argv[1]))
disk = shelf.disk()
print("ready", flush=True)
for i in range(int(sys.argv[2]), int(sys.argv[3])):
    kept = state(64 * (1 + i % 5), first=10 * i + 1, width=2000)
    disk.offer(digest(kept), kept)
    disk.working(False)
    if len(sys.argv) > 4:
        found = find(disk, kept)
        assert found is None or same(found, kept)
        time.sleep(0.002)
print("offered", flush=True)
disk.close(600)
if len(sys.argv) == 4:
    time.sleep(600)  # to be killed
assert not shelf.lines, shelf.lines
print(disk.counts.failed, disk.counts.damaged, flush=True)
"""


def writer(base: Path, low: int, high: int, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(base), str(low), str(high), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def written(i: int):
    return state(64 * (1 + i % 5), first=10 * i + 1, width=2000)


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_no_wrong_state(shelf):
    chance = random.Random(5)
    for _ in range(3):
        process = writer(shelf.base, 0, 400)
        assert process.stdout.readline() == "ready\n"
        until(lambda: [*shelf.base.glob("*/*.learned")])
        time.sleep(chance.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    left = [path for path in shelf.base.glob("*/.*.part") if path.stat().st_size]  # an empty one may be a newborn
    here = shelf.disk()
    until(lambda: not any(path.exists() for path in left))  # partial files are dropped at the start
    files = shelf.files()
    names = {path.name.split("-")[0]: path for path in files}
    for i in range(400):
        kept = written(i)
        if digest(kept).hex() in names:
            assert same(find(here, kept, above=kept.at - 64), kept)
            names.pop(digest(kept).hex())
    assert files and not names and here.counts.read == len(files) and here.counts.damaged == 0


def test_a_part_cut_anywhere_is_never_found(shelf):
    """What a crash leaves before the rename has another name, however much of it was written."""
    kept = state(64)
    here = shelf.kept(kept)
    path = shelf.files()[0]
    part = path.with_name(f".{path.name}.1-ab.part")
    data = path.read_bytes()
    path.unlink()
    for length in (0, 31, 4096, len(data)):
        part.write_bytes(data[:length])
        assert find(here, kept) is None and find(shelf.disk(), kept) is None
    assert not shelf.lines or "unfinished" in shelf.lines[-1]


@pytest.mark.slow
def test_two_engines_on_one_directory(shelf):
    both = [writer(shelf.base, 0, 60, "look"), writer(shelf.base, 30, 90, "look")]
    for process in both:
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0 and out.split()[-2:] == ["0", "0"]
    here = shelf.disk()
    for i in range(90):
        assert same(find(here, written(i)), written(i))
    assert len(shelf.files()) == 90 and not [*shelf.base.glob("*/.*.part")]


def test_one_engine_removes_what_another_reads(shelf):
    reading, kept = shelf.kept(state(64)), state(64)
    assert same(find(reading, kept), kept)
    shelf.disk().clear()
    assert find(reading, kept) is None and not shelf.lines, "a silent cold pass"


def test_nothing_is_imported_when_it_is_off():
    code = "import sys, tfmagic.engine.open; print([m for m in sys.modules if m.endswith(('.disk', '.directory'))])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=env) == "[]\n"
