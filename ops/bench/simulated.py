"""Simulated runs with the default pair's real acceptance, for the benchmarks' tables.

The machines are the live ones. The target's text is computed once by plain decoding; the drafter
drafts. A stage's pass costs 1 and a link nothing; the caller sets the cost of drafting.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from flowspec.cli.generate import read_prompts
from flowspec.core.protocol.addresses import Address, Role
from flowspec.core.protocol.work import DraftPass, Pass, Work
from flowspec.errors import StateError
from flowspec.model.base import DraftExecutor, StageExecutor
from flowspec.model.weights.directory import ModelDirectory
from flowspec.rehearse.compare import simulate as testbed
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.simulator import UNIT, Costs

__all__ = ["PROMPTS", "Text", "per_pass", "prompts_of", "simulate", "texts"]

PROMPTS = Path(__file__).parents[2] / "tests" / "data" / "prompts.jsonl"


def per_pass(draft: float, middle: float = 1.0) -> Costs:
    """Pass costs: of a stage 1, of the drafter with tree rows ``draft``, of a middle ``middle``."""

    def work_cost(node: Address, work: Work) -> float:
        if isinstance(work, Pass):
            return middle if node.role is Role.MIDDLE else 1.0
        answers = isinstance(work, DraftPass) and any(one.part.answers for one in work.drafts)
        return draft if answers else 0.0

    return Costs(work_cost)


def simulate(
    text: Text,
    strategy: str,
    stages: int,
    target: ModelDirectory,
    drafter: DraftExecutor,
    costs: Costs = UNIT,
    middles: Mapping[str, Callable[[], StageExecutor]] | None = None,
) -> dict[str, Any]:
    """Stats of one run; SystemExit if its text is not the target's."""
    try:
        ran = testbed.simulate(text, strategy, stages, target, drafter, costs, middles)
    except StateError as error:
        raise SystemExit(str(error)) from None
    waits = [after - before for (before, _), (after, _) in itertools.pairwise(ran.committed_at)]
    starved = sum(wait - 1 for wait in waits if 1 < wait < stages - 1e-9)
    return {**ran.stats, "starved": starved}


def prompts_of(place: Path, per_file: int | None = None) -> list[str]:
    """Prompts of a JSON-lines file, or of all such files in a folder."""
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    return [prompt for file in files for prompt in read_prompts(file)[:per_file]]
