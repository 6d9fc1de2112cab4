"""Whatever a peer sends, the draft worker goes on: runs fail, and what it keeps is bounded."""

from __future__ import annotations

import pytest

from flowspec.core.job import draft_worker
from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import SCHEDULER
from flowspec.core.protocol.machine import Compute, Done, Finish, Input, Poll, Received, Tick
from flowspec.core.protocol.messages import Envelope, Submit
from flowspec.core.protocol.work import (
    DraftDone,
    DraftPass,
    DraftPassDone,
    Encode,
    EncodeDone,
    EncodeFailed,
)
from flowspec.core.run.key import RunKey
from flowspec.strategies import build
from tests.hostile import Hostile
from tests.marks import heavy
from tests.toy import limits


def results(work: object) -> EncodeDone | DraftPassDone | EncodeFailed:
    """What an honest executor finds."""
    if isinstance(work, Encode):
        return EncodeDone((5, 6, 7))
    if not isinstance(work, DraftPass):
        return EncodeFailed("no chat template", refused=True)
    found = []
    for draft in work.drafts:
        rows = len(draft.part.answers)
        tokens = tuple(range(5, 5 + draft.width))
        found.append(DraftDone((tokens,) * rows, ((-1.0,) * draft.width,) * rows))
    return DraftPassDone(tuple(found))


@pytest.mark.parametrize("seeds", [range(20), heavy(range(20, 370))])
def test_no_envelope_ends_a_draft_worker(seeds: range) -> None:
    assert sum(map(passes_of, seeds)) > 2 * len(seeds), "some of it is served"


def passes_of(seed: int) -> int:
    """Passes of a worker in 300 turns."""
    hostile = Hostile(seed)
    machine = DraftMachine(limits(2), build, generation=1)
    passes = 0
    for turn in range(300):
        now = turn / 10
        arrived = tuple(hostile.envelope() for _ in range(hostile.random.randint(1, 3)))
        inputs: list[Input] = [Received(arrived)]
        for _ in range(20):
            for event in inputs:
                outputs = machine.step(event, now)
                inputs = [
                    Done(results(output.work)) for output in outputs if isinstance(output, Compute)
                ]
                passes += len(inputs)
            if not inputs and machine.runnable:
                inputs = [Poll()]
        machine.step(Tick(), now)
    return passes


def test_a_bounded_number_of_runs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_worker, "MOST_RUNS", 2)
    machine = DraftMachine(limits(2), build)
    for job in "abc":
        submit = Submit(RunKey(job, 1), (("prompt", "a text"),))
        outputs = machine.step(Received((Envelope(SCHEDULER, 0, submit),)), 0.0)
    (finish,) = outputs
    assert isinstance(finish, Finish)
    assert finish.error == "the draft worker has 2 jobs already; submit the job again later"
