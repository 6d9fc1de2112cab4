"""A session within the limits of its pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.machine import Input, Output
from flowspec.core.run.spec import JobSpec
from flowspec.rehearse.simulator import Simulation
from flowspec.strategies import build
from tests.addresses import D0
from tests.strategies.scripted import pipeline as scripted
from tests.toy import PROMPT, limits, pipeline

STAGES = 4
#: Options of small FlowSpec trees with the papers' barrier.
SMALL = "width=2,loops=2,nodes=6,segment=2,merge_loops=2,merge_nodes=6,lockstep=on"
TREE_ROWS = 24


@pytest.mark.parametrize("strategy", ["specpipe:width=8", "pipedec:width=8", "chain:window=8"])
def test_the_rows_in_flight_stay_within_the_pipelines_room(strategy: str) -> None:
    """Four segments would need more rows than the stages have."""
    machine = DraftMachine(replace(limits(STAGES), tree_rows=TREE_ROWS), build)
    most = 0

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        nonlocal most
        sent = [len(session.tree.sent) for session in machine.sessions.values()]
        most = max(most, *sent, 0)

    plain = pipeline(STAGES)
    stages = [Address.parse(f"s{stage}") for stage in range(1, STAGES + 1)]
    nodes = {node: (plain.machine(node), plain.executor(node)) for node in stages}
    simulation = Simulation({D0: (machine, plain.executor(D0)), **nodes}, tap=tap)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=30, strategy=strategy)
    simulation.submit("job", spec)
    simulation.run()
    finish = simulation.jobs["job"].finish
    assert finish is not None
    assert finish.error == ""
    assert TREE_ROWS // 2 < most <= TREE_ROWS


@pytest.mark.parametrize("options", ["expand=off", "expand_nodes=2"])
@pytest.mark.parametrize("stages", [2, 3])
def test_in_lockstep_an_empty_answer_does_not_end_the_merge_being_drafted(
    stages: int, options: str
) -> None:
    """The dead branch comes first, so that each verdict empties segments, whose answers follow at
    once. Every merge contains the next token: only a lost merge ends a round.
    """
    target = tuple(range(30))
    script = {token: [(60, -0.5), (token + 1, -0.9)] for token in target}
    simulation = scripted(f"flowspec:{SMALL},{options}", target, script, stages=stages)
    finish = simulation.jobs["j"].finish
    assert finish is not None
    assert finish.stats["rounds"] == 1
