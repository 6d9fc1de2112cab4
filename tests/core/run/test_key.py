from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.run.key import RunKey

JOBS = st.sampled_from(["", "1-0", "1-1", "10-0", "2-0"])
KEYS = st.builds(RunKey, JOBS, st.integers(0, 12))


@given(KEYS, KEYS)
def test_a_run_is_its_job_and_epoch_and_nothing_else(one: RunKey, other: RunKey) -> None:
    same = (one.job, one.epoch) == (other.job, other.epoch)
    assert (one == other) == same
    assert len({one, other}) == (1 if same else 2)
    if same:
        assert hash(one) == hash(other)


@given(KEYS, KEYS)
def test_runs_of_one_job_are_ordered_by_epoch(one: RunKey, other: RunKey) -> None:
    assert (one < other) == ((one.job, one.epoch) < (other.job, other.epoch))
    if one.job == other.job:
        assert (one < other) == (one.epoch < other.epoch)


@given(st.lists(KEYS))
def test_sorting_puts_each_jobs_runs_side_by_side(keys: list[RunKey]) -> None:
    assert sorted(keys) == sorted(keys, key=lambda key: (key.job, key.epoch))


def test_a_key_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RunKey("1-0", 1).epoch = 2  # type: ignore[misc]
