"""Inputs and outputs of a small pipeline's machines in one run of a job, for replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowspec.core.protocol.addresses import SCHEDULER, Address
from flowspec.core.protocol.machine import (
    Compute,
    Done,
    Input,
    Machine,
    Output,
    Received,
    Refused,
    Send,
)
from flowspec.core.protocol.messages import Envelope, Revoke
from flowspec.core.protocol.work import DraftPass, Encode
from flowspec.core.run.key import RunKey
from flowspec.core.run.spec import JobSpec
from flowspec.rehearse.simulator import Costs, RunRecord, Simulation, unit_costs
from tests.addresses import D0
from tests.toy import pipeline

JOB = "j"
FIRST = RunKey(JOB, 1)
SECOND = RunKey(JOB, 2)
STAGES = 2
#: Agreement of the middle models, which only pipespec uses.
MIDDLES = (0.6, 0.8)
#: Exact in binary floating point, so that a run with a later start has the same durations.
COSTS = Costs(
    lambda node, work: 0.25 if node == D0 else unit_costs(work),
    lambda source, target, envelope: 0.5,
)
MANY = 99


@dataclass(frozen=True)
class Step:
    """A machine's input at ``now``, and its outputs."""

    now: float
    event: Input
    outputs: tuple[Output, ...]

    @property
    def starts_work(self) -> bool:
        return any(isinstance(output, Compute) for output in self.outputs)


def run_of(output: Output) -> RunKey:
    """The run of an output."""
    match output:
        case Send(envelope=envelope):
            return envelope.message.run
        case Compute(work):
            return work.run if isinstance(work, Encode) else part_run(work)
        case _:
            return output.run


def part_run(work: object) -> RunKey:
    if isinstance(work, DraftPass):
        (run,) = {draft.part.run for draft in work.drafts}
        return run
    (run,) = {part.run for part in work.parts}  # type: ignore[attr-defined]
    return run


def begin(simulation: Simulation, run: RunKey, spec: JobSpec, at: float = 0.0) -> None:
    """Assign ``run`` of a job that has committed nothing, whatever its earlier runs."""
    ledger = simulation.ledger
    if run.job not in ledger.jobs:
        ledger.admit(run.job, spec.fields(), MANY)
        ledger.queue.clear()
    entry = ledger.jobs[run.job]
    entry.state = type(entry.state).QUEUED
    entry.epoch = run.epoch - 1
    entry.offset = None
    entry.emitted = 0
    ledger.queue.append(run.job)
    (submit,) = ledger.assign(run.job, MANY).deliveries
    simulation.runs[run] = RunRecord()
    simulation.post(submit.to, submit.envelope, at)


def trace(run: RunKey, spec: JobSpec) -> dict[Address, list[Step]]:
    """Every machine's steps in ``run`` of a job that is alone in the pipeline."""
    steps: dict[Address, list[Step]] = {}

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        steps.setdefault(node, []).append(Step(now, event, tuple(outputs)))

    simulation = pipeline(STAGES, 0.7, costs=COSTS, tap=tap, middles=MIDDLES)
    begin(simulation, run, spec)
    simulation.run()
    record = simulation.runs[run]
    assert record.finish is not None
    assert record.finish.error == ""
    return steps


@dataclass(frozen=True)
class Cut:
    """A first run that was stopped before its end.

    ``before``: the machine's steps until then. ``result``: of the work under way, if any. ``late``:
    all inputs of that run that may still arrive.
    """

    before: Sequence[Step]
    result: Done | None
    late: Sequence[Input]


def cut(steps: Sequence[Step], at: int, more: Iterable[Envelope] = ()) -> Cut:
    """Stop the first run after ``at`` steps.

    Its messages so far may arrive again, the others late; ``more`` are further ones.
    """
    before = steps[:at]
    after = steps[at:]
    working = sum(step.starts_work for step in before) > sum(
        isinstance(step.event, Done) for step in before
    )
    results = [step.event for step in after if isinstance(step.event, Done)]
    envelopes = [
        envelope
        for step in steps
        if isinstance(step.event, Received)
        for envelope in step.event.envelopes
    ]
    late: list[Input] = [Received((envelope,)) for envelope in (*envelopes, *more)]
    late += [
        Received((Envelope(SCHEDULER, 0, Revoke(SECOND)),)),
        Received((Envelope(SCHEDULER, 0, Revoke(FIRST)),)),
        Refused(FIRST, False, "the broker refused a message: a stream is at its cap"),
        Refused(FIRST, True, "the broker refused a message: the run is over"),
    ]
    return Cut(before, results[0] if working else None, late)


def replay(
    machine: Machine,
    first: Cut,
    second: Sequence[Step],
    moments: Sequence[tuple[int, Input]],
) -> list[Output]:
    """Drive ``machine`` through a first run that was cut off and, directly after it, a second one.

    ``moments``: inputs of the first run, each with the step of the second run before which it
    arrives. The second run's outputs must be the recorded ones. Returns the outputs of the first
    run after the second has begun.
    """
    start = first.before[-1].now if first.before else 0.0
    for step in first.before:
        assert tuple(machine.step(step.event, step.now)) == step.outputs
    others: list[Output] = []
    for number, step in enumerate(second):
        for at, event in moments:
            if at == number:
                outputs = machine.step(event, start + step.now)
                assert all(run_of(output) == FIRST for output in outputs)
                others += outputs if number else ()
        outputs = machine.step(step.event, start + step.now)
        own = tuple(output for output in outputs if run_of(output) == SECOND)
        assert own == step.outputs
        others += [output for output in outputs if run_of(output) == FIRST]
    return others
