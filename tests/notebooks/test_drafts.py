"""The notebook on drafts, executed: its assertions hold, equal text is shown as equal, and it saves plain results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.patience import patient
from tfmagic import connect
from tfmagic.engine.resident import launch

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
STEADY = Path(__file__).with_name("steady_engine.py")
KEPT = [path for path in sorted(NOTEBOOKS.glob("*_*.ipynb")) if not path.stem.endswith(".executed")]


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """The notebook after every cell has run, and what its cells printed."""
    patient()
    monkeypatch.setenv("TFMAGIC_VIEW", "text")
    monkeypatch.setattr(launch, "COMMAND", [str(STEADY)])
    connect(restart=True).close()  # the notebook takes the engine that runs
    notebook = nbformat.read(NOTEBOOKS / "04_drafts.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    options = {"timeout": 600, "startup_timeout": 300, "store_widget_state": False, "resources": resources}
    client = NotebookClient(notebook, kernel_name="python3", **options)
    try:
        client.execute()
    finally:
        connect(start=False).stop()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return outputs, "".join(output.get("text", "") for output in outputs)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_runs_and_equal_text_is_shown_as_equal(executed):
    outputs, printed = executed
    rows = re.findall(r"^(off|on) +(\d) +\d+ +\d+ +([\d.]+) +[\d.]+   (\w{12})$", printed, re.M)
    shas = {}
    for draft, stream, tokens_a_round, sha in rows:
        shas.setdefault((stream, sha), []).append((draft, float(tokens_a_round)))
    assert len(rows) == 10 and all(len(found) % 2 == 0 for found in shas.values())
    edit = dict(next(iter(shas.values())))
    assert edit["off"] == 1.0 and edit["on"] > 1.5
    assert "copy" in printed and re.search(r"^round +\d+  copy +\d+ drafted +\d+ accepted  \S*", printed, re.M)
    shown = "".join(output.get("data", {}).get("text/plain", "") for output in outputs)
    assert "3 runs, the same tokens." in shown
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert kinds <= {"text/html", "text/plain"}


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_results(path):
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
