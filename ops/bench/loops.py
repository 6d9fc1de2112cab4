"""Loops of many jobs in simulation: so many at once, or arriving by a Poisson process.

The machines are the live ones under a virtual clock; the target's texts are known, and every text
is checked against them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.job.load import Governor
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.machine import Finish, Input, Output
from flowspec.core.run.limits import Limits
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import StateError
from flowspec.model.base import DraftExecutor
from flowspec.rehearse.compare.oracle import OracleStage
from flowspec.rehearse.compare.texts import Text
from flowspec.rehearse.simulator import Costs, RunRecord, Simulation
from flowspec.strategies import build

Commits = Sequence[tuple[float, int]]
"""Of a job: the time of each commit, seconds, and the tokens after it."""
#: Jobs that replace ended ones in a closed loop, for each that is in it, and the least number.
ROUNDS = 2
LEAST_JOBS = 12


@dataclass(frozen=True, slots=True)
class LoopSetup:
    """What the jobs run on. ``names``: of the jobs, with their texts."""

    limits: Limits
    costs: Costs
    drafter: DraftExecutor
    texts: Sequence[Text]

    def text(self, job: str) -> Text:
        """The text of a job that ``job_names`` names."""
        return self.texts[int(job[1:]) % len(self.texts)]


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """Figures of a loop; seconds of the virtual clock.

    ``tbt``: mean seconds between a job's tokens, ``tbt_p99`` over jobs. ``gap_p99``: over all
    pairs of a job's commits that follow each other. ``ttft``: mean. ``hit_rate``: mean over jobs.
    """

    tokens_per_second: float
    tbt: float
    tbt_p99: float
    gap_p99: float
    ttft: float
    hit_rate: float


def job_names(count: int) -> list[str]:
    """The names of a loop's first ``count`` jobs."""
    return [f"j{at}" for at in range(count)]


def jobs_of(loop: int) -> int:
    """All jobs of a closed loop of ``loop`` at once."""
    return loop + max(LEAST_JOBS, ROUNDS * loop)


def share_of(at: int, loop: int) -> float:
    """How much of its text a job of the first wave of ``loop`` jobs has."""
    return (at + 1) / loop


class Loop:
    """Jobs of ``strategy`` on ``setup``; ``governor``: None: the draft worker's own."""

    def __init__(self, setup: LoopSetup, strategy: str, governor: Governor | None = None) -> None:
        self._setup = setup
        self._strategy = strategy
        stages = setup.limits.stages
        draft = DraftMachine(setup.limits, build, governor=governor)
        nodes: dict[Address, Any] = {DRAFT: (draft, setup.drafter)}
        self._sequences: dict[str, Sequence[int]] = {}
        self._hidden: dict[str, Any] = {}
        for stage in range(1, stages + 1):
            executor = OracleStage(self._sequences, self._hidden)
            nodes[stage_address(stage)] = (StageMachine(stage, stages), executor)
        self._simulation = Simulation(nodes, setup.costs, tap=self._tap)
        self._tokens: dict[str, int] = {}
        self._submitted: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._left: list[str] = []

    def closed(self, jobs: int) -> LoopFigures:
        """``jobs`` at once: one that ends is replaced.

        Jobs of the first wave are shorter by even steps, so that later ones do not begin together.
        What counts is what happens between the end of the first wave and the last submission.
        """
        names = job_names(jobs_of(jobs))
        self._left = names[jobs:]
        for at, name in enumerate(names[:jobs]):
            self._submit(name, 0.0, share_of(at, jobs))
        self._simulation.run()
        end = max(self._submitted.values())
        return self._measured(min(end / 2, max(self._ended[name] for name in names[:jobs])), end)

    def opened(self, count: int, per_second: float, seed: int = 1) -> LoopFigures:
        """``count`` jobs at the times of a Poisson process; all of it counts."""
        drawn = random.Random(seed)
        at = 0.0
        for name in job_names(count):
            self._submit(name, at)
            at += drawn.expovariate(per_second)
        self._simulation.run()
        return self._measured(0.0, max(self._ended.values()))

    def submitted(self, times: Mapping[str, float]) -> Mapping[str, RunRecord]:
        """The records of jobs that are submitted at ``times``, by name."""
        for name, at in times.items():
            self._submit(name, at)
        self._simulation.run()
        self._check_texts()
        return self._simulation.jobs

    def _submit(self, name: str, at: float, share: float = 1.0) -> None:
        text = self._setup.text(name)
        tokens = max(2, round(len(text.output) * share))
        self._tokens[name] = tokens
        self._sequences[name] = (*text.prompt, *text.output)
        self._hidden[name] = text.hidden
        self._submitted[name] = at
        spec = JobSpec(
            prompt_ids=text.prompt,
            max_new_tokens=tokens,
            sampling=text.sampling,
            strategy=self._strategy,
        )
        self._simulation.submit(name, spec, at)

    def _tap(self, node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Finish):
                self._ended[output.run.job] = now
                if self._left:
                    self._submit(self._left.pop(0), now)

    def _check_texts(self) -> None:
        for name, record in self._simulation.jobs.items():
            if tuple(record.tokens) != self._setup.text(name).output[: self._tokens[name]]:
                raise StateError(f"{self._strategy}: the text of {name} differs: {record.finish}")

    def _measured(self, begin: float, end: float) -> LoopFigures:
        self._check_texts()
        records = self._simulation.jobs.values()
        return figures(
            [record.committed_at for record in records],
            [record.finish.stats for record in records if record.finish],
            begin,
            end,
        )


def figures(
    committed: Sequence[Commits], stats: Sequence[Mapping[str, Any]], begin: float, end: float
) -> LoopFigures:
    """The figures of jobs with these commits and stats, from ``begin`` to ``end``."""
    tokens = sum(tokens_until(its, end) - tokens_until(its, begin) for its in committed)
    within = [[entry for entry in its if begin <= entry[0] <= end] for its in committed]
    pairs = [(its[0], its[-1]) for its in within if len(its) > 1]
    means = [(last - first) / (after - before) for (first, before), (last, after) in pairs]
    gaps = [later[0] - at[0] for its in within for at, later in itertools.pairwise(its)]
    return LoopFigures(
        tokens / (end - begin),
        float(np.mean(means)),
        float(np.percentile(means, 99)),
        float(np.percentile(gaps, 99)),
        float(np.mean([known["ttft_seconds"] for known in stats])),
        float(np.mean([known["hit_rate"] or 0.0 for known in stats])),
    )


def tokens_until(commits: Commits, end: float) -> int:
    """Tokens that a job with these commits had at ``end``."""
    return max((count for at, count in commits if at <= end), default=0)
