"""Runs that share a pass at the first stage share it up to the last, on every way."""

from __future__ import annotations

from collections import defaultdict

import pytest

from flowspec.core.protocol.addresses import DRAFT, Address, Role, stage_address
from flowspec.core.protocol.machine import Compute, Input, Output
from flowspec.core.protocol.messages import Envelope, Segment
from flowspec.core.protocol.work import Pass
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.rehearse.devices.way import NO_BROKER, Way
from flowspec.rehearse.simulator import Costs, unit_costs
from tests.toy import PROMPT, TARGET, pipeline

STAGES = 3
WAYS = [NO_BROKER, *(Way(at, rows) for at in ("stage-2", "own") for rows in ("straight", "broker"))]
#: What a pass computes: runs and numbers of segments.
Group = frozenset[tuple[RunKey, int]]


def occupied(source: Address, to: Address, envelope: Envelope) -> float:
    """Every row takes a while, so parts that travel alone arrive one after the other."""
    message = envelope.message
    return 0.05 * len(message.ids) if isinstance(message, Segment) else 0.01


class Passes:
    """The passes of every stage, as a tap."""

    def __init__(self) -> None:
        self.by_stage: defaultdict[int, list[Group]] = defaultdict(list)

    def tap(self, node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Compute) and node.role is Role.VERIFY:
                assert isinstance(output.work, Pass)
                parts = output.work.parts
                self.by_stage[node.number].append(
                    frozenset((part.run, part.segment) for part in parts)
                )


def run(way: Way, jobs: dict[str, JobSpec]) -> Passes:
    """The passes of ``jobs``, all of which end with the target's text."""
    found = Passes()
    costs = Costs(lambda node, work: unit_costs(work), lambda *_: 0.1, occupied, way=way)
    simulation = pipeline(STAGES, costs=costs, tap=found.tap)
    for name, spec in jobs.items():
        simulation.submit(name, spec)
    simulation.run()
    for name, spec in jobs.items():
        text = TARGET.decode(PROMPT, spec.max_new_tokens, spec.sampling)
        assert tuple(simulation.jobs[name].tokens) == text, name
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_shared_pass_is_one_pass_at_every_later_stage(way: Way) -> None:
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=24, strategy="autoregressive")
    passes = run(way, dict.fromkeys("abcd", spec))
    first, *later = (passes.by_stage[stage] for stage in range(1, STAGES + 1))
    shared = [group for group in first if len(group) > 1]
    assert len(shared) > 20
    for stage in later:
        for group in shared:
            assert any(group <= other for other in stage), "a pass was taken apart"
    assert max(map(len, shared)) == 4
    assert len(first) < 50, "four jobs take half of the passes of four, or less"


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_jobs_of_every_way_keep_their_text_in_shared_passes(way: Way) -> None:
    """PipeDec's segments belong to tasks of the graph, and wait for the jobs before them."""
    sampled = Sampling(temperature=1.0, seed=3)
    jobs = {
        "a": JobSpec(prompt_ids=PROMPT, max_new_tokens=20, strategy="flowspec"),
        "b": JobSpec(prompt_ids=PROMPT, max_new_tokens=30, strategy="chain"),
        "c": JobSpec(prompt_ids=PROMPT, max_new_tokens=30, strategy="auto", sampling=sampled),
        "e": JobSpec(prompt_ids=PROMPT, max_new_tokens=30, strategy="pipedec"),
        "d": JobSpec(prompt_ids=PROMPT, max_new_tokens=10, strategy="flowspec:lockstep=on"),
    }
    passes = run(way, jobs)
    assert any(len(group) > 2 for group in passes.by_stage[STAGES])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_revoked_run_leaves_a_pass_alone(way: Way) -> None:
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=24, strategy="flowspec")
    costs = Costs(lambda node, work: unit_costs(work), lambda *_: 0.1, occupied, way=way)
    simulation = pipeline(STAGES, costs=costs)
    for name in "abc":
        simulation.submit(name, spec)
    simulation.revoke("b", at=12.3)
    simulation.run()
    text = TARGET.decode(PROMPT, 24, Sampling())
    for name in "ac":
        assert tuple(simulation.jobs[name].tokens) == text
    assert simulation.jobs["b"].finish is None
    assert len(simulation.jobs["b"].tokens) < 24
    for node in (DRAFT, *map(stage_address, range(1, STAGES + 1))):
        machine = simulation.machine(node)
        assert not machine.runnable
