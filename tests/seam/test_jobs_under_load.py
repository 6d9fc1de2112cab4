"""Jobs of all strategies share a pipeline: every text is the target's, whatever each is granted."""

from __future__ import annotations

import random

import pytest

from flowspec.core.protocol.addresses import DRAFT, Address, Role
from flowspec.core.protocol.machine import Compute, Finish, Granted, Input, OpenJob, Output
from flowspec.core.protocol.work import Pass, Work
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.rehearse.simulator import Costs, unit_costs
from flowspec.strategies import EXACT
from tests.marks import crossed
from tests.toy import PROMPT, TARGET, pipeline

#: t(w): flat, a staircase, and one where a second row costs four times the first.
TIMES = {
    "flat": lambda rows: 1.0,
    "steps": lambda rows: 1.0 + rows // 24,
    "dear": lambda rows: 1.0 if rows == 1 else 4.0,
}


def costs_of(name: str) -> Costs:
    def work_cost(node: Address, work: Work) -> float:
        if isinstance(work, Pass):
            return TIMES[name](sum(len(part.ids) for part in work.parts))
        return 0.3 * unit_costs(work)

    return Costs(work_cost, lambda *_: 0.05)


def mixed(count: int, seed: int) -> dict[str, JobSpec]:
    """Jobs of every strategy in turn, of random lengths and samplings."""
    drawn = random.Random(seed)
    return {
        f"j{at}": JobSpec(
            prompt_ids=tuple(drawn.randrange(2, 60) for _ in range(drawn.randrange(3, 40))),
            max_new_tokens=drawn.randrange(8, 60),
            sampling=Sampling(drawn.choice((0.0, 1.0)), seed=at),
            strategy=EXACT[at % len(EXACT)],
        )
        for at in range(count)
    }


@pytest.mark.parametrize("name", crossed(TIMES))
def test_every_text_is_the_targets_whatever_a_job_may_use(name: str) -> None:
    seen: list[Granted] = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        seen.extend(output for output in outputs if isinstance(output, Granted))

    simulation = pipeline(3, costs=costs_of(name), tap=tap)
    jobs = mixed(2 * len(EXACT), seed=1)
    for at, (job, spec) in enumerate(jobs.items()):
        simulation.submit(job, spec, at=3.0 * at)
    simulation.run()
    for job, spec in jobs.items():
        record = simulation.jobs[job]
        assert record.finish is not None
        assert record.finish.error == ""
        assert spec.prompt_ids is not None
        text = TARGET.decode(spec.prompt_ids, spec.max_new_tokens, spec.sampling)
        assert tuple(record.tokens) == text, spec.strategy
    shares = {granted.share for granted in seen}
    assert any(share.is_plain for share in shares)
    assert any(share.rows > 1 for share in shares)
    assert simulation.rows_held == 0


def test_shares_are_in_the_stats_of_jobs_that_had_company() -> None:
    simulation = pipeline(3, costs=costs_of("flat"))
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=40, strategy="auto")
    simulation.submit("alone", spec)
    simulation.run()
    for job in ("one", "two"):
        simulation.submit(job, spec, at=simulation.now)
    simulation.run()
    stats = {job: record.finish.stats for job, record in simulation.jobs.items() if record.finish}
    assert "shares" not in stats["alone"]
    first = stats["one"]["shares"][0]  # type: ignore[index]
    assert first["jobs"] == 2
    assert first["rows"] >= 1


def test_a_job_behind_a_barrier_runs_alone_in_its_turn() -> None:
    order: list[tuple[str, str]] = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, OpenJob | Finish):
                order.append((type(output).__name__, output.run.job))

    simulation = pipeline(3, tap=tap)
    for at, strategy in enumerate(("auto", "pipedec", "flowspec", "auto")):
        spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=20 + at, strategy=strategy)
        simulation.submit(f"j{at}", spec, at=float(at))
    simulation.run()
    ends = order.index(("Finish", "j0"))
    assert order[: ends + 3] == [
        *(("OpenJob", "j0"), ("Finish", "j0")),
        *(("OpenJob", "j1"), ("Finish", "j1")),
    ]
    assert {name for name, _ in order[4:6]} == {"OpenJob"}, "the others run together"
    for record in simulation.jobs.values():
        assert tuple(record.tokens) == TARGET.decode(PROMPT, len(record.tokens), Sampling())


def test_a_lone_job_is_not_touched() -> None:
    """The governor takes part only in company, so the runs of single jobs stay what they were."""
    seen: list[Output] = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        if node == DRAFT:
            seen.extend(outputs)
        assert node == DRAFT or node.role is Role.VERIFY

    simulation = pipeline(3, costs=costs_of("steps"), tap=tap)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=40, strategy="auto")
    for job in ("a", "b"):
        simulation.submit(job, spec, at=simulation.now)
        simulation.run()
    assert not any(isinstance(output, Granted) for output in seen)
    assert any(isinstance(output, Compute) for output in seen)
