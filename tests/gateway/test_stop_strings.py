"""Stop strings: the text is cut at the first, however it comes in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.gateway.stop_strings import StopFilter

TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Where the first stop string begins and ends, by trying every end."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins), end
    return None


def in_pieces(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=10))
def test_the_text_is_cut_at_the_first_stop_string_however_it_comes(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stop_filter = StopFilter(stops)
    passed = []
    arrived = ""
    for piece in in_pieces(text, cuts):
        arrived += piece
        passed.append(stop_filter.push(piece))
        found = first_stop(arrived, stops)
        assert stop_filter.end == (None if found is None else found[1])
        assert arrived.startswith("".join(passed))
    passed.append(stop_filter.finish())
    found = first_stop(text, stops)
    assert "".join(passed) == (text if found is None else text[: found[0]])


@given(TEXT, STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    passed = "".join(stop_filter.push(character) for character in text)
    if stop_filter.end is None:
        held = text[len(passed) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "text", "passed", "end"),
    [
        ([], "anything", "anything", None),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", 9),
        (["c", "bcd"], "abcd", "ab", 3),
        (["c", "abc"], "xabc", "x", 4),
        (["END"], "EN", "EN", None),
    ],
)
def test_examples(stops: list[str], text: str, passed: str, end: int | None) -> None:
    stop_filter = StopFilter(stops)
    assert stop_filter.push(text) + stop_filter.finish() == passed
    assert stop_filter.end == end
    assert stop_filter.push("more") == ("" if end else "more")
