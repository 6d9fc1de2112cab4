"""Which runs have ended, against a list of all reported ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.run import ended
from flowspec.core.run.ended import REMEMBERED_JOBS, EndedRuns
from flowspec.core.run.key import RunKey

JOBS = ["a", "b", "c", "d", "e"]
KEYS = st.builds(RunKey, st.sampled_from(JOBS), st.integers(0, 5))


@given(st.lists(KEYS))
def test_a_run_is_over_once_it_or_a_later_one_of_its_job_has_ended(over: list[RunKey]) -> None:
    runs = EndedRuns()
    for at, run in enumerate(over):
        runs.add(run)
        for job in JOBS:
            highest = max((one.epoch for one in over[: at + 1] if one.job == job), default=-1)
            for epoch in range(8):
                assert (RunKey(job, epoch) in runs) == (epoch <= highest)


@given(st.lists(KEYS, max_size=30))
def test_the_job_that_ended_longest_ago_is_forgotten(over: list[RunKey]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ended, "REMEMBERED_JOBS", 3)
        runs = EndedRuns()
        remembered: dict[str, int] = {}  # highest epoch by job; the job that ended last comes last
        for run in over:
            runs.add(run)
            remembered[run.job] = max(run.epoch, remembered.pop(run.job, -1))
            if len(remembered) > 3:
                del remembered[next(iter(remembered))]
            for job in JOBS:
                for epoch in range(8):
                    assert (RunKey(job, epoch) in runs) == (epoch <= remembered.get(job, -1))


def test_what_is_remembered_is_bounded() -> None:
    runs = EndedRuns()
    for number in range(REMEMBERED_JOBS + 10):
        runs.add(RunKey(f"{number}-0", 1))
        runs.add(RunKey("again-0", number))
    kept = [number for number in range(REMEMBERED_JOBS + 10) if RunKey(f"{number}-0", 1) in runs]
    assert kept == list(range(11, REMEMBERED_JOBS + 10)), "all but one place, the newest of them"
    assert RunKey("again-0", 7) in runs, "a job that ends again is as new as any"
