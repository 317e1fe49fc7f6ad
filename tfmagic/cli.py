"""`tfmagic demo | start | status | logs | kvcompare | stop`: the resident engine from a terminal.

Exit status: 0 done; 1 it could not be done, said in one or two lines; 2 misuse; 3 `status`: no engine is running.
"""

from __future__ import annotations

import argparse
import sys
import time

from . import __version__
from .errors import TfmagicError

NOT_RUNNING = 3


def main(argv: list[str] | None = None) -> int:
    """The `tfmagic` command. Returns the exit status; argparse exits with 2 by itself on misuse."""
    options = parser().parse_args(argv)
    try:
        return options.do(options)
    except TfmagicError as error:
        print(f"tfmagic: {error.problem}", f"  {error.fix}", sep="\n", file=sys.stderr)
    except KeyboardInterrupt:
        print("tfmagic: interrupted", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        sys.stderr.close()
    return 1


def parser() -> argparse.ArgumentParser:
    description = "The LLM engine you can see into. In a notebook: %load_ext tfmagic"
    p = argparse.ArgumentParser("tfmagic", description=description)
    p.add_argument("--version", action="version", version=f"tfmagic {__version__}")
    commands = p.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, do, help: str) -> argparse.ArgumentParser:
        c = commands.add_parser(name, help=help, description=help)
        c.set_defaults(do=do)
        return c

    command("demo", demo, "execute the quickstart notebook and show what each cell said and measured")
    c = command("start", start, "start the resident engine and wait until it is ready")
    c.add_argument("model", nargs="?", metavar="MODEL", help="a folder or a Hugging Face id (default: what ships)")
    c.add_argument("--device", default="auto", help="auto, cpu or cuda:N (default: auto)")
    c.add_argument("--prompt-cache-gib", type=_positive, metavar="N", help="memory for kept prompts (default: 1)")
    c.add_argument("--context", type=int, metavar="N", help="longest prompt and reply together, tokens")
    c.add_argument("--idle-minutes", type=_positive, metavar="N", help="end when idle so long; 0: never (default: 60)")
    c.add_argument("--drafter", metavar="PATH|none", help="a block drafter's folder (default: drafter in the model's)")
    c.add_argument("--drafter-bits", type=int, choices=(4, 16), help="4: round the drafter's matrices (default: 16)")
    c.add_argument("--form", choices=("exact", "bf16"), help="the numeric form (default: bf16 on a GPU, else exact)")
    c.add_argument("--kv-cache", choices=("bf16", "fp8"), help="what keys and values are held in (default: bf16)")
    c.add_argument("--learn-conversations", action=argparse.BooleanOptionalAction, help="keep prompts' states on disk")
    c.add_argument("--spill-gib", type=_positive, metavar="N", help="disk for states that memory has no room for")
    c.add_argument("--learn-dir", metavar="PATH", help="where states on disk are kept (default: the user's cache)")
    c.add_argument("--learn-gib", type=_positive, metavar="N", help="disk for conversations' states (default: 32)")
    c.add_argument("--learn-min-free-gib", type=_positive, metavar="N", help="disk that is left free (default: 4)")
    c.add_argument("--learn-daily-gib", type=_positive, metavar="N", help="what may be written a day (default: 64)")
    c.add_argument("--restart", action="store_true", help="end the running engine first")
    command("status", status, "show the running engine")
    c = command("logs", logs, "print the end of the engine's log")
    c.add_argument("-n", "--lines", type=int, default=40, metavar="N", help="lines to print (default: 40)")
    c = command("kvcompare", kvcompare, "what --kv-cache fp8 changes: one text read in both forms, compared")
    c.add_argument("model", nargs="?", metavar="MODEL", help="a folder or a Hugging Face id (default: what ships)")
    c.add_argument("--text", metavar="FILE", help="the text (default: small stories, as the shipped model tells them)")
    c.add_argument("--device", default="auto", help="auto, cpu or cuda:N (default: auto)")
    c.add_argument("--form", choices=("exact", "bf16"), help="the numeric form (default: bf16 on a GPU, else exact)")
    c.add_argument("--rows", type=int, default=1024, metavar="N", help="tokens of the text to read (default: 1024)")
    c = command("stop", stop, "end the running engine")
    c.add_argument("--all", action="store_true", help="end every engine of this user, in every runtime directory")
    return p


def demo(options: argparse.Namespace) -> int:
    from .demo import main

    return main() or 0


def start(options: argparse.Namespace) -> int:
    from rich.console import Console

    from .client import OPTIONS, connect

    console = Console(stderr=True, highlight=False)
    began = time.monotonic()
    with console.status("connecting") as line:
        engine = connect(
            options.model,
            options.device,
            restart=options.restart,
            progress=line.update,
            **{name: getattr(options, name) for name in OPTIONS},
        )
    with engine:
        state = engine.status()
    print(f"{state.model} on {state.device}, process {state.pid}, ready in {time.monotonic() - began:.1f} s")
    return 0


def status(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from .client import connect
    from .engine.resident import place
    from .views import words

    where = place.find()
    if where.engine() is None:
        print("no engine is running; start one: tfmagic start")
        return NOT_RUNNING
    info = where.read()
    with connect(start=False, ready=False) as engine:
        state = engine.status()
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("model", state.model or "the model that ships"),
        ("device", state.device),
        ("drafter", state.drafter or "—"),
        *([("of the device", state.plan)] if state.plan else []),
        ("phase", state.phase if state.phase == "ready" else f"{state.phase}: {state.detail}"),
        ("process", f"{state.pid}, up {_duration(time.time() - state.started)}, {_size(state.memory)} resident"),
        ("context", f"{state.context:,} tokens" if state.context else "—"),
        ("runs", f"{state.running} running, {state.waiting} waiting, {state.runs} kept"),
        ("prompt cache", words.cache(state)),
        ("idle exit", _idle(info.settings.get("idle_minutes")) if info else "—"),
        ("runtime dir", str(where.path)),
    ):
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table, soft_wrap=True)
    return 0


def logs(options: argparse.Namespace) -> int:
    from .engine.resident import place

    where = place.find()
    if not where.log.exists():
        raise TfmagicError(f"There is no log yet: {where.log}", "An engine writes it when it starts: tfmagic start")
    print(f"# {where.log}")
    print(*where.tail(max(0, options.lines), 256 << 10), sep="\n")
    return 0


def kvcompare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from .engine import kvcompare

    with Console(stderr=True, highlight=False).status("importing torch") as line:
        text = kvcompare.read_text(options.text)
        found = kvcompare.compare(options.model, text, options.device, options.rows, options.form, line.update)
    print(*kvcompare.table(found), sep="\n")
    return 0


def stop(options: argparse.Namespace) -> int:
    from .engine.resident import place

    if options.all:
        places = [place.Place(path) for path in place.candidates() if not place.objection(path)]
    else:
        places = [place.find()]
    ended = 0
    for where in places:
        pid = where.engine()
        if place.finish(where):
            ended += 1
            print(f"stopped process {pid} ({where.path})")
    if not ended:
        print("no engine is running")
    return 0


def _positive(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{seconds:.0f} s" if not minutes else f"{minutes} min" if not hours else f"{hours} h {minutes % 60} min"


def _size(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _idle(minutes: float | None) -> str:
    return f"after {minutes:g} minutes" if minutes else "never"


if __name__ == "__main__":
    sys.exit(main())
