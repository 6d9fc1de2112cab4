"""Seam: what jobs may use is planned by the target's passes, not by those of middle models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowspec.core.job.load import Governor
from flowspec.core.protocol.addresses import Address, middle_address
from flowspec.core.protocol.messages import Answer
from flowspec.core.protocol.work import Work
from flowspec.core.run.spec import JobSpec
from flowspec.rehearse.simulator import UNIT
from tests.toy import PROMPT, pipeline

#: A middle model's pass beside the 1 of a stage.
CHEAP = 0.125


def work_seconds(node: Address, work: Work) -> float:
    return CHEAP if node == middle_address(1) else UNIT.work(node, work)


def test_middle_models_passes_are_not_taken_for_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[float] = []
    note = Governor.note

    def noting(governor: Governor, answer: Answer) -> None:
        noted.append(answer.seconds)
        note(governor, answer)

    monkeypatch.setattr(Governor, "note", noting)
    simulation = pipeline(2, middles=(0.8,), costs=replace(UNIT, work=work_seconds))
    for job, strategy in enumerate(("pipespec", "auto")):
        simulation.submit(
            f"job{job}", JobSpec(prompt_ids=PROMPT, max_new_tokens=16, strategy=strategy)
        )
    simulation.run()
    assert all(not record.finish.error for record in simulation.jobs.values() if record.finish)
    assert noted
    assert min(noted) >= 1.0
