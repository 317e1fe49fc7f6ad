"""The namespace holds everything that could change a bit, and nothing that cannot."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from tfmagic.engine.cache import namespace
from tfmagic.engine.checkpoint import Checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_5_tiny"


code = namespace.code


@pytest.fixture(autouse=True)
def _the_sources_stay(monkeypatch):
    """Also while somebody edits them."""
    monkeypatch.setattr(namespace, "code", lambda: "sources")


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(GOLDEN, copy)
    (copy / "tokenizer.json").write_text("{}")
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    (copy / "preprocessor_config.json").write_text("{}")
    return copy


def name(folder: Path, device: str = "cpu", **more) -> str:
    return namespace.name(namespace.facts(Checkpoint(folder), device, **more))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "config.json"])
def test_a_changed_file_is_another_namespace(folder, file):
    before = name(folder)
    (folder / file).write_bytes((folder / file).read_bytes() + b" ")
    assert name(folder) != before


def test_one_bit_of_the_weights_is_another_namespace(folder):
    path = next(folder.glob("*.safetensors"))
    before, size = name(folder), path.stat().st_size
    for place in (size // 2, size - 1):
        flip(path, place)
        assert name(folder) != before
        flip(path, place)
        assert name(folder) == before


def test_weights_too_large_to_read_are_known_by_header_time_and_samples(folder, monkeypatch):
    monkeypatch.setattr(namespace, "WHOLE", 0)
    path = next(folder.glob("*.safetensors"))
    before, status = name(folder), path.stat()
    assert name(folder) == before
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert name(folder) != before
    flip(path, status.st_size - 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert name(folder) != before


def test_threads_and_place_do_not_matter(folder, tmp_path):
    before, threads = name(folder), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert name(folder) == before
    finally:
        torch.set_num_threads(threads)
    (tmp_path / "there").mkdir()
    moved = folder.rename(tmp_path / "there" / "model")
    assert name(moved) == before


def test_kv_form_code_packages_device_and_environment(folder, monkeypatch):
    names = [name(folder), name(folder, kv="fp8")]
    real = namespace.version
    with monkeypatch.context() as m:
        m.setattr(namespace, "version", lambda p: "9" if p == "torch" else real(p))
        names.append(name(folder))
    for change in ("code", "cpu"):
        with monkeypatch.context() as m:
            m.setattr(namespace, change, lambda: "another")
            names.append(name(folder))
    with monkeypatch.context() as m:
        m.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        names.append(name(folder))
    with monkeypatch.context() as m:
        m.setenv("MKL_CBWR", "COMPATIBLE")
        names.append(name(folder))
    assert len(set(names)) == len(names) == 7


def test_the_code_s_digest_follows_kernels_and_engine(tmp_path, monkeypatch):
    for file in ("engine/loop.py", "engine/families/x/forward.py", "kernels/delta.py", "engine/resident/log.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1")
    monkeypatch.setattr(namespace, "CODE", tmp_path / "engine")
    before = code()
    (tmp_path / "engine/resident/log.py").write_text("2")
    assert code() == before, "nothing there computes a state"
    for file in ("kernels/delta.py", "engine/families/x/forward.py", "engine/loop.py"):
        (tmp_path / file).write_text("2")
        assert code() != before
        before = code()


def test_this_code_is_found():
    assert (namespace.CODE / "loop.py").is_file() and list((namespace.CODE.parent / "kernels").glob("*.py"))


def test_the_name_is_one_path_component(folder):
    made = namespace.name({"model": "../../etc/Qwen 3.5\n", "device": "cpu"})
    assert "/" not in made and not made.startswith(".") and "\n" not in made and len(made) < 80
