"""A pipeline whose target and drafter follow a script, for readable golden tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import Address, middle_address, stage_address
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Pass, PassDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.model.base import DraftsAlone, RowArray
from flowspec.rehearse.compare.oracle import OracleStage
from flowspec.rehearse.simulator import UNIT, Costs, Simulation, Tap
from flowspec.strategies import build
from tests.addresses import D0

#: By a path's last token: the proposals after it, with values.
Script = Mapping[int, Sequence[tuple[int, float]]]


class ScriptedDrafter(DraftsAlone):
    """Proposes by the last token alone; after a token that is not in the script, token 99."""

    wants_hidden = False

    def __init__(self, script: Script) -> None:
        self._script = script

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        """It keeps no rows."""

    def release(self, run: RunKey) -> None:
        """It keeps no rows."""

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        raise AssertionError("not a draft head")

    def run(self, work: Draft) -> DraftDone:
        found = [
            list(self._script.get(work.part.tokens[row], [(99, -1.0)]))[: work.width]
            for row in work.part.answers
        ]
        tokens = tuple(tuple(token for token, _ in entries) for entries in found)
        return DraftDone(tokens, tuple(tuple(value for _, value in entries) for entries in found))


class ScriptedMiddle(OracleStage):
    """A middle model with its own text, which may diverge from the target's."""

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
    """Run ``strategy`` to its end; the first ``prompt`` tokens of ``target`` are the prompt."""
    limits = Limits(stages, 512, 128, frozenset(), middles=len(middles))
    nodes: dict[Address, Any] = {D0: (DraftMachine(limits, build), ScriptedDrafter(script))}
    for stage in range(1, stages + 1):
        nodes[stage_address(stage)] = (StageMachine(stage, stages), OracleStage({"j": target}))
    for model, make in enumerate(middles, 1):
        nodes[middle_address(model)] = (StageMachine(1, stages, middle=model), make())
    simulation = Simulation(nodes, costs, tap=tap)
    spec = JobSpec(
        prompt_ids=tuple(target[:prompt]), max_new_tokens=len(target) - prompt, strategy=strategy
    )
    simulation.submit("j", spec)
    simulation.run()
    assert simulation.jobs["j"].tokens == list(target[prompt:])
    return simulation


def commits(simulation: Simulation) -> list[tuple[float, int]]:
    """Times of commits, and the number of tokens in each."""
    record = simulation.jobs["j"].committed_at
    before = [0, *(count for _, count in record)]
    return [(when, count - earlier) for (when, count), earlier in zip(record, before, strict=False)]
