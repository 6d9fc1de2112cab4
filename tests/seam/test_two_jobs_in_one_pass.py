"""Seam: a stage pass carries rows of several jobs, and neither job can tell."""

from __future__ import annotations

import pytest

from flowspec.core.protocol.machine import Input, Output, Run
from flowspec.core.protocol.machine import Pass as StagePass
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from tests.toy import TARGET, pipeline, submit


@pytest.mark.parametrize("stages", [1, 3])
def test_two_jobs_share_passes_and_keep_their_own_text(stages: int) -> None:
    shared: list[int] = []

    def tap(node: str, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Run) and isinstance(output.work, StagePass):
                shared.append(len({part.job for part in output.work.parts}))

    simulation = pipeline(stages, parts_per_pass=2, tap=tap)
    jobs = {
        "a": JobSpec(prompt_ids=(2, 3, 4), max_new_tokens=40, strategy="flowspec"),
        "b": JobSpec(
            prompt_ids=(9, 8, 7, 6),
            max_new_tokens=40,
            strategy="naive_pp",
            sampling=Sampling(temperature=1.0, seed=4),
        ),
        "c": JobSpec(prompt_ids=(30,), max_new_tokens=20, strategy="autoregressive"),
    }
    for name, spec in jobs.items():
        submit(simulation, name, spec)
    simulation.run()
    for name, spec in jobs.items():
        record = simulation.jobs[name]
        assert tuple(record.tokens) == TARGET.decode(
            spec.prompt_ids or (), spec.max_new_tokens, spec.sampling
        )
        assert record.finish is not None
        assert record.finish.error == ""
    assert max(shared) == 2, "no pass was ever shared"
