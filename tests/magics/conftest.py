"""A fresh shell with the extension loaded, in front of a scripted client instead of the engine."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell
from scripted_client import Engine

from tfmagic import magics


class Shell:
    """A notebook's cells in this process: `run` a cell, then look at its output, errors and variables."""

    def __init__(self, ip: InteractiveShell, capsys):
        self.ip, self.capsys, self.engine = ip, capsys, Engine()
        self.connected: list[tuple] = []
        self.running = True
        self.out = self.err = ""

    def run(self, cell: str):
        """Run a cell; its value. What it printed is in `out`, what it complained of in `err`."""
        self.capsys.readouterr()
        result = self.ip.run_cell(cell)
        self.out, self.err = self.capsys.readouterr()
        self.result = result
        return result.result

    def usage(self, cell: str) -> str:
        """The one line of the UsageError that the cell ends with."""
        self.run(cell)
        line = self.err.strip()
        assert not self.result.success and line.startswith("UsageError: ") and "\n" not in line, self.err
        return line.removeprefix("UsageError: ")

    def registered(self) -> dict:
        return registered(self.ip)

    def __getitem__(self, name: str):
        return self.ip.user_ns[name]

    @property
    def asked(self) -> dict:
        return self.engine.asked[-1]


def registered(ip: InteractiveShell) -> dict:
    """What an extension may leave behind in a shell, without the magics that IPython itself loads on first use."""
    ours = lambda things: [thing for thing in things if not type(thing).__module__.startswith("IPython.")]  # noqa: E731
    return {
        "line": set(ip.magics_manager.magics["line"]),
        "cell": set(ip.magics_manager.magics["cell"]),
        "registry": ours(ip.magics_manager.registry.values()),
        "configurables": ours(ip.configurables),
        "events": {name: list(hooks) for name, hooks in ip.events.callbacks.items()},
        "matchers": list(ip.Completer.custom_matchers),
    }


@pytest.fixture
def ip():
    """A shell of its own, which is also what `get_ipython` gives while the test runs."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(colors="nocolor")
    yield shell
    shell.history_manager.end_session()
    InteractiveShell.clear_instance()


@pytest.fixture
def shell(ip, capsys, monkeypatch):
    """The extension loaded, then unloaded without a trace."""
    before = registered(ip)
    ip.run_line_magic("load_ext", "tfmagic")
    shell = Shell(ip, capsys)

    def connect(*arguments, progress=None, **options):
        shell.connected.append((arguments, options))
        return shell.engine

    monkeypatch.setattr(magics, "connect", connect)
    monkeypatch.setattr(magics, "running", lambda: shell.running)
    yield shell
    ip.run_line_magic("unload_ext", "tfmagic")
    assert registered(ip) == before

