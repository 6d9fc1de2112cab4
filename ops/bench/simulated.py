"""Runs under the virtual clock with the default pair's real acceptance, for the tables made of them.

The machines are the live ones. The target's text is computed once by plain decoding; drafts are the
drafter's own. A stage's pass costs 1 and links nothing; what drafting costs is the caller's to say.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from flowspec.cli.generate import read_prompts
from flowspec.core.draft import DraftMachine
from flowspec.core.jobs import JobSpec
from flowspec.core.limits import Limits
from flowspec.core.machine import Draft, Pass, Work
from flowspec.core.messages import SCHEDULER, Envelope, Submit, middle_node, stage_node
from flowspec.core.sampling import Sampling
from flowspec.core.stage import StageMachine
from flowspec.drivers.oracle import OracleStage
from flowspec.drivers.sim import UNIT, Costs, Simulation
from flowspec.model.base import DraftExecutor, StageExecutor
from flowspec.model.directory import ModelDirectory
from flowspec.strategies import build

PROMPTS = Path(__file__).parents[2] / "tests" / "data" / "prompts.jsonl"


@dataclass(frozen=True)
class Text:
    """A prompt and what the target makes of it; ``hidden`` are its rows after the final norm, if asked for."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sampling: Sampling
    hidden: Any = None


def per_pass(draft: float, middle: float = 1.0) -> Costs:
    """A stage's pass costs 1, a pass of the drafter over tree rows ``draft``, of a middle model ``middle``."""

    def work_cost(node: str, work: Work) -> float:
        if isinstance(work, Pass):
            return middle if node.startswith("m") else 1.0
        return draft if isinstance(work, Draft) and work.part.answers else 0.0

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
    """Stats of one run; SystemExit if the text that came out is not the target's."""
    names = list(middles or {})
    limits = Limits(
        stages, target.context, target.vocabulary, target.eos, middles=len(names), hidden=drafter.wants_hidden
    )  # fmt: skip
    nodes: dict[str, Any] = {"d0": (DraftMachine(limits, build), drafter)}
    sequences, hidden = {"j": (*text.prompt, *text.output)}, {"j": text.hidden}
    for stage in range(1, stages + 1):
        nodes[stage_node(stage)] = (StageMachine(stage, stages), OracleStage(sequences, hidden))
    for model, name in enumerate(names, 1):
        assert middles is not None
        nodes[middle_node(model)] = (StageMachine(1, stages, middle=model), middles[name]())
    simulation = Simulation(nodes, costs)
    spec = JobSpec(
        prompt_ids=text.prompt, max_new_tokens=len(text.output), sampling=text.sampling, strategy=strategy
    )  # fmt: skip
    simulation.post("d0", Envelope(SCHEDULER, 1, Submit("j", 1, tuple(spec.fields().items()))))
    simulation.run()
    record = simulation.jobs["j"]
    if tuple(record.tokens) != text.output or record.finish is None or record.finish.error:
        raise SystemExit(f"{strategy} did not give the target's text: {record.finish}")
    times = [when for when, _ in record.committed_at]
    waits = [after - before for before, after in itertools.pairwise(times)]
    starved = sum(wait - 1 for wait in waits if 1 < wait < stages - 1e-9)
    return {**record.finish.stats, "starved": starved}


def prompts_of(place: Path, per_file: int | None = None) -> list[str]:
    """Prompts of a JSON-lines file, or of every such file of a folder."""
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    return [prompt for file in files for prompt in read_prompts(file)[:per_file]]


def texts(
    prompts: Iterable[str], samplings: Sequence[Sampling], count: int, target: ModelDirectory, *, hidden: bool = False
) -> list[Text]:
    """The target's own text for every prompt and sampling."""
    import torch

    from flowspec.model.reference import Reference
    from flowspec.model.text import Tokenizer

    torch.set_num_threads(1)
    reference, tokenizer = Reference(target), Tokenizer(target)
    encoded = [tokenizer.encode(prompt, raw=False) for prompt in prompts]
    found = []
    for sampling in samplings:
        for prompt in encoded:
            if len(prompt) + count <= target.context:
                output = reference.decode(prompt, count, sampling)
                rows = reference.hidden((*prompt, *output)) if hidden else None
                found.append(Text(prompt, output, sampling, rows))
    return found
