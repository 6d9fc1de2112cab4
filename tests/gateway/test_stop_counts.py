"""Tokens behind a stop string are not counted, in whatever commits they come."""

from __future__ import annotations

from typing import Any

import pytest

from flowspec.core.run.spec import JobSpec
from flowspec.gateway.choices import _Choice


@pytest.mark.parametrize("together", [1, 2, 10])
def test_a_token_counts_by_where_its_text_begins_once_the_stop_is_known(together: int) -> None:
    """Text of single bytes is settled later than its tokens come."""
    runner: Any = None
    choice = _Choice(runner, 0, JobSpec("a"), ["\u00e9"])
    sizes = [0, 1] * 4 + [1, 1]  # a character of two bytes, four times, and two letters
    settled = [""] * 8 + ["\u00e9" * 4 + "x", "x"]
    for at in range(0, len(sizes), together):
        choice._stops.push("".join(settled[at : at + together]))
        choice._note_starts(sizes[at : at + together])
        if choice._stops.end is not None:
            break
    assert choice._count() == 2
