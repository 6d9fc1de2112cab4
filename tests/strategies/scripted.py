"""A pipeline whose target and drafter say what a test wrote down: golden scripts one can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.machine import Draft, DraftDone, Pass, PassDone
from flowspec.core.protocol.messages import (
    SCHEDULER,
    Envelope,
    Returns,
    Submit,
    middle_node,
    stage_node,
)
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.drivers.oracle import OracleStage
from flowspec.drivers.sim import UNIT, Costs, Simulation, Tap
from flowspec.model.base import RowArray
from flowspec.strategies import build

#: For the token a path ends in: what is proposed after it, with values.
Script = Mapping[int, Sequence[tuple[int, float]]]


class ScriptedDrafter:
    """Proposes by the last token alone; after a token the script does not know, token 99."""

    wants_hidden = False

    def __init__(self, script: Script) -> None:
        self._script = script

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        """It keeps no rows."""

    def release(self, job: str) -> None:
        """It keeps no rows."""

    def learn(self, job: str, ids: Sequence[int], rows: RowArray) -> None:
        raise AssertionError("not a draft head")

    def run(self, work: Draft) -> DraftDone:
        found = [
            list(self._script.get(work.part.tokens[row], [(99, -1.0)]))[: work.width]
            for row in work.part.answers
        ]
        tokens = tuple(tuple(token for token, _ in entries) for entries in found)
        return DraftDone(tokens, tuple(tuple(value for _, value in entries) for entries in found))


class ScriptedMiddle(OracleStage):
    """A middle model that knows a text of its own, which may leave the target's."""

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        return super().run(work, inputs)


def pipeline(
    strategy: str,
    target: Sequence[int],
    script: Script,
    *,
    stages: int,
    prompt: int = 2,
    middles: Sequence[Callable[[], Any]] = (),
    costs: Costs = UNIT,
    tap: Tap | None = None,
) -> Simulation:
    """A run of ``strategy`` to its end; the first ``prompt`` tokens of ``target`` are
    the prompt.
    """
    limits = Limits(stages, 512, 128, frozenset(), middles=len(middles))
    nodes: dict[str, Any] = {"d0": (DraftMachine(limits, build), ScriptedDrafter(script))}
    for stage in range(1, stages + 1):
        nodes[stage_node(stage)] = (StageMachine(stage, stages), OracleStage({"j": target}))
    for model, make in enumerate(middles, 1):
        nodes[middle_node(model)] = (StageMachine(1, stages, middle=model), make())
    simulation = Simulation(nodes, costs, tap=tap)
    spec = JobSpec(
        prompt_ids=tuple(target[:prompt]), max_new_tokens=len(target) - prompt, strategy=strategy
    )
    simulation.post("d0", Envelope(SCHEDULER, 1, Submit("j", 1, tuple(spec.fields().items()))))
    simulation.run()
    assert simulation.jobs["j"].tokens == list(target[prompt:])
    return simulation


def commits(simulation: Simulation) -> list[tuple[float, int]]:
    """When tokens were committed, and how many at that moment."""
    record = simulation.jobs["j"].committed_at
    before = [0, *(count for _, count in record)]
    return [(when, count - earlier) for (when, count), earlier in zip(record, before, strict=False)]
