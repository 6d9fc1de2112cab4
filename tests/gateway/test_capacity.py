"""Answers under way are counted; too many get 429 and a time to try again."""

from __future__ import annotations

import pytest

from flowspec.gateway.capacity import LATEST, SOONEST, Capacity
from flowspec.gateway.errors import ApiError


def test_places_are_given_back() -> None:
    capacity = Capacity(3)
    with capacity.taken(2):
        with pytest.raises(ApiError) as refused, capacity.taken(2):
            raise AssertionError("there is no room")
        assert refused.value.status == 429
        assert refused.value.headers["Retry-After"] == str(SOONEST)
        with capacity.taken(1):
            assert capacity.open == 3
    assert capacity.open == 0
    with pytest.raises(ValueError, match="inside"), capacity.taken(1):
        raise ValueError("inside")
    assert capacity.open == 0


def test_more_answers_than_may_ever_be_are_no_matter_of_time() -> None:
    with pytest.raises(ApiError) as refused, Capacity(3).taken(4):
        raise AssertionError("there is no room")
    assert refused.value.status == 400


def test_the_time_to_try_again_is_that_of_recent_answers() -> None:
    capacity = Capacity(1)
    for _ in range(100):
        capacity.note(1000.0)
    assert capacity.retry_seconds == LATEST
    for _ in range(32):
        capacity.note(6.2)
    assert capacity.retry_seconds == 7
