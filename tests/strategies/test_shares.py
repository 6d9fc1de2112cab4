"""What strategies do with a share: no segment is larger, no more are in flight, no text changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.job.load import Governor
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.machine import Input, Output, Send
from flowspec.core.protocol.messages import Segment
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.share import RunShare
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.rehearse.simulator import Simulation
from flowspec.strategies import EXACT, build
from tests.marks import crossed
from tests.toy import PROMPT, TARGET, limits
from tests.toy_model import ToyDrafter, ToyStage

#: Strategies whose segments have the shape that they name.
OWN_SHAPE = {"static_tree", "speculative", "pipespec", "specpipe_db", "pipedec", "pipedec_head"}
GOVERNED = [name for name in EXACT if name not in OWN_SHAPE] + [
    "pipedec:barrier=off",
    "specpipe:levels=3",
    "specpipe:width=auto",
    "auto:rows=40",
]
STAGES = 3


class Fixed(Governor):
    """Grants every run the same, also one that is alone."""

    def __init__(self, share: RunShare) -> None:
        super().__init__(STAGES)
        self._share = share

    def changes(self, runs: Mapping[RunKey, bool]) -> dict[RunKey, RunShare]:
        before = self._given
        self._given = dict.fromkeys(runs, self._share)
        return {run: self._share for run in runs if run not in before}


class Watch:
    """A run's segments after the first round's, which began before the share was known."""

    def __init__(self, machine: DraftMachine) -> None:
        self.rows: list[int] = []
        self.together: set[int] = set()
        self.in_flight = 0
        self._machine = machine

    def tap(self, node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if node == DRAFT and isinstance(output, Send):
                message = output.envelope.message
                if isinstance(message, Segment) and message.round > 1:
                    self.rows.append(len(message.ids))
                    self.together.add(message.together)
                    (session,) = self._machine.sessions.values()
                    self.in_flight = max(self.in_flight, session.in_flight)


def run(strategy: str, share: RunShare, sampling: Sampling = Sampling()) -> Watch:
    """A run of 60 tokens that is granted ``share``; its text is the target's."""
    drafter = ToyDrafter(TARGET, 0.6, (0, 0, 0, 1, 2))
    machine = DraftMachine(limits(STAGES), build, governor=Fixed(share))
    watch = Watch(machine)
    nodes: dict[Address, Any] = {DRAFT: (machine, drafter)}
    for stage in range(1, STAGES + 1):
        nodes[stage_address(stage)] = (StageMachine(stage, STAGES), ToyStage(TARGET, stage, STAGES))
    simulation = Simulation(nodes, tap=watch.tap)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=60, strategy=strategy, sampling=sampling)
    simulation.submit("j", spec)
    simulation.run()
    assert tuple(simulation.jobs["j"].tokens) == TARGET.decode(PROMPT, 60, sampling)
    return watch


@pytest.mark.parametrize(("strategy", "rows"), crossed(GOVERNED, [1, 5]))
def test_no_segment_has_more_rows_than_are_left_to_the_job(strategy: str, rows: int) -> None:
    watch = run(strategy, RunShare(rows, 0, 7, jobs=2))
    # The remainder of a cut does not count against a segment's limit (``core.tree.segments``).
    assert max(watch.rows) <= rows + 1
    assert watch.together == {7}


@pytest.mark.parametrize("strategy", EXACT)
def test_a_share_of_single_rows_is_plain_decoding(strategy: str) -> None:
    watch = run(strategy, RunShare(1, 1, 0, jobs=2), Sampling(temperature=1.0, seed=4))
    if build(strategy, STAGES).pacing.has_barrier or strategy == "specpipe_db":
        assert max(watch.rows) > 1
    elif strategy != "pipespec":
        assert set(watch.rows) == {1}
        assert watch.in_flight == 1


@pytest.mark.parametrize("strategy", ["auto", "specpipe", "chain"])
def test_no_more_segments_are_in_flight_than_are_left_to_the_job(strategy: str) -> None:
    assert run(strategy, RunShare(4, 2, 0, jobs=2)).in_flight == 2
    assert run(strategy, RunShare(4, 0, 0, jobs=2)).in_flight > 2
