"""The small tables of `%tfold`."""

from __future__ import annotations

import pytest
from sample_runs import HOSTILE, full

from tfmagic import protocol
from tfmagic.models import models
from tfmagic.views import tables


def test_runs_in_columns_and_escaped():
    run = full()
    run.prompt = "first line\nsecond line " + HOSTILE * 3
    table = tables.runs([run])
    assert str(table).splitlines()[0].split() == [
        "id", "when", "status", "chat", "streams", "ttft", "total", "cached", "prompt"
    ]
    assert len(str(table).splitlines()) == 2 and "kites, turn 3" in str(table) and "14.2 ms" in str(table)
    html = table._repr_mimebundle_()["text/html"]
    assert "<script" not in html and html.count("<tr>") == 2 and html.count("<td ") == 9
    assert table[0] is run


@pytest.mark.parametrize(("held", "said"), [(9000, ""), (8999, "what they share is there once")])
def test_what_states_share_is_said(held, said):
    states = [protocol.KeptState("ram", rows, 3000 * rows, "a chat", 1e9) for rows in (1, 2)]
    table = tables.cache(protocol.Holdings(0, [protocol.Shelf("ram", 2, held, 1 << 30)], states))
    assert ("share" in str(table)) == bool(said) and said in str(table)


def test_empty_tables_say_so():
    bundle = tables.runs([])._repr_mimebundle_()
    assert bundle == {
        "text/html": "<p>The engine keeps no run yet.</p>", "text/plain": "The engine keeps no run yet."
    }
    assert "%tfold start" in str(tables.status(None))


def test_models_have_a_family_and_a_size():
    found = models()
    assert found[0].name == "embedded" and found[0].family == "qwen3_5" and found[0].size > 10**6
    assert "MiB" in str(tables.models(found))
