"""`%tfold` and `%%tfold`: the engine behind a notebook cell."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand, output_can_be_silenced
from traitlets import Enum, default

from . import inputs
from .arguments import CELL, COMMANDS, VIEWS, cell_help, line_help
from .completion import matcher
from .errors import Interrupted
from .template import did_you_mean

RESULT = "_tfold"
"""The notebook variable that holds the last run."""
PARAMS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "draft", "cache", "logprobs", "stop")
OPTIONS = (
    *("prompt_cache_gib", "context", "idle_minutes", "learn_conversations", "spill_gib"),
    *("learn_dir", "learn_gib", "learn_min_free_gib", "learn_daily_gib", "drafter", "drafter_bits", "form", "kv_cache"),
)


@magics_class
class TfoldMagics(Magics):
    """A resident LLM engine in a notebook: `%tfold?` and `%%tfold?` tell how."""

    view = Enum(VIEWS, help="How %%tfold shows a run: auto, live, text or off. Default: $TFMAGIC_VIEW, else auto.")
    view = view.tag(config=True)

    @default("view")
    def _default_view(self) -> str:
        view = os.environ.get("TFMAGIC_VIEW", "auto")
        return view if view in VIEWS else "auto"

    def __init__(self, shell):
        super().__init__(shell)
        self.engine = None
        """The connection to the engine, from the first use on. It closes when neither this nor a handle needs it."""
        self.runs: list[str] = []
        self.chats: list[str] = []
        """What Tab offers: the ids and names that the engine told last."""
        self.background: list[Any] = []
        """Handles of background runs: a record follows its run as long as its handle lives."""

    # %%tfold -------------------------------------------------------------------------------------

    @no_var_expand
    @cell_magic("tfold")
    def cell(self, line: str, body: str):
        from .views import watch

        arguments = CELL.parse(line)
        if arguments.new and not arguments.chat:
            raise UsageError("%%tfold --new begins a conversation anew; say which one with --chat NAME")
        shown_by = self._renderer(arguments.view or self.view)
        prompt = inputs.prompt(body, arguments.image, arguments.raw, self.shell.user_ns)
        if arguments.sweep:
            return self._swept(arguments, prompt, shown_by is not None)
        handle = self._submitted(arguments, prompt)
        self._remember([handle.record])
        self._bind(handle, arguments.output)
        try:
            watch(handle, shown_by, arguments.bg)
        finally:
            self._bind(handle, arguments.output)
        if arguments.bg:
            self.background = [*(h for h in self.background if not h.record.finished), handle]
            return handle
        check(handle.record)

    def _swept(self, arguments: Namespace, prompt: list, shown: bool) -> None:
        """One run after the other; what came out is bound also when one of them is stopped or fails."""
        from .experiment import Sweep, SweepView, grid
        from .views import watch

        points = grid(arguments)
        sweep = Sweep(list(points[0]))
        self.shell.push({name: sweep for name in (RESULT, arguments.output) if name})
        self._connected()  # so that its progress is gone before the table comes
        with SweepView(sweep, len(points)) if shown else nullcontext() as view:
            for point in points:
                handle = self._submitted(Namespace(**(vars(arguments) | point)), prompt)
                sweep.append(handle.record)
                watch(handle, view)
                check(handle.record)
        self._remember(sweep)

    def _submitted(self, arguments: Namespace, prompt: list):
        """The handle of the cell's run, on an engine that is started when none runs."""
        params = {name: getattr(arguments, name) for name in PARAMS if getattr(arguments, name) not in (None, [])}
        try:
            return self._connected().submit(
                prompt,
                system=arguments.system,
                chat=arguments.chat,
                new=arguments.new,
                streams=arguments.streams,
                background=arguments.bg,
                **params,
            )
        except KeyboardInterrupt:
            raise Interrupted("Stopped before the run began.", "Nothing was computed; run the cell again.") from None

    def _renderer(self, view: str):
        from .views import renderer

        try:
            return renderer(view)
        except ValueError as error:
            raise UsageError(f"%%tfold: {error}") from None

    def _bind(self, handle, output: str | None) -> None:
        self.shell.push({name: handle.record for name in (RESULT, output) if name})

    # %tfold --------------------------------------------------------------------------------------

    @no_var_expand
    @output_can_be_silenced
    @line_magic("tfold")
    def line(self, line: str):
        command, _, rest = line.strip().rstrip(";").partition(" ")
        command = command or "status"
        if command not in COMMANDS:
            raise UsageError(f"%tfold has no {command}{did_you_mean(command, COMMANDS)}; it has {', '.join(COMMANDS)}")
        return getattr(self, f"_{command}")(COMMANDS[command].parse(rest))

    def _start(self, arguments: Namespace) -> None:
        self._open(arguments.model, arguments.device or "auto", **_options(arguments))

    def _restart(self, arguments: Namespace) -> None:
        """Afresh with what is asked for, and for the rest with what the running engine was started with."""
        from .engine.resident import place

        info = place.find().read()
        before = {"model": info.model, "device": info.device} | info.settings if info else {}
        asked = {"model": arguments.model, "device": arguments.device} | _options(arguments)
        wish = {"device": "auto"} | before | {name: value for name, value in asked.items() if value is not None}
        self._open(wish.pop("model", None), wish.pop("device"), restart=True, **wish)

    def _open(self, model: str | None, device: str, **options) -> None:
        from .views.progress import Progress

        progress = Progress()
        self.engine = connect(model, device, progress=progress, **options)
        state = self.engine.status()
        progress(f"The engine is ready: {state.model} on {state.device}, process {state.pid}.")
        progress.keep()

    def _stop(self, arguments: Namespace) -> None:
        if not running():
            print("No engine is running.")
            return
        self._found().stop()
        self.engine = None
        print("The engine was stopped.")

    def _status(self, arguments: Namespace):
        from .views import tables

        return tables.status(self._found().status() if running() else None)

    def _models(self, arguments: Namespace):
        from .models import models
        from .views import tables

        return tables.models(models())

    def _runs(self, arguments: Namespace):
        from .views import tables

        records = self._found().runs()
        self._remember(records)
        return tables.runs(records)

    def _cache(self, arguments: Namespace):
        from .views import tables

        return tables.cache(self._found().cache(clear=arguments.what == "clear"))

    def _show(self, arguments: Namespace):
        return self._shown(self._run(arguments.id), arguments.live)

    def _last(self, arguments: Namespace):
        return self._shown(None, arguments.live)

    def _cancel(self, arguments: Namespace) -> None:
        engine = self._found()
        engine.cancel(self._run(arguments.id) if arguments.id else None)

    def _logs(self, arguments: Namespace) -> None:
        from .engine.resident import place

        print("\n".join(place.find().tail(40)) or "The engine's log is empty.")

    def _profile(self, arguments: Namespace) -> None:
        raise UsageError("%tfold profile is not there yet in this version")

    def _shown(self, run: str | None, live: bool = False):
        """The record of a kept run, as the cell's value; one that still goes on is shown until it ends instead. `live`:
        a panel of it."""
        from .views import live as panel

        if live and not panel.available():
            raise UsageError("%tfold --live needs a notebook page and anywidget; leave it out here")
        handle = self._found().follow(run)
        self._bind(handle, None)
        self._remember([handle.record])
        if live and handle.record.finished:
            return panel.replay(handle.record)
        shown_by = None if handle.record.finished else self._renderer("live" if live else self.view)
        if shown_by is None:
            return handle.record
        try:
            shown_by.watch(handle)
        except KeyboardInterrupt:
            id = handle.record.id
            fix = f"%tfold show {id} shows it again, %tfold cancel {id} stops it."
            raise Interrupted(f"Run {id} goes on.", fix) from None
        finally:
            shown_by.finish(handle)
            self._bind(handle, None)

    def _run(self, start: str) -> str:
        """The whole id of a kept run."""
        records = self._found().runs()
        self._remember(records)
        found = [record.id for record in records if record.id.startswith(start)]
        if len(found) == 1 or start in found:
            return start if start in found else found[0]
        if found:
            raise UsageError(f"%tfold: {start} begins the ids of several runs: {', '.join(found[:8])}")
        raise UsageError(f"%tfold: the engine keeps no run {start}{did_you_mean(start, self.runs)}; see %tfold runs")

    # The engine ----------------------------------------------------------------------------------

    def _connected(self):
        """The engine, started when none runs; the cell shows how far it is until then."""
        from .views.progress import Progress

        if self.engine is None or not self.engine.alive:
            with Progress() as progress:
                self.engine = connect(progress=progress)
        return self.engine

    def _found(self):
        """The engine that runs, even if it is not ready yet. Raises TfmagicError when none does."""
        if self.engine is None or not self.engine.alive:
            return connect(start=False, ready=False)
        return self.engine

    def _remember(self, records: list) -> None:
        """For Tab."""
        self.runs = [*dict.fromkeys([*(record.id for record in records), *self.runs])][:200]
        self.chats = [*dict.fromkeys([*(record.chat for record in records if record.chat), *self.chats])][:200]


TfoldMagics.cell.__doc__, TfoldMagics.line.__doc__ = cell_help(), line_help()


# Seams to what is heavy: imported on first use -----------------------------------------------------


def connect(model: str | None = None, device: str = "auto", **options):
    from .client import connect

    return connect(model, device, **options)


def check(record) -> None:
    """Raise EngineFailed when the run failed."""
    from .connection import check

    check(record)


def running() -> bool:
    """Whether an engine lives."""
    from .engine.resident import place

    return place.find().engine() is not None


def _options(arguments: Namespace) -> dict[str, float | None]:
    return {name: getattr(arguments, name) for name in OPTIONS if getattr(arguments, name) is not None}


# The extension -------------------------------------------------------------------------------------


def load(shell) -> None:
    """Register the magics and their completion; nothing when they are."""
    if TfoldMagics.__name__ in shell.magics_manager.registry:
        return
    magics = TfoldMagics(shell)
    shell.register_magics(magics)
    magics.matcher = matcher(magics)
    shell.Completer.custom_matchers.append(magics.matcher)


def unload(shell) -> None:
    """Take back what `load` and the cells since then registered; the engine and its background runs live on."""
    magics = shell.magics_manager.registry.pop(TfoldMagics.__name__, None)
    if magics is None:
        return
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("tfold", None)
    shell.configurables.remove(magics)
    shell.Completer.custom_matchers.remove(magics.matcher)
    live = sys.modules.get("tfmagic.views.live")
    if live is not None:
        live.unload()
    magics.engine, magics.background = None, []
