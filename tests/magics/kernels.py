"""A real IPython kernel, driven as a front end drives it."""

from __future__ import annotations

import queue
import time
from typing import Any

from jupyter_client import KernelManager

from tests.patience import LONG, PATIENT


class Cell:
    """A cell that was sent: its messages so far, by the newest content of each display."""

    def __init__(self, kernel: Kernel, code: str, page: bool):
        self.kernel, self.sent = kernel, time.monotonic()
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        # A page names the cell that it runs; consoles and nbclient do not.
        metadata = {"cellId": "cell"} if page else {}
        request = kernel.client.session.msg("execute_request", content, metadata=metadata)
        kernel.client.shell_channel.send(request)
        self.id = request["header"]["msg_id"]
        self.messages: list[dict] = []
        self.outputs: list[dict] = []
        """What a notebook would hold: mime bundles and streams, displays as they were updated last."""
        self.idle = False
        kernel.cells.append(self)

    def until(self, true, timeout: float = LONG) -> Cell:
        """Read messages, whosever they are, until `true(self)`."""
        deadline = time.monotonic() + timeout
        while not true(self):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout} s; the outputs are {self.outputs}")
            try:
                message = self.kernel.client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            for cell in self.kernel.cells:
                cell._take(message)
        return self

    def done(self, timeout: float = LONG) -> Cell:
        self.until(lambda cell: cell.idle, timeout)
        self.took = time.monotonic() - self.sent
        return self

    def _take(self, message: dict) -> None:
        if message["msg_type"] == "update_display_data":  # wherever it comes from, it replaces by its id
            for output in self.outputs:
                if output.get("id") == message["content"]["transient"]["display_id"]:
                    output["data"] = message["content"]["data"]
            return
        if message["parent_header"].get("msg_id") != self.id:
            return
        self.messages.append(message)
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            self.idle = content["execution_state"] == "idle"
        elif kind == "clear_output":
            self.outputs.clear()
        elif kind == "error":
            self.outputs.append({"kind": kind, "name": content["ename"], "lines": content["traceback"]})
        elif kind == "stream":
            self.outputs.append({"kind": kind, "text": content["text"]})
        elif kind in ("display_data", "execute_result"):
            id = content.get("transient", {}).get("display_id")
            self.outputs.append({"kind": kind, "data": content["data"], "id": id})

    @property
    def error(self) -> dict | None:
        return next((output for output in self.outputs if output["kind"] == "error"), None)

    @property
    def data(self) -> list[dict[str, Any]]:
        return [output["data"] for output in self.outputs if "data" in output]

    @property
    def text(self) -> str:
        """Everything that a person reads, without HTML."""
        return "\n".join(output.get("text") or output["data"]["text/plain"] for output in self.outputs
                         if output["kind"] != "error")


class Kernel:
    """A kernel with the extension loaded. `prelude` runs first, also after a restart."""

    def __init__(self, prelude: str = "", **environment: str):
        self.prelude = f"{prelude}\n{PATIENT}%load_ext tfmagic"
        self.cells: list[Cell] = []
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=environment)
        self._ready()

    def _ready(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LONG)
        cell = self.run(self.prelude)
        assert cell.error is None, cell.error

    def start(self, code: str, page: bool = False) -> Cell:
        """Send a cell; `page`: as a page does that can draw widgets."""
        return Cell(self, code, page)

    def run(self, code: str, timeout: float = LONG, page: bool = False) -> Cell:
        return self.start(code, page).done(timeout)

    def value(self, expression: str) -> Any:
        """What the expression's repr evaluates to."""
        import ast

        return ast.literal_eval(self.run(expression).data[0]["text/plain"])

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=True)
        self._ready()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
