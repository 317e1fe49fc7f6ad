"""A notebook in a real JupyterLab, driven as a person would see it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.patience import LONG
from tests.patience import until as waited

ARTIFACTS = Path(__file__).parents[2] / "artifacts"
"""Screenshots; not in version control."""


def until(page, condition: str, argument=None) -> None:
    """Wait until the asynchronous function gives true (`page.wait_for_function` takes a promise itself for true)."""
    waited(lambda: page.evaluate(condition, argument))


def restored(page) -> None:
    """Wait until JupyterLab is up and knows its kernels: a notebook opened before that asks which kernel to take."""
    page.wait_for_function("() => window.jupyterapp")
    until(page, """() => Promise.all([jupyterapp.restored, jupyterapp.serviceManager.ready,
                                      jupyterapp.serviceManager.kernelspecs.ready]).then(() => true)""")  # fmt: skip


class Notebook:
    """A notebook in the page, driven through JupyterLab's own commands, for key presses get lost."""

    def __init__(self, page, lab, name: str, cells):
        self.page, self.lab, self.name = page, lab, name
        self.path = lab.root / name
        empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
        code = [{**empty, "id": f"c{i}", "source": source} for i, source in enumerate(cells)]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        for signal in lab.signals.iterdir():
            signal.unlink()
        self.path.write_text(json.dumps({"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
        self.open()

    def open(self) -> None:
        self.page.evaluate("name => { jupyterapp.commands.execute('docmanager:open', {path: name}) }", self.name)
        self.ready()

    def ready(self) -> None:
        """Wait until the notebook is in front and its kernel answers."""
        until(
            self.page,
            """async name => {
                const panel = jupyterapp.shell.currentWidget;
                if (panel?.context?.path !== name) return false;
                await panel.context.ready; await panel.sessionContext.ready;
                const kernel = panel.sessionContext.session?.kernel;
                if (!kernel || panel.sessionContext.hasNoKernel) return false;
                await kernel.info;
                return kernel.connectionStatus === 'connected';
            }""",
            self.name,
        )

    def run(self, i: int, wait: bool = True) -> None:
        """Run cell i; `wait`: until it has ended."""
        self.page.evaluate(
            """i => { const book = jupyterapp.shell.currentWidget.content; book.activeCellIndex = i;
                      book.widgets[i].model.executionCount = null;
                      jupyterapp.commands.execute('notebook:run-cell') }""",
            i,
        )
        if wait:
            self.idle(i)

    def idle(self, i: int) -> None:
        """Wait until cell i has an execution count: it has ended."""
        self.page.wait_for_function(
            "i => Number.isInteger(jupyterapp.shell.currentWidget.content.widgets[i].model.executionCount)",
            arg=i,
            timeout=1e3 * LONG,
        )

    def go(self, phase: str) -> None:
        """Let a scripted run go on that is held in this phase."""
        (self.lab.signals / f"go-{phase}").touch()

    def heard(self) -> None:
        """Wait until the kernel has heard of a panel through the control comm; see `scripted.tell_when_heard`."""
        waited((self.lab.signals / "heard").exists)
        self.unheard()

    def unheard(self) -> None:
        """Forget that it has."""
        (self.lab.signals / "heard").unlink(missing_ok=True)

    def outputs(self, i: int) -> list[dict]:
        """Cell i's outputs as the notebook holds them."""
        return self.page.evaluate("i => jupyterapp.shell.currentWidget.content.widgets[i].model.outputs.toJSON()", i)

    def text(self, i: int) -> str:
        """What cell i printed."""
        return "".join("".join(o.get("text", "")) for o in self.outputs(i) if o["output_type"] == "stream")

    def cell(self, i: int):
        return self.page.locator(".jp-Notebook:visible .jp-CodeCell").nth(i)

    def panel(self, i: int):
        return self.cell(i).locator("[data-testid=tfm-panel]")

    def save(self) -> dict:
        """Save, and read the file."""
        self.page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")
        return json.loads(self.path.read_text())

    def reload(self, busy: bool) -> None:
        """Reload the page, and wait until the notebook is there again; and, where its kernel is busy, until the page
        has asked it for its widgets: of a run that ends before that, JupyterLab may never learn."""
        asked: list[bool] = []

        def sent(frame: str | bytes) -> None:
            if "comm_info_request" in (frame if isinstance(frame, str) else frame.decode("latin1")):
                asked.append(True)

        def opened(socket) -> None:
            socket.on("framesent", sent)

        self.page.on("websocket", opened)
        self.page.reload()
        restored(self.page)
        until(
            self.page,
            """async name => {
                const panel = jupyterapp.shell.currentWidget;
                if (panel?.context?.path !== name) return false;
                await panel.context.ready;
                return panel.content.widgets.length > 0;
            }""",
            self.name,
        )
        waited(lambda: self.page.evaluate("() => true") and (asked or not busy))
        self.page.remove_listener("websocket", opened)

    def close(self) -> None:
        """Close the tab and end its kernel."""
        self.page.evaluate(
            """async name => {
                for (const panel of jupyterapp.shell.widgets('main')) if (panel.context?.path === name) {
                    await panel.context.save().catch(() => {});
                    const session = panel.sessionContext.session?.id;
                    panel.dispose();
                    if (session) jupyterapp.serviceManager.sessions.shutdown(session).catch(() => {});
                }
            }""",
            self.name,
        )
