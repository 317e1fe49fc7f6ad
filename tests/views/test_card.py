"""The static card: what a saved notebook keeps of a run."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from sample_runs import HOSTILE, empty, full, hostile

from tfmagic.run import Node, Round, Token
from tfmagic.views import card, tokens

# JupyterLab's sanitizer keeps these (packages/apputils/src/sanitizer.ts); the card uses no others.
TAGS = {"div", "span", "strong", "em", "u", "pre", "details", "summary", "table", "tr", "th", "td"}
STYLES = {
    "align-items", "background", "border", "border-radius", "border-top", "display", "flex", "flex-wrap", "font-size",
    "height", "line-height", "margin", "max-width", "opacity", "overflow", "padding", "text-align", "vertical-align",
    "white-space", "width", "border-bottom", "text-decoration", "color", "box-sizing", "word-break",
    "overflow-wrap",
}
HARMLESS_LOSSES = {"font-variant-numeric", "text-decoration-color"}
"""Properties that the sanitizer drops and the card does not need."""


class Parsed(HTMLParser):
    """Tags, attributes, and text; raises on a tag that is not closed."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = self.pre = self.drafted = self.tree = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "pre" in self.open and "details" in self.open:
            self.tree += data
        elif "pre" in self.open and "em" not in self.open:
            self.pre += data
            self.drafted += data if "u" in self.open else ""


def test_the_reply_is_whole_and_drafted_tokens_are_marked():
    run = full(1, 9)
    parsed = Parsed(card.render(run))
    assert parsed.pre == run.text == "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9"
    assert parsed.drafted == "".join(token.piece for token in run.streams[0].tokens if token.made == "draft")


def test_copied_tokens_look_different_from_drafted_ones():
    run = full(1, 10)  # its rounds: copy, copy, block (none accepted), copy
    assert tokens.COPIED in card.render(run) and tokens.DRAFTED not in card.render(run)
    run.streams[0].rounds[0].draft_source = "tree"
    html = card.render(run)
    assert f'<u style="{tokens.DRAFTED}"> w1 w2</u> w3<u style="{tokens.COPIED}"> w4</u> w5' in html
    assert "accepted drafts: drafted, copied; the others" in Parsed(html).text
    for stream in run.streams:
        stream.rounds = []
    assert "accepted drafts" not in card.render(run)


def test_the_numbers_are_words():
    text = " ".join(Parsed(card.render(full())).text.replace("\xa0", " ").split())
    for words in (
        "● done tiny · cpu · chat “kites”, turn 3 · 2 streams · 1.8 s", "14.2 ms", "0 calls",
        "■ restore 2.4", "4,160 of 4,203 rows", "from RAM, 43 computed", "2 images: 2 kept, 0 encoded",
        "by position ▆▅▁ 75 50 0", "42 % 2.25 tokens a round",
        "8 rounds, 2 block (0 % accepted), 6 copy (56 %)",
        "×1.69 faster (expected ×2.3) · 22 rows cut", "a round draft 0.5 · verify 7.0 · commit 0.5 ms",
        "Stream 1, round 1 of 4: copy · 3 rows drafted, 2 accepted, 2 cut · expected 3.1 tokens, gave 3 · draft 0.5 ms",
        "every round: %tfold show abc12345 --live",
        "picture 2 b.png 32×32: 1,000 rows, kept", "seed 8", '{"max_tokens": 64, "temperature": 0.0}',
        full().stats["token_sha"], "Stream 2",
    ):
        assert words in text, words


def test_it_is_readable_without_any_style():
    parsed = Parsed(re.sub(r' style="[^"]*"', "", card.render(full(1))))
    assert parsed.pre == full(1).text
    assert parsed.drafted == Parsed(card.render(full(1))).drafted != ""


@pytest.mark.parametrize("run", [full(), full(1, 400), empty(), empty("failed"), hostile(2, 50)], ids=str)
def test_it_uses_what_a_sanitizer_keeps(run):
    parsed = Parsed(card.render(run))
    assert set(parsed.tags) <= TAGS
    assert {name for name, _ in parsed.attributes} <= {"style", "title"}
    for style in (value for name, value in parsed.attributes if name == "style"):
        assert "url" not in style and "rgb(" not in style
        properties = {declaration.split(":")[0] for declaration in style.split(";")}
        assert properties <= STYLES | HARMLESS_LOSSES, properties - STYLES


def test_hostile_text_stays_text():
    run = hostile(1, 3)
    html = card.render(run)
    assert "<script" not in html and "<img" not in html and "<!--" not in html
    assert HOSTILE in Parsed(html).pre.replace("\ufffd", "\x00")


@pytest.mark.parametrize("streams", [1, 3, 16])
@pytest.mark.parametrize("make", [full, hostile])
def test_it_is_bounded_and_counts_what_it_leaves_out(make, streams):
    run = make(streams, 4096)
    html = card.render(run)
    assert len(html.encode()) <= card.LIMIT
    parsed = Parsed(html)
    left_out = [int(n.replace(",", "")) for n in re.findall(r"… ([\d,]+) more tokens? not shown", parsed.text)]
    assert len(left_out) == streams and all(0 < n <= len(run.streams[0].tokens) for n in left_out)
    if make is full:
        shown = len(re.findall(r"w\d+", parsed.pre))
        assert shown + sum(left_out) == sum(len(stream.tokens) for stream in run.streams)
        assert len(html.encode()) > 0.9 * card.LIMIT


def test_short_streams_leave_their_room_to_long_ones():
    run = full(2, 700)
    alone = len(Parsed(card.render(run)).pre)
    run.streams[0].tokens = run.streams[0].tokens[:5]
    parsed = Parsed(card.render(run))
    assert parsed.pre.startswith(run.streams[0].text)
    assert len(parsed.pre) > 0.9 * alone


def test_what_was_not_measured_is_a_dash():
    parsed = Parsed(card.render(empty()))
    assert re.search(r"Time to first token– Prompt from cache– Vision tower– Drafts accepted– ", parsed.text)
    assert "Prompt, row by row" not in parsed.text


def test_the_strip_cuts_at_the_cache_and_at_the_pictures():
    run = full()
    assert list(card._segments(run)) == [
        (0, 380, None), (380, 1380, 0), (1380, 1500, None), (1500, 2500, 1), (2500, 4160, None), (4160, 4203, None)
    ]
    run.cached_tokens = 1000
    assert (380, 1000, 0) in list(card._segments(run)) and (1000, 1380, 0) in list(card._segments(run))
    titles = [value for name, value in Parsed(card.render(run)).attributes if name == "title"]
    assert "rows 0–379 from cache" in titles and "rows 1,000–1,379 computed, picture 1" in titles


def test_likely_tokens_are_in_the_tooltip():
    run = full(1, 3)
    for token in run.streams[0].tokens:
        token.logprob, token.top = -0.105, [(1, " w1", -0.1), (2, " v", -2.4)]
    titles = [value for name, value in Parsed(card.render(run)).attributes if name == "title"]
    assert titles.count("log p -0.10; likeliest ' w1' -0.10, ' v' -2.40") + titles.count(
        "log p -0.11; likeliest ' w1' -0.10, ' v' -2.40"
    ) == len(run.streams[0].tokens)


def test_a_run_of_many_positions_is_bounded():
    run = full(1)
    run.streams[0].rounds = [Round(20.0, 10, "copy", [Node("x", k, 1.0, True) for k in range(64)])]
    assert len(re.findall("100 %", card.render(run))) <= card.POSITIONS + 3


def test_one_round_is_drawn_as_a_tree():
    run = full(1)
    assert Parsed(card.render(run)).tree == "w0 ─ ● w1 90 ─ ● w2 70 ┬ ○ not 50\n" + " " * 23 + "└ ▸ w3"
    tree = [Node(" red", 0, 0.9, True), Node("\n", 0, 0.1), Node(" <b>", 1, 0.5, True), Node(" or", 1, None),
            Node(" so", 3, 0.25), Node(" ", 2, 0.05)]  # fmt: skip
    run.streams[0].rounds[1] = Round(30.0, 2, "tree", tree)
    run.streams[0].tokens[4:6] = [Token(1, " red", "draft"), Token(2, " ok", "draft")]
    parsed = Parsed(card.render(run))
    assert parsed.tree.splitlines() == [
        "w3 ┬ ● red 90 ┬ ● <b> 50 ─ ○ so 25",
        "   │          └ ○ or",
        "   └ ○ ↵ 10 ─ ○ ␣ 5",
    ], "a tree is shown rather than a deeper copy, and no draw of its own where the round ended before it"
    assert "Round 2 of 4: tree · 6 rows drafted, 2 accepted · expected – tokens, gave 2" in parsed.text


def test_a_run_without_drafts_has_no_tree_and_no_speedup():
    run = full(1)
    run.streams[0].rounds = [Round(20.0, draft_ms=0.0, verify_ms=5.0, commit_ms=0.0, serial_ms=5.0, planned_ms=5.0)]
    text = Parsed(card.render(run)).text
    assert "faster" not in text and "Round 1 of" not in text and "speedup" not in text


def test_a_listed_run_without_its_tokens_renders():
    run = full(1)
    run.streams[0].tokens = []
    assert "4 rounds" in Parsed(card.render(run)).text


def test_a_speedup_that_was_not_timed_is_a_dash():
    run = full(1)
    for verified in run.streams[0].rounds:
        verified.verify_ms = None
    text = Parsed(card.render(run)).text
    assert "– speed-up (expected ×2.3)" in text and "draft 0.5 · verify – · commit 0.5 ms" in text
    for verified in run.streams[0].rounds:
        verified.draft_ms = verified.commit_ms = verified.planned_ms = None
    assert "– speed-up (expected –)" in Parsed(card.render(run)).text


def test_a_run_stopped_in_its_prompt_shows_how_far_it_came():
    run = full(1)
    run.status, run.cached_tokens, run.cache_source, run.prefilled, run.pictures = "stopped", 64, "ram", 2064, []
    html = card.render(run)
    assert "2,000 computed" in html and "rows 64–2,063 computed" in html and "rows 2,064–4,202 not reached" in html
    assert "from RAM, 2,000 computed" in html
