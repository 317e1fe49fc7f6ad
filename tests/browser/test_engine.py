"""`%%tfold` on the real engine in JupyterLab: what the panel shows is what the engine did."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest
from lab import ARTIFACTS
from playwright.sync_api import expect

from tests.patience import best

PICTURE = """%load_ext tfmagic
from PIL import Image, ImageDraw
picture = Image.new("RGB", (128, 128), "white")
ImageDraw.Draw(picture).ellipse((30, 30, 95, 95), fill="red")"""
QUESTION = "Look at the picture. " * 12 + "What is in this picture?"
"""Long enough for a mark (every 64 rows) behind the picture."""
LONG = "The red circle stands beside the blue square. " * 280
BABBLE = "--temperature 10 --top-k 0 --top-p 1 --max-tokens 1000"
"""Draws almost evenly from the whole vocabulary, so that a reply goes on until it is stopped."""
CELLS = [
    PICTURE + "\nn = 0",
    f"%%tfold --image picture --chat shapes\n{QUESTION}",
    "%%tfold --chat shapes\nWhat colour is it?",
    f"%%tfold -n 4 {BABBLE}\nTell me a short story about a triangle and a star.",
    f"%%tfold {BABBLE}\n{{{{n}}}}: How often is the square named? {LONG}",  # no two of them begin with the same rows
    "import json, scripted; n += 1; scripted.tell_when_heard()\n"
    "ended = _tfold.total_ms and _tfold.created + _tfold.total_ms / 1e3\n"
    "print(json.dumps({'status': _tfold.status, 'ended': ended, 'stats': _tfold.stats}))",
    "%load_ext tfmagic\n%tfold last",
    "%unload_ext tfmagic\nfrom tfmagic.views.live import CONTROL\n"
    "print(CONTROL in get_ipython().kernel.comm_manager.targets)",
    f"%%tfold --bg {BABBLE} -o later\nWhat is {LONG[: len(LONG) // 2]}",
    "%tfold last --live",
    "get_ipython().run_line_magic('tfold', f'cancel {later.id}')",
]
TOLD, CANCEL = 5, 10
CHUNK = 2.0
"""Seconds. The prompt pass ends the chunk that it has begun (0.4 s here); then it stops."""


@pytest.fixture
def engine():
    """Nothing running before, and nothing left running."""
    stop = [sys.executable, "-m", "tfmagic.cli", "stop"]
    subprocess.run(stop, capture_output=True)
    yield
    subprocess.run(stop, capture_output=True)


def told(book) -> dict:
    book.run(TOLD)
    return json.loads(book.text(TOLD).splitlines()[-1])


def mimes(book, i: int) -> list[list[str]]:
    return [sorted(output["data"]) for output in book.outputs(i) if "data" in output]


@pytest.mark.timeout(1200)
def test_a_notebook_on_the_real_engine(notebook, page, engine):
    book = notebook(*CELLS)
    book.run(0)
    assert book.outputs(0) == []

    # A picture: the tower is called, the panel is seen, the card stays.
    book.run(1, wait=False)
    book.idle(1)
    first = told(book)
    assert first["status"] == "done" and first["stats"]["tower_calls"] == 1 and first["stats"]["images_encoded"] == 1
    assert mimes(book, 1)[-1] == ["text/html", "text/plain"]
    expect(book.cell(1)).to_contain_text("0 kept, 1 encoded")

    # The chat goes on: its picture is kept.
    book.run(2)
    second = told(book)
    assert second["stats"]["tower_calls"] == 0 and second["stats"]["images_kept"] == 1
    assert second["stats"]["cached_tokens"] >= 64
    assert mimes(book, 2) == [["text/html", "text/plain"]]

    # Four streams.
    book.unheard()
    book.run(3, wait=False)
    panel = book.panel(3)
    expect(panel).to_have_attribute("data-status", "decoding")
    expect(panel.locator(".tfm-stream")).to_have_count(4)
    panel.evaluate("el => el.scrollIntoView()")
    page.wait_for_timeout(250)
    page.screenshot(path=ARTIFACTS / "engine_4streams.png")
    book.heard()
    panel.get_by_test_id("tfm-stop").click()
    book.idle(3)
    assert told(book)["status"] == "stopped"

    # A long prompt is seen as it is computed, and stopped in the middle of it.
    panel = book.panel(4)

    def stopped() -> float:
        book.unheard()
        book.run(4, wait=False)
        expect(panel).to_have_attribute("data-status", "prefill")
        book.heard()
        page.wait_for_timeout(700)
        panel.evaluate("el => el.scrollIntoView()")
        page.screenshot(path=ARTIFACTS / "engine_prefill.png")
        pressed = time.time()
        panel.get_by_test_id("tfm-stop").click()
        book.idle(4)
        run = told(book)
        assert run["status"] == "stopped"
        assert mimes(book, 4) == [["text/html", "text/plain"]]
        assert "error" not in [output["output_type"] for output in book.outputs(4)]
        return run["ended"] - pressed

    best(stopped, CHUNK)

    # Such a prompt again, stopped by JupyterLab's own button: the cell fails, so that Run All stops.
    def interrupted() -> float:
        book.run(4, wait=False)
        expect(panel).to_have_attribute("data-status", "prefill")
        pressed = time.time()
        page.evaluate("() => { jupyterapp.commands.execute('notebook:interrupt-kernel') }")
        book.idle(4)
        took = time.time() - pressed
        assert told(book)["status"] == "stopped"
        assert mimes(book, 4) == [["text/html", "text/plain"]]
        errors = [output["ename"] for output in book.outputs(4) if output["output_type"] == "error"]
        assert errors == ["Interrupted"]
        return took

    best(interrupted, CHUNK)

    # In the background: the cell returns, the panel goes on, the card comes.
    book.run(8)
    panel = book.panel(8)
    panel.evaluate("el => el.scrollIntoView()")  # out of sight it does not draw
    expect(panel).to_have_attribute("data-status", "decoding")
    book.run(CANCEL)
    expect(panel).to_have_count(0)
    assert mimes(book, 8)[0] == ["text/html", "text/plain"]
    expect(book.cell(8)).to_contain_text("stopped")

    # The kernel is restarted: the engine and its runs are still there.
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    book.ready()
    book.run(6)
    expect(book.cell(6)).to_contain_text("stopped")
    assert mimes(book, 6)[-1] == ["text/html", "text/plain"]

    # The same run as a panel, to step through its rounds; the file gets the card.
    book.run(9)
    panel = book.panel(9)
    expect(panel).to_have_attribute("data-status", "stopped")
    expect(panel.locator(".tfm-round")).to_contain_text("Round 1 of")
    saved = book.save()
    assert "widgets" not in saved["metadata"]
    assert not re.search("widget-view|model_id", book.path.read_text())
    book.run(7)
    assert book.text(7).strip() == "False"
