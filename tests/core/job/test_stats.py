from __future__ import annotations

import pytest

from flowspec.core.job.stats import Tally, repeated_4grams
from flowspec.core.protocol.messages import Meter


def test_repeated_4grams() -> None:
    assert repeated_4grams([1, 2, 3]) == 0
    assert repeated_4grams(range(20)) == 0  # type: ignore[arg-type]
    assert repeated_4grams([7] * 13) == pytest.approx(0.9)


def test_stats_of_a_finished_job() -> None:
    tally = Tally(
        submitted_at=10.0,
        first_token_at=11.0,
        last_token_at=15.0,
        rounds=2,
        segments=9,
        choices=8,
        hits=6,
    )
    meters = {
        1: Meter(useful=8, wasted=4, void=2, passes=8, busy_seconds=2.0),
        2: Meter(useful=8, wasted=3, void=3, passes=4, busy_seconds=2.0),
    }
    stats = tally.stats(list(range(9)), meters, stages=2)
    assert stats["ttft_seconds"] == 1.0
    assert stats["decode_seconds"] == 4.0
    assert stats["tokens_per_second"] == 2.0
    assert stats["steps"] == 8.0, "a step is a mean pass of the slowest stage: 0.5 s"
    assert stats["tokens_per_step"] == 1.0
    assert stats["tokens_per_round"] == 4.0
    assert stats["hit_rate"] == 0.75
    assert stats["rows"] == {"useful": 16, "wasted": 7, "void": 5}
    assert stats["stage_busy"] == [0.5, 0.5]


def test_a_missing_stage_leaves_none_not_a_wrong_number() -> None:
    stats = Tally(0.0, 1.0, 2.0).stats(
        [1, 2], {1: Meter(useful=1, passes=1, busy_seconds=0.5)}, stages=2
    )
    assert stats["rows"] == {"useful": None, "wasted": None, "void": None}
    assert stats["stage_busy"] == [0.5, None]


def test_a_job_that_emitted_nothing_divides_by_nothing() -> None:
    stats = Tally(0.0).stats([], {}, stages=1)
    assert stats["tokens_per_second"] is None
    assert stats["ttft_seconds"] is None
