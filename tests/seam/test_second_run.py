"""Seam: a job is restarted while its first run is in progress all over the pipeline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import SCHEDULER, Address
from flowspec.core.protocol.machine import Input, Output, Received, Refused
from flowspec.core.protocol.messages import Envelope, Revoke
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.rehearse.simulator import Costs, Simulation
from tests.addresses import D0, M1, S1, S2, S3
from tests.core.traces import FIRST, SECOND, begin
from tests.marks import examples
from tests.toy import PROMPT, TARGET, pipeline
from tests.toy_model import ToyMiddle, ToyStage

COUNT = 24
STAGES = 3
WORKERS = (D0, S1, S2, S3, M1)
COSTS = Costs(
    lambda node, work: {D0: 0.3, S1: 1.0, S2: 1.7, S3: 0.6}.get(node, 1.3),
    lambda source, target, envelope: 0.45,
)
STRATEGIES = [
    "flowspec",
    "flowspec:lockstep=on",
    "pipedec",
    "specpipe",
    "pipespec:window=8",
    "chain",
    "auto",
    "autoregressive",
]
SAMPLED = Sampling(temperature=1.0, seed=3)


class Restarted(Simulation):
    """A pipeline whose job is assigned once more, from its prompt, at virtual time ``restart``.

    Every message of the first run arrives again ``again`` seconds later, and every worker learns
    ``revoked`` seconds after the restart that the run is revoked.
    """

    def __init__(
        self, plain: Simulation, spec: JobSpec, restart: float, again: float, revoked: float
    ) -> None:
        nodes = {node: (plain.machine(node), plain.executor(node)) for node in WORKERS}
        super().__init__(nodes, COSTS, tap=self._watch)
        self.spec = spec
        self.restart = restart
        self.again = again
        self.revoked = revoked
        self.refused: list[Refused] = []
        self.restarted = False
        self.committed_before = 0  # tokens of the first run at the restart
        self._repeated: set[tuple[Address, Envelope]] = set()

    def _watch(self, node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        if isinstance(event, Refused):
            self.refused.append(event)
        if isinstance(event, Received):
            for envelope in event.envelopes:
                fresh = (node, envelope) not in self._repeated
                if envelope.message.run == FIRST and fresh:
                    self._repeated.add((node, envelope))
                    self.post(node, envelope, now + self.again)
        ended = self.runs[FIRST].finish is not None
        if now >= self.restart and not self.restarted and not ended:
            self.restarted = True
            self.committed_before = len(self.runs[FIRST].tokens)
            begin(self, SECOND, self.spec, now)
            for worker in WORKERS:
                told = Envelope(SCHEDULER, 0, Revoke(SECOND))
                self.post(worker, told, now + self.revoked)


def check_nothing_is_left(simulation: Simulation) -> None:
    assert simulation.rows_held == 0
    draft = simulation.machine(D0)
    assert isinstance(draft, DraftMachine)
    assert draft.sessions == {}
    for address in (S1, S2, S3, M1):
        machine = simulation.machine(address)
        assert isinstance(machine, StageMachine)
        assert machine.open_runs == ()
        executor = simulation.executor(address)
        assert isinstance(executor, ToyStage | ToyMiddle)
        assert executor.layers.runs == ()


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(
    restart=st.floats(0.0, 30.0),
    again=st.floats(0.0, 12.0),
    revoked=st.floats(0.0, 12.0),
    sampling=st.sampled_from([Sampling(), SAMPLED]),
)
@settings(max_examples=examples(15), deadline=None)
def test_the_second_runs_text_is_the_targets(
    strategy: str, restart: float, again: float, revoked: float, sampling: Sampling
) -> None:
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=COUNT, strategy=strategy, sampling=sampling)
    plain = pipeline(STAGES, 0.7, middles=(0.8,))
    simulation = Restarted(plain, spec, restart, again, revoked)
    begin(simulation, FIRST, spec)
    simulation.run()
    expected = TARGET.decode(PROMPT, COUNT, sampling)
    first = simulation.runs[FIRST]
    if simulation.restarted:
        second = simulation.runs[SECOND]
        assert first.finish is None
        assert len(first.tokens) == simulation.committed_before
        assert tuple(first.tokens) == expected[: len(first.tokens)]
        assert second.finish is not None
        assert (second.finish.run, second.finish.error) == (SECOND, "")
        assert tuple(second.tokens) == expected
    else:
        assert tuple(first.tokens) == expected
    assert all(refused == Refused(FIRST, True, refused.reason) for refused in simulation.refused)
    check_nothing_is_left(simulation)


SPEC = JobSpec(prompt_ids=PROMPT, max_new_tokens=COUNT, strategy="flowspec")


def commit_times() -> list[float]:
    """When the commits of a run happen that is not disturbed."""
    alone = pipeline(STAGES, 0.7, costs=COSTS)
    begin(alone, FIRST, SPEC)
    alone.run()
    return [when for when, _ in alone.runs[FIRST].committed_at]


def restarted(restart: float, revoked: float) -> Restarted:
    simulation = Restarted(pipeline(STAGES, 0.7, middles=(0.8,)), SPEC, restart, 1.0, revoked)
    begin(simulation, FIRST, SPEC)
    simulation.run()
    assert simulation.restarted
    return simulation


def test_a_run_that_is_restarted_while_its_stages_report_has_no_result() -> None:
    simulation = restarted(commit_times()[-1] + 0.1, revoked=10.0)
    first, second = simulation.runs[FIRST], simulation.runs[SECOND]
    assert len(first.tokens) == COUNT, "its text was complete"
    assert first.finish is None
    assert second.finish is not None
    check_nothing_is_left(simulation)


def test_the_restart_meets_the_first_run_at_work() -> None:
    """Otherwise the test above would test nothing."""
    met: set[str] = set()
    for restart in (*(at * 0.7 for at in range(20)), *commit_times()[:-1]):
        met |= {refused.reason for refused in restarted(restart, revoked=5.0).refused}
    assert met == {
        f"the broker refused {what}: the run is over"
        for what in (
            "the prompt",
            "a commit",
            *(f"a message to {worker}" for worker in ("d0", "s1", "s2", "s3")),
        )
    }
