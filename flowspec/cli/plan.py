"""``flowspec plan``: which box gets which layers, and what that would give."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from flowspec.cli.bench import prompts_in
from flowspec.cli.outputs import check_writable, write
from flowspec.cli.show import console
from flowspec.errors import ConfigError
from flowspec.model.drafters.kinds import default_draft
from flowspec.model.drafters.sources import placed_absolutely
from flowspec.model.weights.directory import ModelDirectory, absolute_name, default_pair
from flowspec.model.weights.precision import AUTO, PRECISIONS, Precision, declared
from flowspec.observe import note
from flowspec.plan.boxes import EXPECTED, TimedBox, parse_boxes
from flowspec.plan.cluster_file import ClusterFile, ClusterStage, write_cluster
from flowspec.plan.drafts import planned_drafts
from flowspec.plan.estimate import drafter_precision, timed
from flowspec.plan.fit import gib, unfit
from flowspec.plan.layout import Layout, layouts
from flowspec.plan.needs import StageNeeds
from flowspec.rehearse.devices.profile import LinkShape
from flowspec.strategies import build
from flowspec.transport.base import command_of

if TYPE_CHECKING:
    from flowspec.model.weights.shapes import ModelShapes
    from flowspec.plan.measured_boxes import Measuring
    from flowspec.plan.predict import Predicted

#: Tokens of a text if the model takes more and no context is given.
DEFAULT_CONTEXT = 4096
#: Rows whose passes are shown: a token, a segment, a large tree.
SHOWN_ROWS = (1, 16, 64)
#: Every how many packaged prompts one is simulated.
_STEP = 3
_MEGABIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The flags of ``plan``; None: the default."""

    model: str | None
    dry: bool
    boxes: str | None
    draft: str | None
    dtype: str
    context: int | None
    link_ms: float
    mbit: float
    strategy: str
    acceptance: float | None
    jobs: int
    out: Path
    url: str | None

    @property
    def link(self) -> LinkShape:
        """The links that are given."""
        return LinkShape(self.link_ms / 1e3, self.mbit * _MEGABIT)

    @property
    def target(self) -> str:
        """The model to plan for; the packaged one if none is given."""
        return self.model or default_pair()[0]


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """The boxes and links a plan is for, and how their times were found."""

    boxes: tuple[TimedBox, ...]
    link: LinkShape
    how: str


def plan(request: PlanRequest) -> None:
    """Plan, print the plan and write the cluster file; ConfigError if nothing fits."""
    from flowspec.model.weights.shapes import read_config, shapes_of
    from flowspec.plan.measured_boxes import Measuring
    from flowspec.plan.predict import Predictor, best_by_boxes, fastest, target_rows

    check_writable("--out", request.out)
    build(request.strategy, 1)
    with console(stderr=True).status("reading the configuration") as line:
        directory = read_config(request.target)
        shapes = shapes_of(directory)
        precision = _precision(request, directory)
        drafts = planned_drafts(_draft(request), shapes)
        context = _context(request.context, shapes)
        needs = StageNeeds(shapes, precision, context, request.jobs)
        what = Measuring(directory, shapes, precision, drafts)
        cluster = _cluster(request, what, line.update)
        found = layouts(cluster.boxes, needs, drafts.source, drafts.size(precision, context))
        if not found:
            raise ConfigError(unfit(request.target, cluster.boxes, needs, drafts))
        prompts = [prompt.text for prompt in prompts_in(None)][::_STEP]
        predictor = Predictor(prompts, drafts.source, request.acceptance)
        rows = target_rows(shapes, precision, cluster.link)
        best = best_by_boxes(found, rows, predictor, request.strategy, line.update)
    if request.context is None and context < shapes.context:
        note(
            f"a text takes at most {context} of the model's {shapes.context} tokens; --context N "
            "plans for others"
        )
    chosen = fastest(best, request.strategy)
    _show(request, cluster, best, chosen)
    _write(request, cluster, chosen.layout, precision, context)


def _draft(request: PlanRequest) -> str:
    return default_draft(request.target) if request.draft is None else request.draft


def _precision(request: PlanRequest, directory: ModelDirectory) -> Precision:
    """The precision of the plan; auto: what the checkpoint declares."""
    if request.dtype != AUTO:
        return PRECISIONS[request.dtype]
    return PRECISIONS.get(declared(directory.config), PRECISIONS["bfloat16"])


def _context(given: int | None, shapes: ModelShapes) -> int:
    if given is None:
        return min(DEFAULT_CONTEXT, shapes.context)
    if not 1 <= given <= shapes.context:
        raise ConfigError(
            f"--context is {given}; expected 1 to {shapes.context}, for which the model was trained"
        )
    return given


def _cluster(request: PlanRequest, what: Measuring, tell: Callable[[str], None]) -> PlannedCluster:
    """The boxes, described, this machine's, or those that wait at the broker."""
    if request.dry:
        return _described(request, what)
    from flowspec.plan.measured_boxes import local_boxes, probed_boxes

    if request.url is not None:
        if request.boxes is not None:
            raise ConfigError(
                "--boxes is for --dry plans and this machine, and --redis-url for boxes that run "
                "a probe: leave out the one or the other"
            )
        boxes, link = probed_boxes(what, request.url, tell)
        return PlannedCluster(boxes, link, f"measured on {len(boxes)} boxes, medians of passes")
    match = re.fullmatch(r"local:([1-9]\d{0,2})", request.boxes or "", re.ASCII)
    if match is None:
        raise ConfigError(
            "what is to be measured? expected --boxes local:N, --redis-url of a broker at which "
            "boxes run `python -m workers.probe`, or --dry with described boxes"
        )
    boxes, link = local_boxes(what, int(match[1]), tell)
    return PlannedCluster(boxes, link, "measured on this machine, medians of passes")


def _described(request: PlanRequest, what: Measuring) -> PlannedCluster:
    if request.boxes is None:
        raise ConfigError(f"--dry needs --boxes; {EXPECTED}")
    boxes = tuple(
        timed(box, what.shapes, what.precision, what.drafts.times(box, what.precision))
        for box in parse_boxes(request.boxes)
    )
    return PlannedCluster(boxes, request.link, "estimated from --boxes; nothing was measured")


def _show(
    request: PlanRequest,
    cluster: PlannedCluster,
    best: Mapping[int, Predicted],
    chosen: Predicted,
) -> None:
    shown = console()
    shown.print(f"Times are {cluster.how}.", markup=False)
    shown.print(_table(chosen.layout))
    unused = [box.name for box in cluster.boxes if box.name not in _serving(chosen.layout)]
    if unused:
        shown.print(f"not used: {', '.join(unused)}", markup=False)
    for name, seconds in chosen.seconds.items():
        shown.print(
            f"{name:<16}{seconds * 1e3:9.2f} ms per token{1 / seconds:9.1f} tokens/s, simulated",
            markup=False,
        )
    shown.print(_assumed(request), markup=False)
    for line in _fewer(best, chosen, request.strategy):
        shown.print(line, markup=False)


def _table(layout: Layout) -> Table:
    columns = ("part", "box", "layers", "needs", "has", *(f"ms at {rows}" for rows in SHOWN_ROWS))
    table = Table(*columns, box=None, pad_edge=False)
    for number, stage in enumerate(layout.stages, start=1):
        block = layout.block(number, drafting=False)
        head = layout.head(drafting=False) if number == len(layout.stages) else None
        passes = [block.at(rows) + (head.at(rows) if head else 0.0) for rows in SHOWN_ROWS]
        layers = f"{stage.layers.start}-{stage.layers.stop}"
        has = gib(stage.box.memory)
        table.add_row(
            f"stage {number}", stage.box.name, layers, gib(stage.needs), has, *_ms(passes)
        )
    drafters = layout.drafters(drafting=False).values()
    passes = [sum(times.at(rows) for times in drafters) for rows in SHOWN_ROWS]
    needs, has = gib(layout.draft_needs), gib(layout.draft.memory)
    table.add_row("draft", layout.draft.name, "-", needs, has, *_ms(passes))
    return table


def _ms(seconds: Sequence[float]) -> list[str]:
    return [f"{second * 1e3:.2f}" for second in seconds]


def _serving(layout: Layout) -> set[str]:
    return {layout.draft.name, *(stage.box.name for stage in layout.stages)}


def _assumed(request: PlanRequest) -> str:
    if request.acceptance is not None:
        return (
            f"{request.strategy} assumes that a drafted token is right with probability "
            f"{request.acceptance:g}."
        )
    return (
        f"{request.strategy} assumes the acceptance of the packaged drafters; "
        "give your own by --acceptance."
    )


def _fewer(best: Mapping[int, Predicted], chosen: Predicted, strategy: str) -> list[str]:
    """A line for every larger number of boxes, all of which are slower."""
    from flowspec.plan.predict import compared

    boxes = chosen.layout.boxes
    own = chosen.seconds[strategy]
    count = "1 box" if boxes == 1 else f"{boxes} boxes"
    return [
        f"{count} would be {compared(own, other.seconds[strategy])} {more}: "
        f"{own * 1e3:.2f} ms per token against {other.seconds[strategy] * 1e3:.2f}"
        for more, other in best.items()
        if more > boxes
    ]


def _write(
    request: PlanRequest,
    cluster: PlannedCluster,
    layout: Layout,
    precision: Precision,
    context: int,
) -> None:
    stages = tuple(
        ClusterStage(stage.box.name, stage.layers, precision.name, stage.box.device)
        for stage in layout.stages
    )
    planned = ClusterFile(
        absolute_name(request.target),
        placed_absolutely(_draft(request)),
        layout.draft.name,
        context,
        stages,
        cluster.link,
        drafter_precision(precision).name,
    )
    instead = " in place of the one there was" if request.out.exists() else ""
    remarks = ["Made by `flowspec plan`.", f"Times are {cluster.how}."]
    write("--out", request.out, write_cluster(planned, remarks))
    lines = [
        f"wrote {request.out}{instead}; to start it on this machine alone:",
        f"  flowspec up --cluster {request.out}",
        "or on each box, with FLOWSPEC_REDIS_URL set to the broker's URL:",
        f"  any box: {command_of('scheduler')} --cluster {request.out}",
        f"  {layout.draft.name}: {command_of('draft')}",
        *(
            f"  {stage.box.name}: {command_of(f'verify-{number}')}"
            for number, stage in enumerate(layout.stages, start=1)
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
