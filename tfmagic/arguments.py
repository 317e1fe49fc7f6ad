"""The flags of `%tfold` and `%%tfold`: one table that drives parsing, the `?` help and Tab completion.

A table is an argparse parser whose errors are UsageErrors of one line. An option's `complete` says what Tab offers for
its value: a kind (`image`, `variable`, `chat`, `run`, `model`, `drafter`) or the values themselves.
"""

from __future__ import annotations

import argparse
import keyword
import math
import re
import shlex
from collections.abc import Callable

from IPython.core.error import UsageError

from .template import did_you_mean

MAX_STREAMS = 16
DRAFTS = ("on", "off", "copy", "block", "tree")
SWEPT = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "draft", "cache")
"""What `--sweep` may vary."""
KV = ("bf16", "fp8")
FORMS = ("exact", "bf16")
VIEWS = ("auto", "live", "text", "off")
Invalid = argparse.ArgumentTypeError


class Table(argparse.ArgumentParser):
    """One magic's flags. `parse` raises UsageError, one line, for anything a person can get wrong."""

    def __init__(self, magic: str, **options):
        def formatter(prog):
            return argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=100)

        super().__init__(prog=magic, add_help=False, allow_abbrev=False, formatter_class=formatter, **options)
        self.color = False  # Python 3.14 colours help by default; this text goes into a docstring

    def adding(self, title: str | None = None) -> Callable[..., None]:
        """`add_argument` of the table, or of a titled part of its help, that takes `complete` as well."""
        into = self.add_argument_group(title) if title else self

        def add(*names: str, complete: str | tuple[str, ...] | None = None, **options) -> None:
            into.add_argument(*names, **options).complete = complete

        return add

    def parse(self, line: str) -> argparse.Namespace:
        try:
            words = shlex.split(line)
        except ValueError:
            raise UsageError(f"{self.prog}: a quote is left open in: {line.strip()}") from None
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return arguments

    def flags(self) -> list[argparse.Action]:
        """The options that can be given."""
        return [action for action in self._actions if action.option_strings]

    def error(self, message: str):
        for theirs, ours in REWORDED.items():
            message = re.sub(theirs, ours, message)
        raise UsageError(f"{self.prog} {message}")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"does not take {word!r} here; quote a value that holds spaces" + self.stray
        word = word.split("=")[0]
        known = [name for action in self.flags() for name in action.option_strings]
        starts = [name for name in known if name.startswith(word)]
        return f"has no flag {word}" + (f"; did you mean {starts[0]}?" if starts else did_you_mean(word, known))

    stray = ""
    """What to do with a word that belongs to no flag."""


REWORDED = {
    r"^argument (\S+): expected one argument": r"\1 needs a value",
    r"^argument (\S+): ignored explicit argument": r"\1 takes no value, not",
    r"^argument (\S+): ": r"\1 ",
    r"^the following arguments are required:": "needs",
}


# Values ------------------------------------------------------------------------------------------


def number(kind: type, low: float, high: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """A reader of an int or float in [low, high], or (low, high] with `above`."""
    noun = "a whole number" if kind is int else "a number"
    span = f"{'above' if above else 'from'} {low}" + (f" to {high}" if high < math.inf else " up")

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low) or value == math.inf:
            raise Invalid(f"takes {noun} {span}, not {text}")
        return value

    return read


def one_of(*values: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in values:
            known = " or ".join(part for part in (", ".join(values[:-1]), values[-1]) if part)
            raise Invalid(f"takes {known}, not {text!r}")
        return text

    return read


def name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise Invalid(f"takes a variable name, not {text!r}")
    return text


def chat(text: str) -> str:
    if not re.fullmatch(r"[\w.:-]{1,64}", text):
        raise Invalid("takes a name of 1 to 64 letters, digits, '-', '_', '.' or ':'")
    return text


def stop(text: str) -> str:
    """A stop string; `\\n` and `\\t` are understood, for they cannot be typed on a magic's line."""
    if not text:
        raise Invalid("takes a text that is not empty")
    return text.replace("\\n", "\n").replace("\\t", "\t")


def device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", text):
        raise Invalid(f"takes auto, cpu or cuda:N, not {text!r}")
    return text


def drafter(text: str) -> str:
    if not text.strip():
        raise Invalid("takes a folder, a Hugging Face id or none")
    return text


def drafter_bits(text: str) -> int:
    if text not in ("4", "16"):
        raise Invalid(f"takes 4 or 16, not {text!r}")
    return int(text)


def sweep(table: Table) -> Callable[[str], tuple[str, list]]:
    """A reader of KEY=V1,V2 into (name, values), each value read as the flag --KEY reads it."""

    def read(text: str) -> tuple[str, list]:
        key, _, values = text.partition("=")
        flag = next((f for f in table.flags() if f"--{key}" in f.option_strings and f.dest in SWEPT), None)
        if flag is None or not values:
            known = ", ".join(name.replace("_", "-") for name in SWEPT)
            raise Invalid(f"takes KEY=V1,V2 with a KEY of {known}, not {text}")
        try:
            return flag.dest, [flag.type(value) for value in values.split(",")]
        except Invalid as error:
            raise Invalid(f"{key} {error}") from None

    return read


# %%tfold -----------------------------------------------------------------------------------------

CELL_EXAMPLES = """
The body is the prompt, taken literally. {{name}} inserts a notebook variable, and an image at that place if it is one;
{{df.shape}} and {{row["x"]}} work too. {{{{ is two literal braces. Single braces and $ are text.

examples
  %%tfold --max-tokens 200
  Tell me about the sea.

  %%tfold --image photo --chat trip -o answer
  What is on the picture?

  %%tfold -n 4 --temperature 0.8 --seed 7
  Compare {{left}} with {{right}}.

  %%tfold --sweep draft=on,off --sweep temperature=0,1
  Does drafting change the reply?

The run is kept in _tfold, and in NAME with -o NAME, also when it was stopped or failed; _tfold.text is the reply.
With no engine running, the embedded model starts by itself.
"""


def cell_table() -> Table:
    table = Table(
        "%%tfold",
        usage="%%%%tfold [flags]\n       prompt",
        description="Send the cell to the resident engine and watch the reply come.",
        epilog=CELL_EXAMPLES.strip("\n"),
    )
    table.stray = ", and write the prompt into the cell's body"
    add = table.adding("prompt")
    add("--image", action="append", default=[], metavar="NAME-or-PATH", complete="image",
        help="a variable (PIL image, array, figure, bytes, path) or a file; repeatable, before the text")
    add("--system", metavar="TEXT", help="the system turn")
    add("--chat", type=chat, metavar="NAME", complete="chat", help="go on with the conversation of this name")
    add("--new", action="store_true", help="begin the --chat anew, so that the notebook can be run again")
    add("--raw", action="store_true", help="take the body as it is: no {{fields}}")
    add = table.adding("sampling (left out: the model's own defaults)")
    add("--max-tokens", type=number(int, 1), metavar="N", help="the longest reply")
    add("--temperature", type=number(float, 0, 10), metavar="T", help="0 is greedy")
    add("--top-p", type=number(float, 0, 1, above=True), metavar="P", help="the likeliest tokens up to this mass")
    add("--top-k", type=number(int, 0), metavar="K", help="the K likeliest tokens; 0 is all")
    add("--min-p", type=number(float, 0, 1), metavar="P", help="tokens at least this share of the likeliest")
    add("--seed", type=number(int, 0, 2**63 - 1), metavar="S", help="stream i draws with S + i")
    add("--stop", action="append", default=[], type=stop, metavar="TEXT",
        help=r"end before this text; repeatable, \n is a new line")
    add("-n", dest="streams", type=number(int, 1, MAX_STREAMS), default=1, metavar="STREAMS",
        help="replies side by side, 1 to 16")
    add = table.adding("engine")
    add("--draft", type=one_of(*DRAFTS), metavar="|".join(DRAFTS), complete=DRAFTS,
        help="where drafts come from; never changes a token")
    add("--cache", type=one_of("on", "off"), metavar="on|off", complete=("on", "off"),
        help="off: a cold run that neither reads nor writes the prompt cache")
    add("--logprobs", type=number(int, 0, 20), metavar="K", help="report the K likeliest tokens at each place, 0 to 20")
    add("--sweep", action="append", default=[], type=sweep(table), metavar="KEY=V1,V2", complete="sweep",
        help="run once for each value, and for each combination; repeatable")
    add = table.adding("notebook")
    add("--view", type=one_of(*VIEWS), metavar="|".join(VIEWS), complete=VIEWS,
        help="how to show the run; default: %%config TfoldMagics.view")
    add("--bg", action="store_true", help="return a handle at once and run in the background")
    add("-o", dest="output", type=name, metavar="NAME", complete="variable", help="keep the run in this variable too")
    return table


# %tfold ------------------------------------------------------------------------------------------


def engine_table(command: str, description: str) -> Table:
    """`start` and `restart`."""
    table = Table(f"%tfold {command}", usage=f"%%tfold {command} [MODEL] [flags]", description=description)
    add = table.adding("flags")
    add("model", nargs="?", metavar="MODEL", complete="model",
        help="a folder or a Hugging Face id; default: the embedded model")
    add("--device", type=device, metavar="auto|cpu|cuda:N", complete=("auto", "cpu", "cuda:0"),
        help="where to compute")
    add("--prompt-cache-gib", type=number(float, 0), metavar="N", help="memory for kept prompt states")
    add("--context", type=number(int, 64), metavar="N", help="the longest prompt and reply together, tokens")
    add("--idle-minutes", type=number(float, 0), metavar="N", help="end after this time without work; 0 is never")
    add("--drafter", type=drafter, metavar="PATH|none", complete="drafter",
        help="the block drafter's folder; default: the folder drafter beside the model's weights, if there is one")
    add("--drafter-bits", type=drafter_bits, metavar="4|16", complete=("4", "16"),
        help="4: round the drafter's matrices; costs guesses, never a token. Default: 16, as they are")
    add("--form", type=one_of(*FORMS), metavar="|".join(FORMS), complete=FORMS,
        help="the numeric form; default: bf16 on a GPU (Hopper or later), else exact, which is the same on all devices")
    add("--kv-cache", type=one_of(*KV), metavar="|".join(KV), complete=KV,
        help="what keys and values are held in; fp8 takes half the room and changes replies a little")
    add = table.adding("states on disk (off unless asked for; a conversation then resumes after a restart)")
    add("--learn-conversations", action=argparse.BooleanOptionalAction, help="keep the states of conversations on disk")
    add("--spill-gib", type=number(float, 0), metavar="N", help="disk for states that memory has no room for")
    add("--learn-dir", metavar="PATH", complete="model", help="where; default: in the user's cache directory")
    add("--learn-gib", type=number(float, 0), metavar="N", help="disk for the states of conversations; default 32")
    add("--learn-min-free-gib", type=number(float, 0), metavar="N", help="disk that is left free; default 4")
    add("--learn-daily-gib", type=number(float, 0), metavar="N", help="what may be written a day; default 64")
    return table


def cache_table() -> Table:
    table = Table("%tfold cache", description="what is kept of prompts, in memory and on disk; clear forgets it")
    add = table.adding()
    add("what", nargs="?", type=one_of("clear"), metavar="WHAT", complete=("clear",), help="clear: forget it all")
    return table


def run_table(command: str, description: str, required: bool) -> Table:
    """`show` and `cancel`."""
    table = Table(f"%tfold {command}", description=description)
    table.adding()("id", nargs=None if required else "?", metavar="ID", complete="run", help="a run's id, or its start")
    return table


def shown_table(table: Table) -> Table:
    """`show` and `last`."""
    table.adding()("--live", action="store_true", help="as the live panel, to step through its rounds")
    return table


COMMANDS: dict[str, Table] = {
    "start": engine_table("start", "start the engine, or say that it runs"),
    "status": Table("%tfold status", description="the engine: model, device, memory, cache"),
    "models": Table("%tfold models", description="models on this machine that the engine can open"),
    "cache": cache_table(),
    "runs": Table("%tfold runs", description="the runs kept, newest first"),
    "show": shown_table(run_table("show", "a kept run by its id", required=True)),
    "last": shown_table(Table("%tfold last", description="the newest run, also after a kernel restart")),
    "cancel": run_table("cancel", "stop a run, or all of this notebook", required=False),
    "stop": Table("%tfold stop", description="end the engine and give its memory back"),
    "restart": engine_table("restart", "stop the engine and start it afresh"),
    "logs": Table("%tfold logs", description="the last lines of the engine's log"),
    "profile": Table("%tfold profile", description="not there yet"),
}
CELL = cell_table()


def line_help() -> str:
    commands = "\n".join(f"  %tfold {command:<10}{table.description}" for command, table in COMMANDS.items())
    start = COMMANDS["start"].format_help()
    return f"The resident engine.\n\n{commands}\n\n{start}\n`%%tfold?` tells how to run a cell."


def cell_help() -> str:
    return CELL.format_help()
