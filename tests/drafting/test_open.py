"""Which drafter is opened, from what was asked for to what the status says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tfmagic import cli, client, protocol
from tfmagic.attach import _check_wish
from tfmagic.engine import open as opening
from tfmagic.engine.open import Settings, read_drafter
from tfmagic.errors import Refusal, TfmagicError
from tfmagic.views import tables

from .conftest import SMALL, Target, changed


def opened(folder, drafter: str | None, size: int = 80, bits: int = 16):
    settings = Settings(drafter=drafter, drafter_bits=bits)
    return read_drafter(SimpleNamespace(path=folder), Target(), size, "cpu", settings, lambda what: None)


def test_the_model_s_own_unless_another_or_none_is_asked_for(write, tmp_path):
    own, other = write(SMALL), write(changed(block_size=4))
    assert opened(tmp_path, None) is None
    own.rename(tmp_path / "drafter")
    assert opened(tmp_path, None).block == 6
    assert opened(tmp_path, "none") is None
    assert opened(tmp_path, str(other)).block == 4
    assert opened(tmp_path, str(other), bits=4).name == "DFlash2 of 2 layers, block 4, 4 bits"


def test_what_no_reply_may_hold_is_not_guessed(write, tmp_path):
    assert opened(tmp_path, str(write(SMALL)), size=50).config.guessed == 50
    with pytest.raises(Refusal, match="16 candidates a place are to be chosen of 9 ids"):
        opened(tmp_path, str(write(SMALL)), size=9)


def test_a_refusal_names_the_folder_and_a_way_out(write, tmp_path):
    broken = write(changed(mask_token_id=99))
    with pytest.raises(Refusal) as caught:
        opened(tmp_path, str(broken))
    assert caught.value.problem.startswith(f"The drafter {broken}: config.json: mask_token_id is 99")
    assert "--drafter none" in caught.value.fix
    (tmp_path / "model").mkdir()
    for what in (tmp_path / "nothing", tmp_path / "model", broken / "config.json"):
        with pytest.raises(Refusal, match="The drafter /"):
            opened(tmp_path, str(what))


@pytest.mark.parametrize("bits", [0, 5, 8, 32])
def test_bits_that_are_not_there(bits):
    with pytest.raises(Refusal, match=f"{bits} bits"):
        opening.check(Settings(drafter_bits=bits))


def test_the_status_tells():
    state = protocol.State(0, 1, "ready", "ready", 1, "tiny", "cpu", 0.0, drafter="DFlash2 of 2 layers, block 8")
    lines = [line.split(None, 1) for line in str(tables.status(state)).splitlines()]
    assert ["drafter", "DFlash2 of 2 layers, block 8"] in lines
    loading = protocol.State(0, 1, "loading", "importing torch", 1, "tiny", "cpu", 0.0)
    assert ["drafter", "–"] in [line.split() for line in str(tables.status(loading)).splitlines()]


@pytest.mark.parametrize(
    ("asked", "started", "runs", "fits"),
    [
        (None, None, "none", True), (None, "/d", "DFlash of 2 layers", True), ("none", None, "none", True),
        ("none", "none", "none", True), ("none", None, "DFlash of 2 layers", False), ("/d", "/d", "DFlash", True),
        ("/d", "/e", "DFlash", False), ("/d", None, "none", False), ("/d", None, "DFlash", False),
    ],
)  # fmt: skip
def test_another_drafter_than_the_one_that_runs_is_an_error(asked, started, runs, fits):
    info = SimpleNamespace(model=None, device="auto", settings={"drafter": started})
    state = protocol.State(0, 1, "ready", "ready", 1, "embedded", "cpu", 0.0, drafter=runs)
    if fits:
        _check_wish({"drafter": asked}, info, state)
    else:
        with pytest.raises(TfmagicError, match="drafter"):
            _check_wish({"drafter": asked}, info, state)


def test_a_folder_is_named_in_full_for_the_engine_lives_elsewhere(monkeypatch, tmp_path):
    wishes = []
    monkeypatch.setattr(client, "attach", lambda where, wish, *rest: wishes.append(wish))
    monkeypatch.setattr(client, "Engine", lambda connection: None)
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "none"):
        (tmp_path / name).mkdir()
    for drafter in ("mine", "none", "z-lab/some-drafter", None):
        client.connect(drafter=drafter, drafter_bits=4)
    assert [wish.get("drafter") for wish in wishes] == [str(tmp_path / "mine"), "none", "z-lab/some-drafter", None]
    assert all(wish["drafter_bits"] == 4 for wish in wishes)


def test_the_terminal_s_flags(monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr(client, "connect", lambda *args, **options: asked.update(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["start", "--drafter", "none", "--drafter-bits", "4"])
    assert (asked["drafter"], asked["drafter_bits"]) == ("none", 4)
    with pytest.raises(SystemExit):
        cli.main(["start", "--drafter-bits", "5"])
    assert "--drafter-bits" in capsys.readouterr().err
