"""The magics in real kernels, on a real engine process: first a scripted engine, then the embedded model."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import tfmagic.magics
from kernels import Cell, Kernel
from tests.patience import best, patient
from tfmagic.client import connect
from tfmagic.engine.resident import place

pytestmark = pytest.mark.slow
ROOT = Path(tfmagic.magics.__file__).parent.parent
SCRIPTED = ROOT / "tests" / "resident" / "fake_engine.py"
PRELUDE = f"from tfmagic.engine.resident import launch; launch.COMMAND = [{str(SCRIPTED)!r}]"
RESULT = {"text/html", "text/plain"}
"""What a saved notebook holds of a run."""
SOON = 2.0
"""Seconds: a second, and another for machines with few cores; once in a few times, on a machine that is busy."""
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def where(monkeypatch):
    """A place of its own for this test's engine, which is ended afterwards."""
    patient()
    path = Path(tempfile.mkdtemp(prefix="tfm-", dir="/tmp"))
    monkeypatch.setenv("TFMAGIC_RUNTIME_DIR", str(path))
    yield place.Place(path)
    place.finish(place.Place(path))
    shutil.rmtree(path)


@pytest.fixture
def kernel(where):
    """`kernel()` starts a kernel on this test's engine, `kernel(real=True)` one whose engine is not scripted."""
    started = []

    def start(real: bool = False) -> Kernel:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        started.append(Kernel("" if real else PRELUDE, **environment))
        return started[-1]

    yield start
    for each in started:
        each.close()


def ended(cell: Cell) -> float:
    """Seconds until the cell has ended."""
    began = time.monotonic()
    cell.done()
    return time.monotonic() - began


def tokens(cell: Cell) -> int:
    """What a run that goes on has said, as its display tells it."""
    told = re.search(r"decoding, ([\d,]+) token", cell.text)
    return int(told[1].replace(",", "")) if told else 0


def test_a_run_grows_and_becomes_its_card(kernel):
    cell = kernel().run("%%tfold\nslow 12")
    assert cell.error is None
    updates = [m["content"]["data"] for m in cell.messages if m["msg_type"] == "display_data"]
    assert {"text/plain": "starting the engine"} in updates
    [card] = cell.data  # the progress line is gone, and there is one output
    assert set(card) == RESULT and "w0 w1 w2" in card["text/plain"] and "<pre" in card["text/html"]


def test_an_interrupt_shows_the_card_as_stopped_and_the_kernel_is_ready(kernel):
    notebook = kernel()

    def interrupted() -> float:
        cell = notebook.start("%%tfold -o partial\nforever").until(lambda cell: "on on on" in cell.text)
        notebook.interrupt()
        took = ended(cell)
        assert cell.error["name"] == "Interrupted" and len(cell.error["lines"]) == 2
        [card] = cell.data
        assert set(card) == RESULT and "stopped · fake · cpu" in card["text/plain"]
        return took

    def again() -> float:
        cell = notebook.run("%%tfold\nand now")
        assert cell.error is None and "and now!" in cell.text
        return cell.took

    best(interrupted, SOON)
    best(again, SOON)
    assert notebook.value("partial.status, partial.streams[0].finish_reason") == ("stopped", "cancelled")


def test_the_engine_and_its_runs_survive_a_kernel_restart(kernel, where):
    notebook = kernel()
    first = notebook.run("%%tfold\nhello there")
    pid = where.engine()
    notebook.restart()
    status = notebook.run("%tfold status")
    assert f"process       {pid}" in status.text
    last = notebook.run("%tfold last")
    assert last.data[0]["text/plain"] == first.data[0]["text/plain"]
    assert last.data[0]["text/html"] == first.data[0]["text/html"]
    assert notebook.value("_tfold.text") == "hello there!"


def test_two_kernels_share_one_engine(kernel):
    one, two = kernel(), kernel()
    cell = one.start("%%tfold\nforever").until(lambda cell: "on on" in cell.text)
    other = two.run("%%tfold\nfrom the other")
    assert other.error is None and "from the other!" in other.text
    listed = two.run("%tfold runs").text
    assert "forever" in listed and "decoding" in listed and "from the other" in listed
    two.run("%tfold cancel")  # only what this notebook runs
    time.sleep(0.3)
    assert not cell.until(lambda cell: True).idle
    run = two.value("[r.id for r in get_ipython().run_line_magic('tfold', 'runs') if r.prompt == 'forever'][0]")
    two.run(f"%tfold cancel {run}")
    cell.done()
    assert cell.error is None and "stopped · fake" in cell.text


def test_a_killed_engine_is_a_clear_error_and_the_next_cell_gets_a_fresh_one(kernel, where):
    notebook = kernel()

    def killed() -> float:
        cell = notebook.start("%%tfold -o partial\nforever").until(lambda cell: "on on" in cell.text)
        pid = where.engine()
        os.kill(pid, signal.SIGKILL)
        took = ended(cell)
        assert cell.error["name"] == "EngineDied" and not any("Traceback" in line for line in cell.error["lines"])
        assert "failed · fake" in cell.text and set(cell.data[0]) == RESULT
        again = notebook.run("%%tfold\nfresh")
        assert again.error is None and "fresh!" in again.text and where.engine() not in (None, pid)
        return took

    best(killed, SOON)
    assert notebook.value("partial.status") == "failed"


def test_a_background_run_returns_at_once_and_its_display_becomes_the_card(kernel):
    notebook = kernel()
    notebook.run("%tfold start")
    cell = notebook.run("%%tfold --bg -o later\nslow 10")
    assert cell.error is None
    cell.until(lambda cell: "done · fake" in cell.data[0]["text/plain"])
    assert set(cell.data[0]) == RESULT and "<Handle of" in cell.data[1]["text/plain"]
    assert notebook.value("later.status") == "done"
    cell = notebook.run("%%tfold --bg -o later\nforever")  # it has no end to wait for
    notebook.run("%tfold start")  # leaves what goes on alone
    said = tokens(cell)
    cell.until(lambda cell: tokens(cell) > said + 9)
    notebook.run(f"%tfold cancel {notebook.value('later.id')}")
    cell.until(lambda cell: "stopped · fake" in cell.data[0]["text/plain"])


def test_a_terminal_of_several_streams_and_a_silent_view(kernel):
    notebook = kernel()
    cell = notebook.run("%%tfold -n 3\nalpha beta")
    assert cell.text.count("alpha beta!") == 3 and "── stream 3" in cell.text
    assert notebook.run("%%tfold --view off\nquiet").outputs == []
    assert notebook.value("_tfold.text") == "quiet!"


def test_a_page_gets_the_live_panel_then_the_card_and_unloading_leaves_nothing(kernel):
    notebook = kernel()
    targets = "sorted(get_ipython().kernel.comm_manager.targets)"
    notebook.run("import ipywidgets; b = ipywidgets.IntProgress()")  # registers its own targets
    before = notebook.value(targets)
    cell = notebook.start("%%tfold\nforever", page=True).until(lambda cell: any(WIDGET in d for d in cell.data))
    with connect(start=False) as other:
        other.cancel(other.runs()[0].id)
    assert cell.done().error is None and set(cell.data[-1]) == RESULT
    interrupted = notebook.start("%%tfold\nforever", page=True).until(lambda cell: any(WIDGET in d for d in cell.data))
    time.sleep(0.3)
    notebook.interrupt()
    interrupted.done()
    assert interrupted.error["name"] == "Interrupted" and "stopped · fake" in interrupted.data[-1]["text/plain"]
    assert notebook.run("%%tfold --view text\nplain", page=True).data[0].keys() == RESULT
    notebook.run("%unload_ext tfmagic")
    assert notebook.value(targets) == before


def test_start_tells_how_far_it_is_and_stop_ends_the_engine(kernel, where, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_GATES", str(tmp_path))  # where the model named `gated` waits while it is loaded
    notebook, other = kernel(), kernel()
    started = notebook.run("%tfold start")
    assert started.text == f"The engine is ready: fake on cpu, process {where.engine()}."
    restarted = notebook.run("%tfold restart --context 512")
    assert restarted.error is None and where.read().settings["context"] == 512
    assert "another" not in restarted.text
    stopped = notebook.run("%tfold stop")
    assert stopped.text == "The engine was stopped.\n" and where.engine() is None
    slow = notebook.start("%tfold start gated").until(lambda cell: "reading weights" in cell.text)
    assert "loading: reading weights 1 of 2" in other.run("%tfold status").text
    (tmp_path / "load.open").touch()
    assert slow.done().text.startswith("The engine is ready") and other.run("%tfold stop").error is None
    failed = notebook.run("%tfold start broken")
    assert failed.error["name"] == "EngineFailed" and "no such tensor" in "".join(failed.error["lines"])
    assert notebook.run("%tfold status").text.startswith("No engine is running.")


def executed(cells: list[str]) -> nbformat.NotebookNode:
    """The notebook of these cells, as `jupyter nbconvert --execute` leaves it."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    nbformat.validate(notebook)
    return notebook


def test_a_sweep_grows_in_one_display(kernel):
    cell = kernel().run("%%tfold --sweep draft=on,off --sweep seed=1,2 -o table\nslow 4")
    assert cell.error is None
    [table] = cell.data
    assert set(table) == RESULT and "4 runs, the same tokens." in table["text/plain"]
    assert table["text/html"].count("<tr>") == 5


@pytest.mark.parametrize("view", [None, "text"])
def test_an_executed_notebook_holds_html_and_text_only(where, monkeypatch, view):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if view:
        monkeypatch.setenv("TFMAGIC_VIEW", view)
    notebook = executed([PRELUDE + "\n%load_ext tfmagic", "%%tfold -n 2\nslow 5", "%tfold last", "%tfold runs"])
    assert "widgets" not in notebook.metadata
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    assert len(outputs) == 3 and all(set(output.data) == RESULT for output in outputs)
    assert len(nbformat.writes(notebook)) < 60_000


SCENE = """\
from PIL import Image, ImageDraw
picture = Image.new("RGB", (64, 64), "white")
ImageDraw.Draw(picture).ellipse((16, 16, 48, 48), fill="red")
"""


def test_the_embedded_model_sees_a_picture_and_remembers_it(kernel):
    notebook = kernel(real=True)
    notebook.run(SCENE)
    first = notebook.run("%%tfold --image picture --chat scene --max-tokens 12 -o first\nWhat is it?")
    assert first.error is None, first.error
    second = notebook.run("%%tfold --chat scene --max-tokens 12 -o second\nWhat colour is it?")
    assert second.error is None, second.error
    assert notebook.value("first.tower_calls, first.images_encoded, first.images_kept") == (1, 1, 0)
    assert notebook.value("second.turn, len(second.pictures)") == (2, 1)
    total, parts = notebook.value("(first.ttft['total'], [v for k, v in first.ttft.items() if k != 'total'])")
    assert abs(total - sum(parts)) < 0.5
    alone = notebook.run("%%tfold --max-tokens 12 --view off\nSay {{picture}} once")
    assert alone.error is None, alone.error
    assert notebook.value("[p.name for p in _tfold.pictures], 4 < _tfold.pictures[0].start") == (["picture"], True)


BABBLE = "%%tfold -n 4 --temperature 10 --top-k 0 --top-p 1 --max-tokens 4000 -o partial\nSay something long."
"""Draws almost evenly from the whole vocabulary, so that it seldom meets an end."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_embedded_engine_through_an_interrupt_a_restart_and_its_death(kernel, where):
    notebook = kernel(real=True)
    notebook.run("%tfold start")
    pid = where.engine()
    texts = []

    def interrupted() -> float:
        cell = notebook.start(BABBLE).until(lambda cell: "decoding, " in cell.text)
        notebook.interrupt()
        took = ended(cell)
        assert cell.error["name"] == "Interrupted"
        texts.append(cell.data[0]["text/plain"])
        assert "stopped · embedded · cpu · 4 streams" in texts[-1] and "cancelled" in texts[-1]
        return took

    best(interrupted, SOON)
    notebook.restart()
    assert f"process       {pid}" in notebook.run("%tfold status").text
    assert notebook.run("%tfold last").data[0]["text/plain"] == texts[-1]

    def killed() -> float:
        cell = notebook.start(BABBLE).until(lambda cell: "decoding, " in cell.text)
        os.kill(where.engine(), signal.SIGKILL)
        took = ended(cell)
        assert cell.error["name"] == "EngineDied"
        return took

    best(killed, SOON)
    again = notebook.run("%%tfold --max-tokens 8\nTell me about the sea.")
    assert again.error is None and "done · embedded" in again.text and where.engine() not in (None, pid)
