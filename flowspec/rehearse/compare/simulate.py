"""One run of one strategy under the virtual clock, with the real drafter's acceptance.

The machines are the live ones. The target's stages know their text
(``rehearse.compare.oracle``), so only the drafter computes. It is an
error if a run's output differs from the target's own text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec.core.job.draft_worker import Build, DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, middle_address, stage_address
from flowspec.core.run.history import History
from flowspec.core.run.limits import Limits
from flowspec.core.run.spec import JobSpec
from flowspec.core.session.strategy import Strategy
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import StateError
from flowspec.model.base import DraftExecutor, StageExecutor
from flowspec.model.drafters.drafter_choice import levels_of, wanting_hidden
from flowspec.model.weights.directory import ModelDirectory
from flowspec.rehearse.compare.oracle import OracleStage
from flowspec.rehearse.compare.texts import Text
from flowspec.rehearse.devices.profile import Profile
from flowspec.rehearse.simulator import Costs, RunRecord, Simulation, Tap
from flowspec.strategies import build

#: Name of the one job of a simulated run.
JOB = "j"


@dataclass(frozen=True, slots=True)
class Ran:
    """A simulated run: the job's ``stats``, and its commits as (seconds, tokens so far)."""

    stats: Mapping[str, Any]
    committed_at: tuple[tuple[float, int], ...]


def profile_costs(profile: Profile, stages: int, source: str, *, hidden: bool = False) -> Costs:
    """The costs of ``profile`` for a pipeline of ``stages`` that drafts with ``source``.

    ``hidden``: answers carry the target's hidden rows, for a draft head (``returns_hidden``).
    """
    profile.way.check(stages)
    latency = profile.link.latency
    return Costs(
        lambda node, work: profile.work_seconds(node, work, stages, source),
        lambda origin, target, _: 0.0 if origin == target else latency,
        lambda _, target, envelope: profile.transfer_seconds(target, envelope, hidden=hidden),
        exclusive=profile.link.exclusive,
        way=profile.way,
        hop=profile.hop,
    )


def returns_hidden(drafter: DraftExecutor, strategy: Strategy) -> bool:
    """Whether a job gets the target's hidden rows for ``drafter``, by the rule of its session."""
    eligible = strategy.eligible_drafters(wanting_hidden(drafter))
    return strategy.draft_width > 0 and any(eligible)


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
    make: Build = build,
) -> Ran:
    """Run ``strategy``; StateError if its output is not the target's text.

    ``middles``: the models of a chain between drafter and target, by name, smallest first.
    ``history``: measurements from earlier jobs, updated in place; None: this is the first.
    ``make``: gives the strategy of the text ``strategy``, which need not be a registered one.
    """
    sequences = {JOB: (*text.prompt, *text.output)}
    hidden = {JOB: text.hidden}
    executors = [OracleStage(sequences, hidden) for _ in range(stages)]
    makers = list((middles or {}).values())
    record = _completed(
        text, strategy, executors, target, drafter, costs, makers, tap, history, make
    )
    if tuple(record.tokens) != text.output:
        raise StateError(f"{strategy} did not give the target's text: {record.finish}")
    return _ran(record)


def simulate_stages(
    text: Text,
    strategy: str,
    stages: Sequence[StageExecutor],
    target: ModelDirectory,
    drafter: DraftExecutor,
    costs: Costs,
    tap: Tap | None = None,
) -> tuple[Ran, tuple[int, ...]]:
    """Run ``strategy`` on the target's real ``stages``; its output ids come second.

    Nothing is compared: a lossy strategy may give another text than the target's. Of ``text``, the
    prompt, the sampling and the length of the output are used.
    """
    record = _completed(text, strategy, stages, target, drafter, costs, (), tap)
    return _ran(record), tuple(record.tokens)


def _ran(record: RunRecord) -> Ran:
    assert record.finish is not None
    return Ran(record.finish.stats, tuple(record.committed_at))


def _completed(
    text: Text,
    strategy: str,
    executors: Sequence[StageExecutor],
    target: ModelDirectory,
    drafter: DraftExecutor,
    costs: Costs,
    makers: Sequence[Callable[[], StageExecutor]],
    tap: Tap | None = None,
    history: History | None = None,
    make: Build = build,
) -> RunRecord:
    """The record of a run that ended without an error; StateError otherwise."""
    stages = len(executors)
    wanting = wanting_hidden(drafter)
    limits = Limits(
        stages,
        target.context,
        target.vocabulary,
        target.eos,
        middles=len(makers),
        hidden=wanting[0],
        others=wanting[1:],
        levels=levels_of(drafter),
    )
    nodes: dict[Address, Any] = {DRAFT: (DraftMachine(limits, make, history), drafter)}
    for stage, executor in enumerate(executors, 1):
        nodes[stage_address(stage)] = (StageMachine(stage, stages), executor)
    for model, load in enumerate(makers, 1):
        nodes[middle_address(model)] = (StageMachine(1, stages, middle=model), load())
    simulation = Simulation(nodes, costs, tap=tap)
    spec = JobSpec(
        prompt_ids=text.prompt,
        max_new_tokens=len(text.output),
        sampling=text.sampling,
        strategy=strategy,
    )
    simulation.submit(JOB, spec)
    simulation.run()
    record = simulation.jobs[JOB]
    if record.finish is None or record.finish.error:
        raise StateError(f"{strategy} did not give the target's text: {record.finish}")
    return record
