"""Loops of many jobs in simulation: what they count, and that every text is checked."""

from __future__ import annotations

import pytest

from flowspec.core.job.load import best_batch
from flowspec.errors import StateError
from flowspec.rehearse.compare.hits import Kind
from flowspec.rehearse.compare.texts import Text
from flowspec.rehearse.devices.profiles import load
from ops.bench.loops import Loop, jobs_of
from ops.bench.many import GOALS, PROFILES, goals, pipeline_of, plain_rate, random_texts

KINDS = [Kind((0.8, 0.1), 0.5), Kind((0.5, 0.2, 0.1), 0.5)]
PROFILE = load("jetson-7b")


def texts(jobs: int, tokens: int = 12) -> list[Text]:
    return random_texts([9, 30], tokens, jobs)


def test_a_closed_loop_keeps_its_number_of_jobs_and_repeats_itself() -> None:
    found = [
        Loop(pipeline_of(PROFILE, texts(jobs_of(3)), KINDS), "auto").closed(3) for _ in range(2)
    ]
    assert found[0] == found[1]
    assert found[0].tokens_per_second > plain_rate(PROFILE, 3)
    assert 0 < found[0].tbt <= found[0].tbt_p99
    assert 0.5 < found[0].hit_rate <= 1


def test_arrivals_are_no_faster_than_their_rate() -> None:
    found = Loop(pipeline_of(PROFILE, texts(12), KINDS), "autoregressive").opened(12, 0.2)
    assert 0.5 * 0.2 * 12 < found.tokens_per_second < 1.5 * 0.2 * 12
    assert found.ttft > 0


def test_a_text_that_differs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(pipeline_of(PROFILE, texts(2), KINDS), "autoregressive")
    other = pipeline_of(PROFILE, [*reversed(texts(2))], KINDS)
    loop.submitted({"j0": 0.0})
    monkeypatch.setattr(loop, "_setup", other)
    with pytest.raises(StateError, match="the text of j0 differs"):
        loop.submitted({"j1": 30.0})


@pytest.mark.parametrize("jobs", [1, 4, 16])
def test_computed_plain_decoding_is_the_governors_where_stages_are_equal(jobs: int) -> None:
    stages = PROFILE.stages[0]
    slowest = [
        max(PROFILE.stage_seconds(stage, stages, size) for stage in range(1, stages + 1))
        for size in range(jobs + 1)
    ]
    planned = best_batch(jobs, stages, slowest.__getitem__)
    assert plain_rate(PROFILE, jobs) >= planned.rate * (1 - 1e-9)


def test_every_profile_has_goals_and_only_these() -> None:
    assert {name for name, _, _ in GOALS} == set(PROFILES.split(","))
    assert goals("jetson-7b", 0) == {1: 4.0, 4: 2.8, 8: 2.4, 16: 2.1, 64: 0.97}
    assert goals("jetson-7b", 1) == {}
