"""Conversations: every one round-trips, every wrong one gets one line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.run.turns import (
    MAX_TURNS,
    MAX_TURNS_BYTES,
    ROLES,
    Turn,
    read_turns,
    turns_of,
    turns_text,
)
from flowspec.errors import JobError

TURNS = st.lists(
    st.builds(Turn, st.sampled_from(ROLES), st.text(st.characters(exclude_categories=["Cs"]))),
    min_size=1,
    max_size=6,
).filter(lambda turns: any(turn.content.strip() for turn in turns))


@given(TURNS)
def test_turns_round_trip(turns: list[Turn]) -> None:
    assert read_turns(turns_text(turns)) == tuple(turns)
    as_mappings = [{"role": turn.role, "content": turn.content} for turn in turns]
    assert turns_of(as_mappings) == tuple(turns)
    assert turns_of(turns) == tuple(turns)


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("hello", "messages is a list like"),
        ({"role": "user", "content": "a"}, "messages is a list like"),
        (5, "messages is a list like"),
        ([5], "messages is a list like"),
        ([{"role": "user"}], "messages is a list like"),
        ([{"role": "user", "content": None}], "contents are text"),
        ([{"role": ["user"], "content": "a"}], "roles are system, user, assistant"),
        ([{"role": "tool", "content": "a"}], "roles are system, user, assistant"),
        ([USER | {"name": "b"}], "messages is a list like"),
        ([], "messages is empty"),
        ([{"role": "user", "content": " \n"}], "messages say nothing"),
        ([USER] * (MAX_TURNS + 1), f"at most {MAX_TURNS} are accepted"),
        ([{"role": "user", "content": "ä" * (MAX_TURNS_BYTES // 2 + 1)}], "longer than"),
        ([{"role": "user", "content": "half \ud800"}], "not valid Unicode"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line(value: Any, says: str) -> None:
    with pytest.raises(JobError) as refused:
        turns_of(value)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "{}", "[1", "[" * 100_000, '[{"role": "user"}]', "null"])
def test_a_field_that_is_no_conversation_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="messages is a list like"):
        read_turns(text)
