"""A checkpoint's chat template, rendered in a sandbox under limits that do not depend on the clock.

The environment follows transformers' (`utils/chat_template_utils.py`): trimmed blocks, loop controls, generation
blocks, `raise_exception`, `strftime_now`, and a `tojson` that leaves non-ASCII text alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from tfmagic.errors import Refusal

MAX_SOURCE = 1024 * 1024
"""Characters of a template; real ones take up to about 30,000."""
MAX_STEPS = 1_000_000
"""Loop iterations a rendering, all loops together."""
MAX_OUTPUT = 8 * 1024 * 1024
"""Characters a rendering, and the longest string or list that `*` may make."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja without access to anything but the conversation, in which every loop's iterations are counted."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context, operator, left, right):
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise SecurityError("a power over 64")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if hasattr(one, "__len__") and isinstance(other, int) and len(one) * other > MAX_OUTPUT:
                    raise SecurityError("a repetition without end")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source, name, filename):
        """The syntax tree, with `for x in y` turned into `for x in __counted__(y)`."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            counted = nodes.Name("__counted__", "load", lineno=loop.lineno)
            loop.iter = nodes.Call(counted, [loop.iter], [], None, None, lineno=loop.lineno)
        return tree.set_environment(self)


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


class ChatTemplate:
    """`source` with the checkpoint's named special tokens (`bos_token` and the like). Raises Refusal if malformed."""

    def __init__(self, source: str, specials: Mapping[str, str]):
        if len(source) > MAX_SOURCE:
            raise Refusal(f"The chat template has {len(source):,} characters.", f"At most {MAX_SOURCE:,} are read.")
        env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
        env.filters["tojson"] = to_json
        env.globals["raise_exception"] = refuse
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source, self._specials = source, dict(specials)
        try:
            self._template = env.from_string(source)
        except TemplateSyntaxError as error:
            problem = f"The model's chat template is malformed at line {error.lineno}: {error.message}"
            raise Refusal(problem, "Download the model again, or mend its chat_template.jinja.") from None
        except (TemplateError, RecursionError, ValueError, SyntaxError) as error:
            raise Refusal(f"The model's chat template is malformed: {error}", "Download the model again.") from None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The conversation as text, ready for the reply. Raises Refusal when the template refuses or runs away."""
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=True, tools=None, __counted__=counter(), **self._specials
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_OUTPUT:
                    raise SecurityError(f"more than {MAX_OUTPUT:,} characters")
        except Exception as error:  # whatever the template's own expressions raise
            problem = f"The model's chat template refuses this conversation: {str(error) or type(error).__name__}"
            raise Refusal(problem, "Change the conversation, or mend the model's chat_template.jinja.") from None
        return "".join(pieces)


def counter():
    """A pass-through for iterables that counts, over all of them, up to MAX_STEPS."""
    steps = 0

    def counted(items: Iterable) -> Iterator:
        nonlocal steps
        for item in items:
            steps += 1
            if steps > MAX_STEPS:
                raise SecurityError(f"more than {MAX_STEPS:,} loop steps")
            yield item

    return counted


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str):
    raise TemplateError(message)
