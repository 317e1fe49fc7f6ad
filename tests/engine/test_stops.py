from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfmagic.engine.stream import StopText


def shown(stops, pieces):
    """(text, the piece at which it stopped or None, text still held)."""
    text, stop = "", StopText(stops)
    for i, piece in enumerate(pieces):
        out, hit = stop.push(piece)
        text += out
        if hit:
            return text, i, stop.held
    return text, None, stop.held


@pytest.mark.parametrize(
    "stops, pieces, expected",
    [
        (["END"], ["a END b"], ("a ", 0, "")),
        (["END"], ["aE", "N", "D b"], ("a", 2, "")),
        (["END"], ["aE", "N", "Xb"], ("aENXb", None, "")),
        (["END"], ["EEN", "D"], ("E", 1, "")),
        (["END"], ["abE"], ("ab", None, "E")),
        (["aab"], ["aa", "ab"], ("a", 1, "")),
        (["lo w", "wor"], ["hel", "lo ", "world"], ("hel", 2, "")),
        (["b c d", "c"], ["a b ", "c d"], ("a b ", 1, "")),
        (["x", "yx"], ["ay", "x"], ("a", 1, "")),
        ([], ["a", "b"], ("ab", None, "")),
        (["b"], ["a", "", "b"], ("a", 2, "")),
    ],
)
def test_text_is_cut_before_the_first_stop_however_pieces_fall(stops, pieces, expected):
    assert shown(stops, pieces) == expected


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 4095),
)
def test_any_cutting_shows_what_one_piece_shows(text, stops, cuts):
    pieces, start = [], 0
    for i in range(1, len(text) + 1):
        if cuts >> i & 1 or i == len(text):
            pieces.append(text[start:i])
            start = i
    out, stopped, held = shown(stops, pieces)
    whole, hit, rest = shown(stops, [text])
    assert (out, held, stopped is None) == (whole, rest, hit is None)
    assert not any(stop in out for stop in stops) and text.startswith(out + held)
