from __future__ import annotations

import pytest

from flowspec.core.protocol.messages import Meter
from flowspec.core.session.stats import Tally, repeated_4grams, unmeasured


def test_repeated_4grams() -> None:
    assert repeated_4grams([1, 2, 3]) == 0
    assert repeated_4grams(range(20)) == 0  # type: ignore[arg-type]
    assert repeated_4grams([7] * 13) == pytest.approx(0.9)


def test_stats_of_a_finished_job() -> None:
    tally = Tally(
        submitted_at=10.0,
        started_at=10.6,
        queued_seconds=0.4,
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
    assert stats["ttft_seconds"] == 1.0, "from submission"
    assert stats["queue_seconds"] == 0.4
    assert stats["decode_seconds"] == 4.0
    assert stats["tokens_per_second"] == 2.0
    assert stats["steps"] == 8.0, "a step is a mean pass of the slowest stage: 0.5 s"
    assert stats["tokens_per_step"] == 1.0
    assert stats["tokens_per_round"] == 4.0
    assert stats["hit_rate"] == 0.75
    assert stats["rows"] == {"useful": 16, "wasted": 7, "void": 5}
    assert stats["stage_busy"] == [0.5, 0.5]


def test_the_speed_of_a_resumed_job_is_that_of_all_its_runs_with_the_pauses() -> None:
    tally = Tally(10.0, 20.0, first_token_at=21.0, last_token_at=23.0, rounds=2)
    tally.resumed, tally.resumed_first_seconds = 10, 1.0
    stats = tally.stats(list(range(15)), {1: Meter(passes=4, busy_seconds=2.0)}, stages=1)
    assert stats["ttft_seconds"] == 1.0
    assert stats["decode_seconds"] == 12.0
    assert stats["tokens_per_second"] == 14 / 12
    assert stats["steps"] == 4.0, "of the last run"
    assert stats["tokens_per_step"] == 1.0
    tally.last_token_at = tally.first_token_at = None
    assert tally.stats(list(range(10)), {}, stages=1)["tokens_per_second"] is None


def test_a_missing_stage_leaves_none_not_a_wrong_number() -> None:
    tally = Tally(0.0, 0.0, first_token_at=1.0, last_token_at=2.0)
    stats = tally.stats([1, 2], {1: Meter(useful=1, passes=1, busy_seconds=0.5)}, stages=2)
    assert stats["rows"] == {"useful": None, "wasted": None, "void": None}
    assert stats["stage_busy"] == [0.5, None]


def test_a_job_that_emitted_nothing_divides_by_nothing() -> None:
    stats = Tally(0.0, 0.0).stats([], {}, stages=1)
    assert stats["tokens_per_second"] is None
    assert stats["ttft_seconds"] is None


def test_a_job_ended_from_outside_has_the_same_fields_and_what_its_output_tells() -> None:
    output = [7] * 13
    stats = unmeasured(output, stages=2)
    assert list(stats) == list(Tally(0.0, 0.0).stats(output, {}, stages=2))
    told = {name: value for name, value in stats.items() if value is not None}
    assert told.pop("tokens") == 13
    assert told.pop("repeated_4grams") == pytest.approx(0.9)
    assert told.pop("rows") == {"useful": None, "wasted": None, "void": None}
    assert told == {"stage_busy": [None, None], "stage_passes": [None, None]}


def test_the_first_verdict_is_prefills_and_counts_as_no_choice() -> None:
    tally = Tally(5.0, 5.0)
    assert tally.decode_seconds == 0.0
    tally.count(1, 0, 6.0)
    assert (tally.first_token_at, tally.choices, tally.hits) == (6.0, 0, 0)
    tally.count(3, 2, 8.0)
    assert (tally.first_token_at, tally.choices, tally.hits) == (6.0, 3, 2)
    assert tally.decode_seconds == 2.0
