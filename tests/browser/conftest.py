"""JupyterLab on a free port with folders of its own, and the system's Chromium to look at it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lab import ARTIFACTS, Notebook, restored

from tests.patience import LONG, patient, until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents and "browser" in item.fixturenames:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A running JupyterLab: `.url`, `.root` (its files), `.signals` (those of `scripted`)."""
    home = tmp_path_factory.mktemp("lab")
    folders = {name: home / name.lower() for name in (
        "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR", "SCRIPTED_SIGNALS", "FILES",
    )}  # fmt: skip
    for folder in folders.values():
        folder.mkdir(mode=0o700)
    for name, settings in SETTINGS.items():
        path = folders["JUPYTERLAB_SETTINGS_DIR"] / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    own = {name: str(folder) for name, folder in folders.items()}
    environment = {**os.environ, **own, "PYTHONPATH": f"{ROOT}:{HERE}", "OMP_NUM_THREADS": "1"}
    with (home / "lab.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0",
             "--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly",
             "--IdentityProvider.token=browsertests", f"--ServerApp.root_dir={folders['FILES']}"],
            env=environment, stdout=log, stderr=log, cwd=home,
        )  # fmt: skip
    try:
        url = started(server, folders["JUPYTER_RUNTIME_DIR"], home / "lab.log")
        yield SimpleNamespace(url=url, root=folders["FILES"], signals=folders["SCRIPTED_SIGNALS"])
    finally:
        server.terminate()
        server.wait(LONG)


def started(server, runtime: Path, log: Path) -> str:
    """The server's address, once it has one."""

    def address() -> str | None:
        assert server.poll() is None, log.read_text()
        for info in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError, KeyError):  # half written
                return f"http://127.0.0.1:{json.loads(info.read_text())['port']}"
        return None

    return until(address)


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import expect, sync_playwright

    patient()
    expect.set_options(timeout=1e3 * LONG)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=1e3 * LONG)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def asked():
    """Every address that the page asked for."""
    return []


@pytest.fixture(scope="session")
def complaints():
    """Every error that the page had or wrote to its console."""
    return []


@pytest.fixture(scope="session")
def page(lab, browser, asked, complaints):
    """One page with JupyterLab open for all tests: a notebook opens in it in a second, a new Lab takes four."""
    page = browser.new_page(viewport={"width": 1240, "height": 1000})
    page.set_default_timeout(1e3 * LONG)
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.goto(f"{lab.url}/lab?token=browsertests&reset")
    restored(page)
    page.evaluate("() => jupyterapp.commands.execute('application:toggle-left-area')")
    yield page
    page.close()


@pytest.fixture
def notebook(lab, page, request):
    """`notebook(*cells)` opens a new notebook with these cells and a ready kernel. A failure leaves a screenshot."""
    opened = []

    def make(*cells: str) -> Notebook:
        opened.append(Notebook(page, lab, f"{request.node.name}-{len(opened)}.ipynb", cells))
        return opened[-1]

    yield make
    if getattr(request.node, "failed", False):
        ARTIFACTS.mkdir(exist_ok=True)
        page.screenshot(path=ARTIFACTS / f"failed_{request.node.name}.png")
    page.emulate_media(reduced_motion=None)
    for book in opened:
        book.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    item.failed = getattr(item, "failed", False) or report.failed
