"""The program that measures what a kill costs sees the pause, and the same text behind it."""

from __future__ import annotations

import pytest

from flowspec.cluster import Setup
from flowspec.model.weights.directory import default_pair
from ops.bench.recovery import STAGES, UNDISTURBED, pauses, row, starts

SETUP = Setup(*default_pair(), STAGES)


def test_a_row_has_quantiles() -> None:
    assert row("draft", [1.0] * 19 + [3.0]) == "| draft | 20 | 1.00 | 1.10 | 3.00 |"


@pytest.mark.heavy
@pytest.mark.live
@pytest.mark.parametrize("spare", [False, True])
def test_a_killed_stage_is_a_pause_in_a_text(spare: bool) -> None:
    (undisturbed,), others = pauses(SETUP, UNDISTURBED, 1, spare=False)
    (pause,), more = pauses(SETUP, "verify-2", 1, spare=spare)
    assert 0 < undisturbed < pause
    assert (others, more) == (0, 0)


@pytest.mark.heavy
@pytest.mark.live
def test_a_start_takes_longer_than_nothing() -> None:
    assert min(starts(SETUP, 1, 1)) > 0
