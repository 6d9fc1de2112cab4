"""Plans against emulated runs: random heterogeneous clusters, predicted and run.

    python -m ops.bench.plan [--clusters 6] [--seed 1] [--tokens 32] [--count 4] [--stretch X]

A cluster has 3 to 6 boxes of random memory, bandwidth and compute, a 7B model with a 1.1B draft in
float16 and links of random latency. The plan is that of `flowspec plan --dry`: layers, order and
the draft's box. ``predicted``: time between tokens by the plan, simulated, with its allowance for
software.
``emulated``: real worker processes over Redis on the nominal clocks of the same boxes, software
charged. Both run the same prompts. A second table runs plans over fewer boxes than there are, and
plans over all of them; the plan calls fewer boxes faster if they are so by 10 percent. Runs in
which more than 1 percent of the inputs were overtaken are marked (refused). Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

from flowspec.errors import ConfigError, FlowSpecError
from flowspec.model.weights.directory import ModelDirectory, default_pair
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.shapes import ModelShapes, shapes_of
from flowspec.plan.boxes import DescribedBox
from flowspec.plan.drafts import PlannedDrafts
from flowspec.plan.estimate import timed
from flowspec.plan.layout import Layout, layouts
from flowspec.plan.needs import StageNeeds
from flowspec.plan.predict import (
    PLAIN,
    Predicted,
    Predictor,
    TargetRows,
    best_by_boxes,
    compared,
    fastest,
    token_seconds,
)
from flowspec.rehearse.compare.naming import drafter_of
from flowspec.rehearse.compare.texts import Text
from flowspec.rehearse.devices.profile import LinkShape
from ops.bench.emulate import OVERTAKEN_SHARE, EmulatedCluster, probe
from ops.bench.simulated import PROMPTS
from ops.bench.systems import chosen_prompts, show

STRATEGY = "auto"
SOURCE = "slm"
PRECISION = PRECISIONS["float16"]
CONTEXT = 2048
_GIB = 2.0**30
_TARGET = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
_DRAFT = {
    "model_type": "llama",
    "num_hidden_layers": 22,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
#: Memory in GiB, bandwidth in GB/s and compute in TFLOPS of the boxes drawn.
MEMORIES = (4, 8, 12, 16, 24)
BANDWIDTHS = (25.0, 50.0, 75.0, 100.0, 150.0)
COMPUTES = (3.0, 6.0, 9.0, 18.0)
LATENCIES_MS = (0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class RandomCluster:
    """Boxes that differ, and their links."""

    boxes: tuple[DescribedBox, ...]
    link: LinkShape

    def __str__(self) -> str:
        boxes = ", ".join(
            f"{box.memory / _GIB:g} GiB {box.bandwidth / 1e9:g} GB/s" for box in self.boxes
        )
        return f"{boxes}; {self.link.latency * 1e3:g} ms"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A cluster with its best layout by number of boxes."""

    cluster: RandomCluster
    best: Mapping[int, Predicted]
    rows: TargetRows

    @property
    def chosen(self) -> Predicted:
        return fastest(self.best, STRATEGY)


@dataclass(frozen=True, slots=True)
class EmulatedPlan:
    """A layout's seconds between tokens by strategy, emulated; ``mark``: of an invalid run."""

    seconds: Mapping[str, float]
    mark: str


def random_clusters(seed: int) -> Iterator[RandomCluster]:
    """Clusters without end, of 3 to 6 boxes."""
    draw = random.Random(seed)
    while True:
        boxes = tuple(
            DescribedBox(
                f"box-{number}",
                draw.choice(MEMORIES) * _GIB,
                draw.choice(BANDWIDTHS) * 1e9,
                draw.choice(COMPUTES) * 1e12,
            )
            for number in range(1, draw.randint(3, 6) + 1)
        )
        yield RandomCluster(boxes, LinkShape(draw.choice(LATENCIES_MS) / 1e3, 125e6))


def models() -> tuple[ModelShapes, PlannedDrafts]:
    """The planned target and its draft."""
    target, draft = (shapes_of(ModelDirectory(Path("plan"), one)) for one in (_TARGET, _DRAFT))
    return target, PlannedDrafts(SOURCE, {SOURCE: draft})


def found_layouts(
    cluster: RandomCluster, target: ModelShapes, drafts: PlannedDrafts
) -> dict[int, list[Layout]]:
    """The layouts of the cluster by number of boxes; empty: the model does not fit."""
    boxes = [timed(box, target, PRECISION, drafts.times(box, PRECISION)) for box in cluster.boxes]
    needs = StageNeeds(target, PRECISION, CONTEXT)
    return layouts(boxes, needs, SOURCE, drafts.size(PRECISION, CONTEXT))


def planned(
    cluster: RandomCluster,
    found: Mapping[int, Sequence[Layout]],
    hidden: int,
    predictor: Predictor,
) -> ClusterPlan:
    """The plan of ``cluster``."""
    rows = TargetRows(hidden, PRECISION.row_bytes("cpu"), cluster.link)
    return ClusterPlan(cluster, best_by_boxes(found, rows, predictor, STRATEGY), rows)


def emulated(
    layout: Layout,
    rows: TargetRows,
    strategies: Sequence[str],
    texts: Sequence[Text],
    stretch: float = 0.0,
    *,
    free: bool = False,
) -> EmulatedPlan:
    """``layout`` run by real workers; ``stretch`` 0: from a probe. ``free``: charge no software."""
    found = {}
    marks = []
    for strategy in strategies:
        profile = rows.profile(layout, strategy)
        stages = len(layout.stages)
        names = (default_pair()[0], drafter_of(SOURCE))
        slow = stretch or probe(texts[0], strategy, profile, stages, models=names, source=SOURCE)
        with EmulatedCluster(
            profile, stages, models=names, source=SOURCE, stretch=slow, free_software=free
        ) as cluster:
            done = cluster.run_all(texts, strategy)
        found[strategy] = token_seconds(done.runs)
        if done.counts.overtaken > OVERTAKEN_SHARE * done.counts.inputs:
            marks.append(strategy)
    return EmulatedPlan(found, f" (refused: {', '.join(marks)})" if marks else "")


def row(plan: ClusterPlan, ran: EmulatedPlan) -> str:
    """A row of the first table."""
    layout = plan.chosen.layout
    split = ", ".join(f"{stage.box.name} {len(stage.layers)}" for stage in layout.stages)
    cells = []
    for strategy in (PLAIN, STRATEGY):
        predicted, found = plan.chosen.seconds[strategy], ran.seconds[strategy]
        cells += [_ms(predicted), _ms(found), f"{found / predicted:.3f}"]
    where = f"{split}; draft {layout.draft.name}"
    return f"| {plan.cluster} | {where} | {' | '.join(cells)} |{ran.mark}"


def fewer_row(plan: ClusterPlan, many: int, few: EmulatedPlan, all_of: EmulatedPlan) -> str:
    """A row of the second table: the plan against the best over ``many`` boxes."""
    own, other = plan.chosen.seconds[STRATEGY], plan.best[many].seconds[STRATEGY]
    cells = [
        _ms(own),
        _ms(other),
        compared(own, other),
        _ms(few.seconds[STRATEGY]),
        _ms(all_of.seconds[STRATEGY]),
    ]
    boxes = f"{plan.chosen.layout.boxes} of {many}"
    return f"| {plan.cluster} | {boxes} | {' | '.join(cells)} |{few.mark}{all_of.mark}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clusters", type=int, default=6, help="random clusters (6)")
    parser.add_argument("--seed", type=int, default=1, help="of the clusters (1)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens per text (32)")
    parser.add_argument("--count", type=int, default=4, help="prompts, at most 6 (4)")
    parser.add_argument("--stretch", type=float, default=0.0, help="default: from a probe")
    try:
        run(parser.parse_args())
    except FlowSpecError as error:
        sys.exit(f"flowspec: {error}")


def run(given: argparse.Namespace) -> None:
    """Print both tables; ConfigError for counts below 1."""
    if min(given.clusters, given.count) < 1:
        raise ConfigError("--clusters and --count are 1 or more")
    target, drafts = models()
    predictor = Predictor(chosen_prompts(PROMPTS, 1)[: given.count], SOURCE, tokens=given.tokens)
    names = " | ".join(
        f"{strategy}: predicted, ms | emulated | ratio" for strategy in (PLAIN, STRATEGY)
    )
    show(f"| cluster | plan: layers by box | {names} |")
    show("|---|---|---|---|---|---|---|---|")
    fewer = []
    left = given.clusters
    for cluster in random_clusters(given.seed):
        found = found_layouts(cluster, target, drafts)
        if not found:
            continue
        plan = planned(cluster, found, target.hidden, predictor)
        ran = emulated(
            plan.chosen.layout, plan.rows, (PLAIN, STRATEGY), predictor.texts, given.stretch
        )
        show(row(plan, ran))
        most = max(plan.best)
        if plan.chosen.layout.boxes < most:
            whole = emulated(
                plan.best[most].layout, plan.rows, (STRATEGY,), predictor.texts, given.stretch
            )
            fewer.append(fewer_row(plan, most, ran, whole))
        left -= 1
        if not left:
            break
    show("\nWhere the plan leaves boxes out:\n")
    predicted = "fewer: predicted, ms | all: predicted | the plan says"
    show(f"| cluster | boxes | {predicted} | fewer: emulated | all |")
    show("|---|---|---|---|---|---|---|")
    show("\n".join(fewer))


if __name__ == "__main__":
    main()
