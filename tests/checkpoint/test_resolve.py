"""From a name to a folder, and every way in which that fails."""

from __future__ import annotations

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from tfmagic.engine.checkpoint import resolve
from tfmagic.engine.checkpoint.resolve import EMBEDDED
from tfmagic.errors import Refusal

HUB = "Qwen/Qwen3.5-0.8B"


def test_the_embedded_model_is_the_default():
    assert resolve(None) == resolve("") == resolve("embedded") == EMBEDDED


def test_a_folder_is_itself(folder, monkeypatch):
    assert resolve(str(folder.path)) == folder.path
    monkeypatch.chdir(folder.path.parent)
    assert resolve("tiny") == resolve("./tiny") == folder.path
    monkeypatch.setenv("HOME", str(folder.path.parent))
    assert resolve("~/tiny") == folder.path


def test_a_local_folder_wins_over_an_id(folder, monkeypatch):
    (folder.path / "sub").mkdir()
    monkeypatch.chdir(folder.path.parent)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
    assert resolve("tiny/sub") == folder.path / "sub"


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("./nope", "no model folder"), ("nope", "no model folder"), ("a/b/c", "no model folder"),
        ("a b/c", "no model folder"), ("x" * 5000, "not a usable path"), ("a\0b", "no model folder|usable path"),
        ("~no-such-user-here/x", "not a usable path"),
    ],
)  # fmt: skip
def test_neither_folder_nor_id(model, match):
    with pytest.raises(Refusal, match=match) as refusal:
        resolve(model)
    assert len(refusal.value.problem) < 400


def test_files_are_no_folders(tmp_path):
    for name, match in [("m.gguf", "GGUF is not read yet"), ("model.safetensors", "a model is a folder")]:
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(Refusal, match=match):
            resolve(str(tmp_path / name))


def test_an_id_is_fetched_without_pickles_or_code(monkeypatch, tmp_path):
    asked = {}

    def snapshot(repo, allow_patterns):
        asked.update(repo=repo, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve(HUB) == tmp_path
    assert asked["repo"] == HUB
    from fnmatch import fnmatch

    def fetched(name):
        return any(fnmatch(name, pattern) for pattern in asked["patterns"])

    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json",
                 "model-00001-of-00002.safetensors", "model.safetensors-00001-of-00002.safetensors",
                 "preprocessor_config.json", "generation_config.json", "tokenizer_config.json"):  # fmt: skip
        assert fetched(name), name
    for name in (
        "pytorch_model.bin",
        "modeling_x.py",
        "model.gguf",
        "original/consolidated.safetensors",
        "onnx/m.onnx",
    ):
        assert not fetched(name), name


def response(status):
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))


def hub_error(kind):
    try:
        return kind("no", response=response(404))
    except TypeError:
        return kind("no")


@pytest.mark.parametrize(
    ("kind", "problem", "fix"),
    [
        (errors.GatedRepoError, "accepted its terms", f"huggingface.co/{HUB}"),
        (errors.RepositoryNotFoundError, f"knows no model '{HUB}'", "Check the spelling"),
        (errors.HFValidationError, "not a possible Hugging Face id", "Check the spelling"),
        (errors.LocalEntryNotFoundError, "could not be fetched", "local folder"),
        (errors.OfflineModeIsEnabled, "could not be fetched", "HF_HUB_OFFLINE"),
        (ConnectionError, "could not be fetched", "network"),
        (OSError, "could not be fetched", "disk"),
    ],
)
def test_each_failure_of_the_hub_names_its_fix(monkeypatch, kind, problem, fix):
    def fail(*args, **kwargs):
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(Refusal, match=problem) as refusal:
        resolve(HUB)
    assert fix in refusal.value.fix
    assert "\n" not in refusal.value.problem + refusal.value.fix


def test_offline_with_an_empty_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Refusal, match=f"{HUB} is not in the local Hugging Face cache"):
        resolve(HUB)


def test_a_missing_embedded_model(monkeypatch, tmp_path):
    import importlib

    module = importlib.import_module("tfmagic.engine.checkpoint.resolve")
    monkeypatch.setattr(module, "EMBEDDED", tmp_path)
    with pytest.raises(Refusal, match="embedded model is missing"):
        resolve(None)
