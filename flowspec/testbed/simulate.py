"""One run of one strategy under the virtual clock, with the real drafter's acceptance.

The machines are the live ones; the target's stages know their text (``drivers.oracle``), so that
only the drafter computes. What a run gives out is compared with the target's own text: a
difference is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.job.strategy import Strategy
from flowspec.core.protocol.messages import SCHEDULER, Envelope, Submit, middle_node, stage_node
from flowspec.core.run.history import History
from flowspec.core.run.limits import Limits
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.drivers.oracle import OracleStage
from flowspec.drivers.sim import Costs, Simulation, Tap
from flowspec.emulation.profile import Profile
from flowspec.errors import StateError
from flowspec.model.base import DraftExecutor, StageExecutor
from flowspec.model.choice import wanting_hidden
from flowspec.model.directory import ModelDirectory
from flowspec.strategies import build
from flowspec.testbed.texts import Text

#: Name of the one job of a simulated run.
JOB = "j"


@dataclass(frozen=True, slots=True)
class Ran:
    """A simulated run: its ``stats`` as of any job, and when how many tokens were out (seconds,
    count).
    """

    stats: Mapping[str, Any]
    committed_at: tuple[tuple[float, int], ...]


def profile_costs(profile: Profile, stages: int, source: str, *, hidden: bool = False) -> Costs:
    """What ``profile`` says of a pipeline of ``stages`` that drafts with ``source``.

    ``hidden``: answers carry the target's rows, for a draft head (``returns_hidden``).
    """
    latency = profile.link.latency
    return Costs(
        lambda node, work: profile.work_seconds(node, work, stages, source),
        lambda origin, target, _: 0.0 if origin == target else latency,
        lambda _, target, envelope: profile.transfer_seconds(target, envelope, hidden=hidden),
    )


def returns_hidden(drafter: DraftExecutor, strategy: Strategy) -> bool:
    """Whether a job of ``strategy`` has the target's rows returned for ``drafter``, as its session
    decides.
    """
    return strategy.width > 0 and any(strategy.among(wanting_hidden(drafter)))


def simulate(
    text: Text,
    strategy: str,
    stages: int,
    target: ModelDirectory,
    drafter: DraftExecutor,
    costs: Costs,
    middles: Mapping[str, Callable[[], StageExecutor]] | None = None,
    tap: Tap | None = None,
    history: History | None = None,
) -> Ran:
    """Run ``strategy``; StateError if the text that came out is not the target's.

    ``middles``: the models of a chain between drafter and target, by name, smallest first.
    ``history``: what the cluster knows from jobs before; None: this is its first.
    """
    makers = list((middles or {}).values())
    wanting = wanting_hidden(drafter)
    limits = Limits(
        stages,
        target.context,
        target.vocabulary,
        target.eos,
        middles=len(makers),
        hidden=wanting[0],
        others=wanting[1:],
    )
    nodes: dict[str, Any] = {"d0": (DraftMachine(limits, build, history), drafter)}
    sequences = {JOB: (*text.prompt, *text.output)}
    hidden = {JOB: text.hidden}
    for stage in range(1, stages + 1):
        nodes[stage_node(stage)] = (StageMachine(stage, stages), OracleStage(sequences, hidden))
    for model, make in enumerate(makers, 1):
        nodes[middle_node(model)] = (StageMachine(1, stages, middle=model), make())
    simulation = Simulation(nodes, costs, tap=tap)
    spec = JobSpec(
        prompt_ids=text.prompt,
        max_new_tokens=len(text.output),
        sampling=text.sampling,
        strategy=strategy,
    )
    simulation.post("d0", Envelope(SCHEDULER, 1, Submit(JOB, 1, tuple(spec.fields().items()))))
    simulation.run()
    record = simulation.jobs[JOB]
    if tuple(record.tokens) != text.output or record.finish is None or record.finish.error:
        raise StateError(f"{strategy} did not give the target's text: {record.finish}")
    return Ran(record.finish.stats, tuple(record.committed_at))
