"""The quickstart as `make demo` runs it: every cell passes, its own assertions included, and what it saves is plain."""

from __future__ import annotations

import json
import re

import pytest

from tests.patience import patient
from tfmagic import connect, demo


@pytest.fixture
def executed(tmp_path, monkeypatch, capsys):
    patient()
    monkeypatch.setattr(demo, "_output_folder", lambda: tmp_path)
    try:
        codes = [demo.main() for _ in range(2)]
        shown = capsys.readouterr().out
    finally:
        connect(start=False).stop()
    assert codes == [0, 0], f"run, and run again with the same engine:\n{shown}"
    return tmp_path / "01_quickstart.executed.ipynb", shown


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quickstart_runs_and_saves_plain_results(executed):
    path, shown = executed
    assert "There are 2 red circles." in shown and "The star is green." in shown and "17 + 25 = 42." in shown
    assert "resumed and drafted" in shown and "cached_tokens" in shown
    notebook = json.loads(path.read_text())
    assert "widgets" not in notebook["metadata"]
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert kinds <= {"text/html", "text/plain", "image/png", "image/jpeg"} and "text/html" in kinds
    page = path.with_suffix(".html").read_text()
    assert not re.search(r"""(?:src|href)=["']?https?://|import .*https?://|@import|url\(https?:""", page)
