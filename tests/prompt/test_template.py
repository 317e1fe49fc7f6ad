"""The template sandbox: what real templates use works, and what runs away or breaks out is refused."""

from __future__ import annotations

import time

import pytest

from tfmagic.engine.prompt.template import MAX_OUTPUT, ChatTemplate
from tfmagic.errors import Refusal

HELLO = [{"role": "user", "content": "Hello"}]


def render(source, messages=HELLO, **specials):
    return ChatTemplate(source, specials).render(messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",
         "Hello\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "013"),
        ("{% for i in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ '' if loop.last else ',' }}{% endfor %}",
         "1/3,2/3,3/3"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}", "Hello"),
        ("{% for m in messages[::-1] %}{{ loop.first }}{{ loop.nextitem is defined }}{% endfor %}", "TrueFalse"),
        ("{{ {'é': '<b>'} | tojson }}", '{"é": "<b>"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hello"),
        ("{{ bos_token }}{{ tools is none }}{{ add_generation_prompt }}", "<s>TrueTrue"),
        ("{% macro f(x) %}{% for i in range(2) %}{{ x }}{% endfor %}{% endmacro %}{{ f('a') }}", "aa"),
        ("{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i * 2 %}{% endfor %}{{ ns.n }}",
         "20"),
        ("{{ '-' * 3 }}{{ 2 ** 10 }}", "---1024"),
        ("", ""),
    ],
)  # fmt: skip
def test_what_templates_use(source, text):
    assert render(source, bos_token="<s>") == text


def test_the_date():
    before = time.strftime("%Y")
    assert render("{{ strftime_now('%Y') }}") in (before, time.strftime("%Y"))


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must alternate"),
        ("{{ messages[5].content.x }}", "undefined|has no"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages + 3 }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ strftime_now.__globals__ }}{{ strftime_now.__globals__['json'] }}", "refuses"),
        ("{% include 'x' %}", "refuses"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "loop steps"),
        ("{% macro f() %}{% for i in range(90000) %}{% endfor %}{% endmacro %}"
         "{% for i in range(90000) %}{{ f() }}{% endfor %}", "loop steps"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses"),
        ("{{ 'a' * 10 ** 12 }}", "repetition without end"),
        ("{{ 10 ** 12 * 'a' }}", "repetition without end"),
        ("{{ [0] * 10 ** 12 }}", "repetition without end"),
        ("{{ 9 ** 999999999 }}", "a power over 64"),
        ("{% for i in range(100) %}{{ 'x' * 1000000 }}{% endfor %}", "more than 8,388,608 characters"),
    ],
)  # fmt: skip
def test_what_they_may_not(source, match):
    started = time.process_time()  # of the processor, so that a busy machine does not matter
    with pytest.raises(Refusal, match=match):
        render(source)
    assert time.process_time() - started < 30


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x ", "{% endfor %}", "{% unknown %}", "{{ x | nofilter }}", "{{ 1 + }}"]
)
def test_malformed(source):
    with pytest.raises(Refusal, match="malformed") as refusal:
        ChatTemplate(source, {})
    assert "\n" not in refusal.value.problem


def test_a_template_of_many_megabytes():
    with pytest.raises(Refusal, match="characters"):
        ChatTemplate("x" * (MAX_OUTPUT + 1), {})


def test_the_conversation_is_not_changed():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    render("{% set x = messages[0].content[0] %}{{ x.text }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
