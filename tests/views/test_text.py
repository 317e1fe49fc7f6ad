"""The plain text of a run."""

from __future__ import annotations

import re

import pytest
from sample_runs import empty, full, hostile

from tfmagic.protocol import State
from tfmagic.run import DRAFTING, STATS, TTFT_PARTS, Node, Round, Stream, Token
from tfmagic.views import text, words

GOLDEN = """\
w0 w1 w2 w3 w4 w5 w6 w7 w8 w9

done · tiny · cpu · chat “kites”, turn 3 · 1.8 s
10 tokens · 225 tokens/s · 4 rounds · seed 7 · stop
ttft              14.2 ms         queue 0.5 · prepare 1.9 · restore 2.4 · tower 0.0 · prefill 7.4 · first 2.0
cached_tokens     4,160 of 4,203  from RAM, 43 computed
tower_calls       0               2 images: 2 kept, 0 encoded
acceptance        42 %            5 of 12 drafted · by position ▆▅▁ 75 50 0
tokens_per_round  2.25            4 rounds, 1 block (0 % accepted), 3 copy (56 %)
speedup           ×1.69           expected ×2.3 · a round draft 0.5 · verify 7.0 · commit 0.5 ms · 11 rows cut
token_sha         """


def test_a_finished_run():
    run = full(1, 10)
    assert text.render(run) == GOLDEN + run.stats["token_sha"] + "    run abc12345"
    assert str(run) == text.render(run)


def test_several_streams_stand_under_headings():
    lines = text.render(full(2)).splitlines()
    assert [line for line in lines if line.startswith("──")] == [
        "── stream 1 · 10 tokens · 225 tokens/s · 4 rounds · seed 7 · stop",
        "── stream 2 · 10 tokens · 225 tokens/s · 4 rounds · seed 8 · stop",
    ]


def test_what_was_not_measured_is_a_dash_and_never_a_zero():
    shown = text.render(empty())
    assert "0 tokens · – tokens/s" in shown
    for name in ("ttft", "cached_tokens", "tower_calls", "acceptance", "tokens_per_round", "token_sha"):
        assert re.search(rf"^{name} +–( +run empty123)?$", shown, re.M), name


def test_every_name_is_defined():
    assert {fact.name for fact in words.facts(full())} <= {*STATS, *DRAFTING}
    assert all(fact.definition for fact in words.facts(full()))


def test_errors_and_notes_are_shown():
    run = full(1)
    run.status, run.error, run.note = "failed", "It broke.\nMend it.", "the kept state could not be restored"
    lines = text.render(run).splitlines()
    assert lines[2:5] == ["It broke.", "Mend it.", "failed · tiny · cpu · chat “kites”, turn 3 · 1.8 s"]
    assert lines[-1] == run.note


def test_a_partial_hit_says_what_was_settled_and_where_it_parts():
    run = full(1)
    run.settled, run.miss = 128, "parts from chat “kites”, turn 2 at row 4,170 after “and the”: “cat” here, “dog” there"
    line = next(line for line in text.render(run).splitlines() if line.startswith("cached_tokens"))
    assert line.endswith(f"from RAM, 128 of them settled while idle, 43 computed · {run.miss}")


def test_the_prompt_cache_in_words():
    counts = {"hits": 1, "misses": 3, "kept": 9, "evicted": 4, "extended": 3, "refused": 0, "failed": 1}
    state = State(0, 1, "ready", "ready", 1, "tiny", "cpu", 0.0, cache_states=5, cache_bytes=5 << 20,
                  cache_budget=8 << 20, cache_counts=counts, settling=2, cache_note="less than asked")  # fmt: skip
    assert words.cache(state) == (
        "5 states, 5.0 MiB of 8.0 MiB (1.0 MiB each) · 1 hit, 3 missed, 4 evicted (3 of them extended), 1 failed"
        " · 2 to settle while idle · less than asked"
    )
    assert words.cache(State(0, 1, "ready", "ready", 1, "tiny", "cpu", 0.0)) == "0 states, 0 B of 0 B"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0.0, "0.0 ms"), (14.24, "14.2 ms"), (99.96, "100 ms"), (221.4, "221 ms"), (999.6, "1.0 s"),
     (59_949, "59.9 s"), (125_000, "2 min 5 s")],
)
def test_times(value, shown):
    assert words.ms(value) == shown


def test_speedups():
    assert [words.times(x) for x in (None, 0.968, 1.0, 1.994, 1.996, 12.34)] == [
        "–", "×0.97", "×1.00", "×1.99", "×2.0", "×12.3"
    ]  # fmt: skip


def test_a_tree_is_bounded_whatever_its_tokens():
    run = hostile(1, 30)
    lines = words.tree(run.streams[0], 0)
    assert 1 < len(lines) <= 16 and max(map(len, lines)) < 150
    assert not any("\n" in line for line in lines)


def test_sizes_shares_and_plurals():
    assert [words.size(n) for n in (0, 512, 4096, 3 << 20, 5 << 40)] == [
        "0 B", "512 B", "4.0 KiB", "3.0 MiB", "5120.0 GiB"
    ]
    assert words.spark([0, 0.5, 1]) == "▁▅█" and words.percent(0.714) == "71 %" and words.percent(None) == "–"
    assert words.plural(1, "token") == "1 token" and words.plural(1200, "token") == "1,200 tokens"


class Playing:
    """A handle whose run gains one step a look."""

    def __init__(self, run, *steps):
        self.record, self.steps = run, list(steps)

    def wait(self, timeout):
        if not self.steps:
            return True
        self.steps.pop(0)(self.record)
        return not self.steps


def say(stream: int, piece: str):
    return lambda run: run.streams[stream].tokens.append(Token(1, piece))


def end(stream: int, tail: str = ""):
    def step(run):
        run.streams[stream].tokens[-1].piece += tail
        run.streams[stream].finish_reason = "stop"

    return step


def done(run):
    run.status = "done"


def test_a_terminal_streams_each_piece_once_with_its_late_tail(capsys):
    run = empty()
    text.watch(Playing(run, say(0, "Hello"), say(0, ", wor"), say(0, "ld"), end(0, "\ufffd"), done))
    out = capsys.readouterr().out
    assert out.startswith("Hello, world\ufffd\n\ndone\n3 tokens")
    assert out.count("Hello") == 1


def test_a_terminal_shows_streams_in_order(capsys):
    run = empty()
    run.streams.append(Stream())
    steps = [say(1, "two"), say(0, "one"), end(1), say(0, " more"), end(0), done]
    text.watch(Playing(run, *steps))
    out = capsys.readouterr().out
    assert out.startswith("── stream 1\none more\n── stream 2\ntwo\n\n── stream 1 · 2 tokens")
    assert "\n── stream 2 · 1 token · – tokens/s · 0 rounds · greedy · stop\ndone · 2 streams\n" in out


def test_an_interrupted_terminal_gets_its_last_word_once(capsys):
    def interrupt(run):
        raise KeyboardInterrupt

    handle = Playing(empty(), say(0, "Hel"), interrupt)
    with pytest.raises(KeyboardInterrupt):
        text.watch(handle)
    text.finish(handle)
    text.finish(handle)
    assert capsys.readouterr().out.count("1 token") == 1


def test_progress_in_words():
    run = empty()
    assert text.progress(run) == "queued"
    run.position = 2
    assert text.progress(run) == "queued, 2 before it"
    run.status, run.prefilled, run.prompt_tokens = "prefill", 512, 4203
    assert text.progress(run) == "prefill, 512 of 4,203 rows"
    run.status = "decoding"
    assert text.progress(run) == "decoding, 0 tokens"


def test_a_hostile_run_renders():
    assert "\u202e" in text.render(hostile(1, 8))
    run = full(1)
    run.streams[0].rounds += [Round(500.0, 41, "block", [Node("x", k, 0.5, True) for k in range(40)])]
    assert " …" in text.render(run)


def test_ttft_parts_are_in_order():
    assert [part for part, _ in words.parts(full())] == list(TTFT_PARTS)
