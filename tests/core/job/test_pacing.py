"""Timesteps as data: which hops wait for which verdict, and what a join waits for."""

from __future__ import annotations

import pytest

from flowspec.core.job.pacing import Timestep


def test_only_the_first_stage_of_a_later_group_waits_for_the_verdict_before_it() -> None:
    pace = Timestep(stages=5, groups=2)  # groups of stages 1-2 and 3-5
    hops = {hop.task: hop.after for hop in pace.hops()}
    assert hops == {
        "decode/1/1": (),
        "decode/2/1": (),
        "decode/3/2": ("verdict/1",),
        "decode/4/2": (),
        "decode/5/2": (),
    }


def test_a_join_waits_for_every_active_group_and_the_drafter() -> None:
    pace = Timestep(stages=3, groups=3)
    pace.hops()
    pace.entered(10)
    assert pace.advance([10], drafting=True) == ("sync/1", ["decode/0/1", "decode/1/1"])
    assert (pace.drafted, pace.verdict) == ("decode/0/1", "verdict/1")
    pace.entered(11)
    assert pace.advance([10, 11], drafting=False) == ("sync/2", ["decode/2/2", "decode/1/2"])
    assert pace.advance([11], drafting=True) == ("sync/3", ["decode/0/3", "decode/2/3"]), (
        "10 was pruned away"
    )
    assert pace.advance([11], drafting=False) == ("sync/4", ["decode/3/4"])
    assert pace.advance([11], drafting=False)[1] == [], "it has been through"


@pytest.mark.parametrize(("stages", "groups"), [(1, 1), (7, 3), (21, 14), (12, 12)])
def test_groups_are_contiguous_and_near_equal(stages: int, groups: int) -> None:
    hops = Timestep(stages, groups).hops()
    steps = [int(hop.task.rpartition("/")[2]) for hop in hops]
    assert [int(hop.task.split("/")[1]) for hop in hops] == list(range(1, stages + 1))
    assert steps == sorted(steps)
    sizes = [steps.count(step) for step in range(1, groups + 1)]
    assert sum(sizes) == stages
    assert max(sizes) - min(sizes) <= 1
