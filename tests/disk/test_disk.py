"""States on disk: what is written comes back bit for bit, or not at all."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from dataclasses import replace

import pytest
import torch

from tests.patience import LONG, until
from tfmagic.engine.cache import directory, disk, segments
from tfmagic.engine.cache.directory import STALE
from tfmagic.engine.cache.disk import Limits
from tfmagic.errors import Refusal

from .conftest import FREELY, MIB, digest, find, same, state


def test_round_trip_after_a_restart(shelf):
    short, long = state(64), state(192)
    shelf.kept(short, long).close(LONG)
    again = shelf.disk()
    assert same(find(again, long), long) and same(find(again, long, more=500), long)
    assert same(find(again, short), short), "a prompt that parts early finds the shorter one"
    assert find(again, state(64, first=2)) is None, "other rows"
    key = list(long.key)
    assert find(again, replace(long, key=long.key[:-1]), more=0).at == 64, "one row is left to compute"
    assert find(again, long, above=192) is None and same(find(again, long, above=128), long)
    assert key == list(long.key) and again.counts.damaged == 0 and not shelf.lines


def test_private_modes(shelf):
    old = os.umask(0)
    try:
        shelf.kept(state(64), limits=replace(FREELY, daily=MIB))
    finally:
        os.umask(old)
    paths = [shelf.base, *shelf.base.rglob("*")]
    assert len(paths) == 5, "base, daily.json, namespace, facts.json, state"
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_state_is_written_once(shelf):
    one = shelf.kept(state(64), state(64))
    other = shelf.kept(state(64))
    assert (one.counts.written, other.counts.written) == (1, 0)


def test_other_facts_never_find_it(shelf):
    kept = state(64)
    shelf.kept(kept)
    for fact in ("model", "device", "code"):
        assert find(shelf.disk(**{fact: "another"}), kept) is None
    assert not shelf.lines, "a stale key is a silent cold pass"


def test_a_file_carried_into_another_namespace_is_refused(shelf):
    kept = state(64)
    shelf.kept(kept)
    other = shelf.disk(code="two")
    other.flush(LONG)
    target = other.directory.path / shelf.files()[0].name
    target.write_bytes(shelf.files()[0].read_bytes())
    assert find(other, kept) is None and "another model or build" in shelf.lines[-1] and not target.exists()


def test_a_file_under_another_name_is_refused(shelf):
    a, b = state(64), state(64, first=7)
    here = shelf.kept(a)
    path = shelf.files()[0]
    path.rename(path.with_name(f"{digest(b).hex()}-64.learned"))
    assert find(here, b) is None and "not those of its name" in shelf.lines[-1]


# Damage ------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_a_cold_pass_and_a_line(shelf):
    kept = state(64)
    here = shelf.kept(kept)
    path = shelf.files()[0]
    data = path.read_bytes()
    front = segments.FRONT.size + 400
    places = [*range(0, 8 * front, 3), *range(8 * front, 8 * len(data), 977), 8 * len(data) - 1]
    for place in places:
        broken = bytearray(data)
        broken[place // 8] ^= 1 << place % 8
        path.write_bytes(broken)
        shelf.lines.clear()
        here._told = ""
        assert find(here, kept) is None, f"bit {place}"
        assert len(shelf.lines) == 1 and path.name in shelf.lines[0] and not path.exists()
    path.write_bytes(data)
    assert same(find(here, kept), kept)


def test_every_truncation_is_a_cold_pass_and_a_line(shelf):
    kept = state(64)
    here = shelf.kept(kept)
    path = shelf.files()[0]
    data = path.read_bytes()
    lengths = {0, 1, 7, 8, 16, 31, 32, 33, 100, len(data) - 1, *range(0, len(data), 512)}
    for length in sorted(lengths):
        for broken in (data[:length], data[:length] + b"x", data + data[: length + 1]):
            path.write_bytes(broken)
            here._told = ""
            shelf.lines.clear()
            assert find(here, kept) is None and len(shelf.lines) == 1 and not path.exists(), length


def header(**changes) -> bytes:
    """The front of a file whose header is well signed and says something strange."""
    import msgspec

    plain = {"namespace": "n", "at": 64, "written": 0.0, "key_crc": 0, "segments": []} | changes
    body = msgspec.json.encode(plain)
    body += b" " * segments.padding(segments.FRONT.size + len(body))
    return segments.FRONT.pack(segments.MAGIC, len(body), segments.digest(body)) + body


@pytest.mark.parametrize(
    "changes",
    [
        {"at": 0},
        {"at": 1 << 60},
        {"at": -64},
        {"segments": [{"name": "x", "dtype": "float32", "shape": [1 << 40, 1 << 40], "crc": 0}]},
        {"segments": [{"name": "x", "dtype": "float32", "shape": [-1, -(1 << 40)], "crc": 0}]},
        {"segments": [{"name": "x", "dtype": "object", "shape": [1], "crc": 0}]},
        {"segments": [{"name": "x", "dtype": "uint8", "shape": [0], "crc": 0}] * 2},
        {"segments": "x"},
        {"namespace": "m"},
    ],
)
def test_a_strange_header_allocates_nothing(tmp_path, changes, monkeypatch):
    monkeypatch.setattr(segments.torch, "empty", lambda *a, **k: pytest.fail("allocated"))
    monkeypatch.setattr(segments.np, "empty", lambda *a, **k: pytest.fail("allocated"))
    path = tmp_path / "x"
    path.write_bytes(header(**changes) + bytes(4096))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(segments.Damaged):
            segments.Reader(fd, "n")
    finally:
        os.close(fd)


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError()])
def test_a_disk_that_does_not_read_is_a_cold_pass_and_the_file_stays(shelf, monkeypatch, error):
    kept = state(64)
    here = shelf.kept(kept)

    def broken(*args):
        raise error

    with monkeypatch.context() as m:
        m.setattr(os, "preadv", broken)
        assert find(here, kept) is None and "could not be read" in shelf.lines[-1]
    assert same(find(here, kept), kept)


def test_a_damaged_state_leaves_the_shorter_one(shelf):
    short, long = state(64), state(128)
    here = shelf.kept(short, long)
    path = next(path for path in shelf.files() if "-128." in path.name)
    path.write_bytes(path.read_bytes()[:-1])
    assert same(find(here, long), short)


def test_links_pipes_and_folders_in_a_state_s_place(shelf, tmp_path):
    kept = state(64)
    here = shelf.kept(kept)
    path = shelf.files()[0]
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    for make in (lambda: path.symlink_to(elsewhere), lambda: os.mkfifo(path), path.mkdir):
        make()
        before = len(shelf.lines)
        assert find(here, kept) is None and len(shelf.lines) > before
        if path.is_dir():
            path.rmdir()
        assert not os.path.lexists(path), "dropped"
    assert elsewhere.exists(), "what a link pointed at is untouched"


def test_foreign_files_are_left_alone(shelf):
    kept = state(64)
    here = shelf.kept(kept)
    names = ["notes.txt", "0" * 32 + "-64.learned.bak", "x-64.learned", ".hidden"]
    for name in names:
        (here.directory.path / name).write_text("mine")
        (shelf.base / name).write_text("mine")
    again = shelf.disk()
    assert again.flush(LONG) and same(find(again, kept), kept) and again.clear() == 1
    for name in names:
        assert (here.directory.path / name).exists() and (shelf.base / name).exists()


# The writer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open"])
def test_a_full_disk_loses_nothing_and_the_next_state_is_written(shelf, monkeypatch, call):
    a, b = state(64), state(64, first=3)
    here = shelf.kept(a)
    real = getattr(os, call)

    def full(*args, **kwargs):
        if threading.current_thread().name == "states":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, full)
    here.offer(digest(b), b)
    assert here.flush(LONG) and here.counts.failed == 1
    assert shelf.lines[-1] == "states on disk could not be written: No space left on device"
    monkeypatch.setattr(os, call, real)
    assert not list(shelf.base.rglob("*.part")) and find(here, b) is None and same(find(here, a), a)
    here.offer(digest(b), b)
    assert here.flush(LONG) and same(find(here, b), b)


def test_a_strange_dtype_is_not_written_and_the_writer_lives(shelf):
    kept, bad = state(64), state(64, first=3)
    bad.tensors["x"] = torch.zeros(2, dtype=torch.complex64)
    here = shelf.kept(bad, kept)
    assert "complex64" in shelf.lines[-1] and same(find(here, kept), kept)


def test_a_vanished_directory_is_a_line_and_not_made_again(shelf, tmp_path):
    a, b = state(64), state(64, first=3)
    here = shelf.kept(a)
    shelf.base.rename(tmp_path / "away")
    assert find(here, a) is None and "is gone" in shelf.lines[-1]
    here.offer(digest(b), b)
    assert here.flush(LONG) and not shelf.base.exists() and here.held() == [] and len(shelf.lines) == 1
    (tmp_path / "away").rename(shelf.base)
    assert same(find(here, a), a), "it has come back"
    here.offer(digest(b), b)
    assert here.flush(LONG) and same(find(here, b), b)


def test_a_directory_that_came_back_as_another_is_taken_up(shelf, tmp_path):
    a = state(64)
    here = shelf.kept(a)
    here.directory.path.rename(tmp_path / "away")
    other = shelf.disk()
    assert other.flush(LONG) and find(here, a) is None
    here.offer(digest(a), a)
    assert here.flush(LONG) and same(find(other, a), a)


def test_a_read_only_directory_still_reads(shelf, monkeypatch):
    a = state(64)
    shelf.kept(a)
    real = os.open

    def locked(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", locked)
    again = shelf.disk()
    b = state(64, first=3)
    again.offer(digest(b), b)
    assert again.flush(LONG) and same(find(again, a), a) and find(again, b) is None
    assert any("Read-only file system" in line for line in shelf.lines)


def test_a_base_that_cannot_be_made_costs_a_line(shelf, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directory.Path, "mkdir", full)
    here = shelf.disk()
    kept = state(64)
    here.offer(digest(kept), kept)
    assert find(here, kept) is None and here.flush(1) and here.held() == [] and here.clear() == 0
    assert len(shelf.lines) == 1 and "No space left" in shelf.lines[0]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_base_that_others_may_use_is_refused(shelf, mode):
    shelf.base.mkdir()
    shelf.base.chmod(mode)
    with pytest.raises(Refusal, match="chmod 700"):
        shelf.disk()


def test_a_base_that_is_a_file_is_refused(shelf):
    shelf.base.write_text("mine")
    with pytest.raises(Refusal, match="no directory"):
        shelf.disk()


def test_a_namespace_that_is_a_link_is_not_followed(shelf, tmp_path):
    here = shelf.disk()
    name = here.namespace
    here.close(LONG)
    shelf.base.joinpath(name, "facts.json").unlink(missing_ok=True)
    shelf.base.joinpath(name).rmdir()
    (tmp_path / "elsewhere").mkdir()
    shelf.base.joinpath(name).symlink_to(tmp_path / "elsewhere")
    again = shelf.disk()
    again.offer(digest(state(64)), state(64))
    assert again.flush(LONG) and not list((tmp_path / "elsewhere").iterdir()) and "cannot be kept" in shelf.lines[-1]


def test_the_writer_waits_for_runs_to_end_but_not_for_long(shelf, monkeypatch):
    monkeypatch.setattr(disk, "PATIENCE", LONG)
    a, b = state(64), state(64, first=3)
    here = shelf.disk()
    assert here.flush(LONG)
    here.offer(digest(a), a)
    time.sleep(0.2)
    assert not shelf.files(), "the run that saves it goes on"
    here.working(False)
    until(lambda: len(shelf.files()) == 1, LONG / 2)
    monkeypatch.setattr(disk, "PATIENCE", 1.0)
    began = time.monotonic()
    here.offer(digest(b), b)
    until(lambda: here.working(True) or len(shelf.files()) == 2)
    assert time.monotonic() - began > 0.9


def test_what_waits_is_bounded_by_bytes(shelf, monkeypatch):
    states = [state(64, first=i) for i in range(5)]
    monkeypatch.setattr(disk, "QUEUE", 2 * states[0].bytes)
    gate, entered = threading.Event(), threading.Event()
    real = os.fsync

    def slow(fd):
        entered.set()
        assert gate.wait(LONG)
        real(fd)

    here = shelf.disk()
    until((here.directory.path / "facts.json").exists)
    monkeypatch.setattr(os, "fsync", slow)
    for kept in states:  # offering never waits for the writer, which stands at the gate
        here.offer(digest(kept), kept)
    here.working(False)
    assert here.counts.skipped == 3 and not here.flush(0.05) and entered.wait(LONG)
    gate.set()
    assert here.flush(LONG) and here.counts.written == 2


def test_what_waits_is_found_and_not_once_it_is_cleared(shelf, monkeypatch):
    kept, gate, entered = state(64), threading.Event(), threading.Event()
    here, real = shelf.kept(state(64, first=9)), os.fsync

    def slow(fd):
        entered.set()
        assert gate.wait(LONG)
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(disk, "LETTING_GO", 0.01)
    here.offer(digest(kept), kept)
    here.working(False)
    assert entered.wait(LONG) and find(here, kept) is kept and kept.source == "ram"
    assert find(here, replace(kept, key=(*kept.key[:-1], 0))) is None
    here.clear()
    assert find(here, kept) is None
    gate.set()
    assert here.flush(LONG) and find(here, kept) is None


def test_the_writer_lets_go_of_what_it_wrote(shelf):
    import gc
    import weakref

    kept = state(64)
    gone = weakref.ref(kept.tensors["0.S"])
    here = shelf.disk()
    here.offer(digest(kept), kept)
    del kept
    assert here.flush(LONG)
    until(lambda: gc.collect() >= 0 and gone() is None)


@pytest.mark.parametrize("large", [0, 1 << 60])
def test_several_threads_read_what_one_reads(shelf, monkeypatch, large):
    monkeypatch.setattr(segments, "LARGE", large)
    kept = state(640, width=500)
    here = shelf.kept(kept)
    assert same(find(here, kept), kept)
    path = shelf.files()[0]
    data = bytearray(path.read_bytes())
    data[-4097] ^= 8
    path.write_bytes(data)
    assert find(here, kept) is None and "the checksum of its" in shelf.lines[-1]


def test_a_state_larger_than_the_queue_is_written_alone(shelf, monkeypatch):
    monkeypatch.setattr(disk, "QUEUE", 1)
    kept = state(64)
    assert same(find(shelf.kept(kept), kept), kept)


def test_close_finishes_what_waits_and_takes_no_more(shelf):
    states = [state(64, first=i) for i in range(4)]
    here = shelf.disk()
    for kept in states[:3]:
        here.offer(digest(kept), kept)
    here.close(LONG)
    here.offer(digest(states[3]), states[3])
    again = shelf.disk()
    assert [find(again, kept) is not None for kept in states] == [True, True, True, False]


# Limits ------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first_over_all_namespaces(shelf):
    a, b, c, d = (state(64, first=i) for i in range(1, 5))
    room = segments.room(a.key, a.tensors)
    shelf.kept(a, code="another")
    here = shelf.kept(b, c)
    assert same(find(here, b), b)
    small = shelf.kept(d, limits=replace(FREELY, learned=2 * room))
    assert small.counts.removed == 2
    assert [find(small, kept) is not None for kept in (b, c, d)] == [True, False, True]
    assert find(shelf.disk(code="another"), a) is None


def test_a_superseded_state_goes_before_an_older_one(shelf):
    other, short, long = state(64, first=9), state(64), state(128)
    here = shelf.kept(other, short)
    assert same(find(here, short), short), "used after the other"
    shelf.kept(long)
    taken = sum(file.stat().st_size for file in shelf.files())
    more = state(64, first=5)
    room = segments.room(more.key, more.tensors)
    small = shelf.kept(more, limits=replace(FREELY, learned=taken + room - 1))
    assert small.counts.removed == 1 and find(small, short) is None
    assert same(find(small, other), other) and same(find(small, long), long)


def test_a_state_over_the_cap_removes_nothing(shelf):
    a, b = state(64), state(640)
    here = shelf.kept(a, b, limits=replace(FREELY, learned=segments.room(a.key, a.tensors)))
    assert same(find(here, a), a) and find(here, b, above=64) is None
    assert here.counts.skipped == 1 and "over the limit" in shelf.lines[-1]


def test_free_space_is_left(shelf, monkeypatch):
    a = state(64)
    room = segments.room(a.key, a.tensors)
    monkeypatch.setattr(directory.Directory, "free", lambda self: room + 99)
    assert shelf.kept(a, limits=replace(FREELY, free=100)).counts.written == 0
    assert "to stay free" in shelf.lines[-1]
    assert shelf.kept(a, limits=replace(FREELY, free=99)).counts.written == 1


def test_the_daily_limit_counts_all_engines_and_ends_with_the_day(shelf, monkeypatch):
    a, b, c = (state(64, first=i) for i in range(3))
    limits = replace(FREELY, daily=segments.room(a.key, a.tensors) * 3 // 2)
    shelf.kept(a, limits=limits)
    second = shelf.kept(b, limits=limits)
    assert find(second, b) is None and "a day is reached" in shelf.lines[-1]
    real = time.strftime
    monkeypatch.setattr(directory.time, "strftime", lambda form, *t: "2999-01-01" if not t else real(form, *t))
    assert same(find(shelf.kept(b, limits=limits), b), b)
    (shelf.base / "daily.json").write_text("{broken")
    assert same(find(shelf.kept(c, limits=limits), c), c)


def test_the_room_that_is_asked_for_is_what_a_file_takes(shelf):
    for rows in (64, 640, 6400):
        kept = state(rows)
        shelf.kept(kept)
        size = next(f for f in shelf.files() if f"-{rows}." in f.name).stat().st_size
        assert size <= segments.room(kept.key, kept.tensors) <= size + segments.ALIGN


def test_a_daily_limit_of_zero_stops_a_save_before_its_work(shelf, monkeypatch):
    monkeypatch.setattr(segments, "pack", lambda *a: pytest.fail("packed"))
    assert shelf.kept(state(64), limits=replace(FREELY, daily=0)).counts.skipped == 1


def test_only_what_is_asked_for_is_written(shelf):
    a, b = state(64), state(64, first=2)
    spilling = shelf.disk(Limits(learned=None, spilled=1 << 30, free=0))
    spilling.offer(digest(a), a)
    spilling.evicted(digest(b), b)
    assert spilling.flush(LONG) and [path.suffix for path in shelf.files()] == [".spilled"]
    assert same(find(spilling, b), b) and find(spilling, a) is None
    learning = shelf.disk()
    learning.evicted(digest(a), a)
    assert learning.flush(LONG) and len(shelf.files()) == 1 and same(find(learning, b), b)


# Cleaning ----------------------------------------------------------------------------------------


def test_old_namespaces_of_this_model_are_removed(shelf):
    kept = state(64)
    for facts in ({"code": "old"}, {"code": "recent"}, {"model": "other"}, {"device": "gpu"}, {"code": "in use"}):
        disk = shelf.kept(kept, **facts)
        if facts != {"code": "recent"}:
            long_ago = time.time() - STALE - 60
            for path in (*disk.directory.path.iterdir(), disk.directory.path):
                os.utime(path, (long_ago, long_ago))
        if facts != {"code": "in use"}:
            disk.close(LONG)
            os.close(disk.directory._held)
            disk.directory._held = os.open(os.devnull, os.O_RDONLY)
    here = shelf.kept(kept)
    assert len(list(shelf.base.iterdir())) == 5 and "1 directories of other builds" in shelf.lines[-1]
    assert here.directory.path.exists()


def test_unfinished_files_are_dropped_at_the_start_but_not_a_living_writer_s(shelf):
    import fcntl

    here = shelf.kept(state(64))
    dead, living = (here.directory.path / f".{name}.learned.1-ab.part" for name in ("dead", "living"))
    newborn = here.directory.path / ".newborn.learned.1-ab.part"
    dead.write_bytes(b"x")
    newborn.touch()
    with open(living, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        shelf.kept(state(64, first=4))
        assert living.exists() and not dead.exists() and "1 unfinished files" in shelf.lines[-1]
        assert newborn.exists(), "its writer may be about to lock it"


def test_held_and_clear(shelf):
    a, b = state(64), state(128, first=5)
    shelf.kept(a, code="another")
    here = shelf.kept(a, b)
    find(here, a)
    assert [(file.kind, file.rows) for file in here.held()] == [("learned", 64), ("learned", 128)]
    assert all(file.bytes == file.path.stat().st_size for file in here.held())
    assert here.clear() == 3 and here.held() == [] and find(here, a) is None
    here.offer(digest(a), a)
    assert here.flush(LONG) and same(find(here, a), a)


def test_looking_is_no_use(shelf):
    """The list of states reads every label, and leaves the order in which they are to go."""
    here = shelf.kept(state(64), state(128))
    demoted = next(file for file in here.held() if file.rows == 64)
    assert demoted.used < demoted.written
    assert [here.label(file) for file in here.held()] == ["", ""]
    assert next(file for file in here.held() if file.rows == 64).used == demoted.used
    assert find(here, state(64)) is not None
    assert next(file for file in here.held() if file.rows == 64).used > demoted.written


@pytest.mark.parametrize("patience", [0.01, LONG])
def test_clear_while_a_state_is_written_leaves_nothing(shelf, monkeypatch, patience):
    """Whether it waits for the writer to let go, or the writer sees afterwards that it is void."""
    kept, waiting = state(64), state(64, first=3)
    here = shelf.kept(state(64, first=9))
    real, entered, gate = os.fsync, threading.Event(), threading.Event()

    def slow(fd):
        entered.set()
        assert gate.wait(LONG)
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(disk, "LETTING_GO", patience)
    here.offer(digest(kept), kept)
    here.offer(digest(waiting), waiting)
    here.working(False)
    assert entered.wait(LONG)
    if patience == LONG:
        threading.Timer(0.2, gate.set).start()
    assert here.clear() == 1 and gate.is_set() == (patience == LONG)
    assert not gate.is_set() or len(shelf.files()) == 0
    gate.set()
    assert here.flush(LONG) and shelf.files() == []
