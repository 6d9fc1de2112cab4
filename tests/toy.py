"""A simulated pipeline over the toy model, for tests without Redis and torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, middle_address, stage_address
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.model.base import DraftExecutor
from flowspec.model.drafters.drafter_choice import levels_of
from flowspec.rehearse.simulator import UNIT, Costs, RunRecord, Simulation, Tap
from flowspec.strategies import build
from tests.toy_model import ToyDrafter, ToyMiddle, ToyStage, ToyTarget

TARGET = ToyTarget()
PROMPT = tuple((35 + at * 3) % 60 + 2 for at in range(10))


def limits(
    stages: int, target: ToyTarget = TARGET, eos: frozenset[int] | None = None, middles: int = 0
) -> Limits:
    return Limits(
        stages,
        target.context,
        target.vocabulary,
        target.eos if eos is None else eos,
        middles=middles,
    )


def pipeline(
    stages: int,
    hit_rate: float = 0.8,
    *,
    target: ToyTarget = TARGET,
    ranks: Sequence[int] = (0, 0, 0, 0, 0, 1, 1, 2),
    costs: Costs = UNIT,
    tap: Tap | None = None,
    middles: Sequence[float] = (),
    drafter: DraftExecutor | None = None,
    kept_rows: int = 0,
) -> Simulation:
    """``middles``: for each middle model how often it agrees with the target."""
    used = ToyDrafter(target, hit_rate, ranks) if drafter is None else drafter
    found = replace(
        limits(stages, target, middles=len(middles)), levels=levels_of(used), kept_rows=kept_rows
    )
    nodes: dict[Address, Any] = {DRAFT: (DraftMachine(found, build), used)}
    for model, agreement in enumerate(middles, 1):
        middle = StageMachine(1, stages, middle=model)
        nodes[middle_address(model)] = (middle, ToyMiddle(target, agreement))
    for stage in range(1, stages + 1):
        nodes[stage_address(stage)] = (
            StageMachine(stage, stages),
            ToyStage(target, stage, stages),
        )
    return Simulation(nodes, costs, tap=tap)


def generate(
    strategy: str,
    stages: int = 4,
    *,
    prompt: Sequence[int] = PROMPT,
    count: int = 48,
    sampling: Sampling = Sampling(),
    **options: object,
) -> RunRecord:
    """Run one job to its end under unit costs."""
    simulation = pipeline(stages, **options)  # type: ignore[arg-type]
    spec = JobSpec(
        prompt_ids=tuple(prompt), max_new_tokens=count, sampling=sampling, strategy=strategy
    )
    simulation.submit("job", spec)
    simulation.run()
    return simulation.jobs["job"]
