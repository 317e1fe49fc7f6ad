"""Tab, through IPython's own completer."""

from __future__ import annotations

import warnings

import numpy
import pytest

from tfmagic.completion import Known, offers


@pytest.fixture
def tab(shell):
    """`tab("cell|with a cursor")` gives what the text up to the cursor becomes with each completion."""

    def complete(cell: str) -> list[str]:
        offset = cell.index("|")
        cell = cell.replace("|", "")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # IPython's provisional API warns
            found = list(shell.ip.Completer.completions(cell, offset))
        line = cell.rfind("\n", 0, offset) + 1
        return [cell[line : c.start] + c.text for c in found]

    shell.ip.user_ns.update(photo=numpy.zeros((2, 2, 3), numpy.uint8), phrase="x", phi=1.0)
    return complete


def test_flags(tab):
    assert tab("%%tfold --te|") == ["%%tfold --temperature"]
    assert set(tab("%%tfold --s|")) == {f"%%tfold {flag}" for flag in ("--system", "--seed", "--stop", "--sweep")}
    assert "%%tfold -o" in tab("%%tfold -|")
    assert "%%tfold --max-tokens 3 --max-tokens" not in tab("%%tfold --max-tokens 3 --max|")
    assert tab("%%tfold --image a.png --im|") == ["%%tfold --image a.png --image"]


def test_states_on_disk(tab):
    assert tab("%tfold start --spill|") == ["%tfold start --spill-gib"]
    assert "%tfold start --learn-conversations" in tab("%tfold start --l|")
    more = tab("%tfold start --learn-conversations --l|")
    assert more[1] == "%tfold start --learn-conversations --learn-gib"
    assert tab("%tfold cache c|") == ["%tfold cache clear"]


def test_values(tab):
    assert tab("%%tfold --draft o|") == ["%%tfold --draft on", "%%tfold --draft off"]
    assert tab("%%tfold --draft=c|") == ["%%tfold --draft=copy"]
    assert tab("%%tfold --sweep te|") == ["%%tfold --sweep temperature="]
    assert set(tab("%%tfold --view |")) == {f"%%tfold --view {view}" for view in ("auto", "live", "text", "off")}
    assert tab("%tfold start --drafter no|")[:1] == ["%tfold start --drafter none"]
    assert tab("%tfold start --drafter-bits |") == ["%tfold start --drafter-bits 4", "%tfold start --drafter-bits 16"]
    assert tab("%tfold start --device c|") == ["%tfold start --device cpu", "%tfold start --device cuda:0"]


def test_variables_and_files_after_image(tab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phone.jpg").touch()
    (tmp_path / "pharaoh.txt").touch()
    (tmp_path / "phd").mkdir()
    (tmp_path / "phd" / "a-b=c.png").touch()
    assert set(tab("%%tfold --image ph|")) == {f"%%tfold --image {x}" for x in ("photo", "phone.jpg", "phd/")}
    assert tab("%%tfold --image phd/|") == ["%%tfold --image phd/a-b=c.png"]
    assert tab("%%tfold --image phd/a-b=|") == ["%%tfold --image phd/a-b=c.png"]
    assert tab("%%tfold --image=phot|") == ["%%tfold --image=photo"]


def test_variables_after_o(tab):
    assert {"%%tfold -o phrase", "%%tfold -o photo"} <= set(tab("%%tfold -o ph|"))


def test_fields_of_the_body(tab):
    assert {"say {{photo", "say {{phrase", "say {{phi"} == set(tab("%%tfold\nline\nsay {{ph|"))
    assert tab("%%tfold\n{{ photo.sha|") == ["{{ photo.shape"]
    assert offers("%%tfold --raw\n{{ph", 1, "{{ph", Known({"photo": 1})) is None
    assert all("photo.shape" not in text for text in tab("%%tfold\n{{nobody.sha|"))


def test_commands_and_runs(tab, shell):
    assert set(tab("%tfold sta|")) == {"%tfold start", "%tfold status"}
    assert tab("x = 1\n%tfold mo|") == ["%tfold models"]
    assert tab("r = %tfold la|") == ["r = %tfold last"]
    shell.run("%%tfold --chat seaside\nhello")
    asked = len(shell.engine.asked)
    assert tab("%tfold show |") == ["%tfold show run0abc"]
    assert tab("%tfold cancel run|") == ["%tfold cancel run0abc"]
    assert tab("%%tfold --chat |") == ["%%tfold --chat seaside"]
    assert len(shell.engine.asked) == asked and shell.engine.cancelled == []


def test_other_cells_are_left_alone(tab):
    assert "phrase.upper" in tab("phrase.upp|")
    assert any("import" in text for text in tab("impor|"))
    assert not any("--te" in text for text in tab("%time --te|"))
