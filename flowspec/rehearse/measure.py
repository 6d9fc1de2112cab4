"""A profile of this machine: blocks and drafters timed on one core, written as TOML.

Times are CPU time of the one torch thread, medians of repeats interleaved over the row counts: the
time on a core that is not shared. Links are not measured but given. A drafter's pass is timed as a
whole, proposals included.
"""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError
from flowspec.model.base import DraftExecutor, DraftsBlocks, RowArray
from flowspec.model.drafters.kinds import BLOCK, NGRAM, kind_of
from flowspec.model.drafters.sources import (
    load_sources,
    open_models,
    source_names,
    target_needs,
)
from flowspec.model.timing import (
    MEASURED,
    Call,
    block_pass,
    context_of,
    medians,
    prompt_part,
    random_rows,
    siblings,
)
from flowspec.model.weights.directory import (
    ModelDirectory,
    absolute_name,
    all_tensors,
    fetch_weights,
    layer_ranges,
)
from flowspec.model.weights.precision import AUTO, check_dtype
from flowspec.rehearse.compare.naming import PACKAGED
from flowspec.rehearse.devices.profile import LinkShape, Profile, Times

#: Candidates per row, the width of FlowSpec's beam (docs/algorithms.md#flowspec).
WIDTH = 10
_MEGABIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """What to measure: passes over each number in ``rows`` after a context, ``repeats`` times each.

    The blocks are those of a pipeline of ``stages``. ``latency_ms`` and ``mbit``: the links to
    write into the profile. ``dtype`` and ``draft_dtype``: precisions of the target and the
    drafters, on a CPU. ConfigError for a count below 1, no rows, an unknown precision, or an
    invalid link.
    """

    rows: tuple[int, ...] = (1, 4, 16, 64)
    stages: int = 4
    repeats: int = 15
    latency_ms: float = 0.2
    mbit: float = 1000.0
    dtype: str = AUTO
    draft_dtype: str = AUTO

    def __post_init__(self) -> None:
        for dtype in (self.dtype, self.draft_dtype):
            check_dtype(dtype)
        if not self.rows or min(self.rows) < 1:
            raise ConfigError(f"rows is {list(self.rows)}; expected counts of 1 or more")
        if self.repeats < 1:
            raise ConfigError(f"repeats is {self.repeats}; expected 1 or more")
        _ = self.link

    @property
    def link(self) -> LinkShape:
        """The links in a profile's units."""
        return LinkShape(self.latency_ms / 1e3, self.mbit * _MEGABIT)


def measure(
    target: str, drafts: str, plan: MeasurementPlan, tell: Callable[[str], None] = lambda what: None
) -> Profile:
    """Profile ``target`` and each of ``drafts`` (joined by ``+`` or ``:``), under ``measured``.

    ``tell`` is called with the name of what is timed next. Errors as ``open_models``'s;
    ConfigError for two drafters of one kind.
    """
    import torch

    from flowspec.model.layers.placing import place

    torch.set_num_threads(1)
    open_models(target, drafts)
    names = _by_kind(drafts)
    directory = fetch_weights(target, partial(_needs, plan=plan, drafts=drafts))
    placing = place(plan.dtype, "cpu", directory.config)
    tell(f"the layers and the head of {directory.path.name}")
    layer, head, last = _stage_times(directory, plan, placing)
    drafters = {}
    for kind, name in names.items():
        tell(f"the drafter {name}")
        drafter = load_sources(name, directory, dtype=plan.draft_dtype)
        drafters[kind] = _drafter_times(drafter, directory, plan)
    return Profile(
        "measured",
        f"{Path(target).name} in {placing.precision} and {drafts}, on one core",
        f"measured: {platform.machine()}, torch {torch.__version__}, one thread; links as given",
        directory.layers,
        directory.hidden_size,
        placing.rows.itemsize,
        layer,
        head,
        drafters,
        plan.link,
        (plan.stages,),
        anchors={
            "last_stage_layers": len(layer_ranges(directory.layers, plan.stages)[-1]),
            "last_stage_ms": last,
        },
        models=_models(target, names),
    )


def as_toml(profile: Profile, plan: MeasurementPlan) -> str:
    """``profile`` as TOML for ``profiles.load``, milliseconds to four digits."""
    drafters = "\n".join(f"{kind} = {_points(times)}" for kind, times in profile.drafters.items())
    anchors = "\n".join(f"{name} = {value:.4g}" for name, value in profile.anchors.items())
    named = [f"{name} = {json.dumps(model)}\n" for name, model in profile.models.items()]
    models = "\n[models]\n" + "".join(named) if named else ""
    return f"""\
# Made by `flowspec profile`: CPU time of one torch thread, medians of {plan.repeats}; a table never
# falls, so a median below that of fewer rows is raised to it. A layer's time is that of a block of
# the longest stage's layers, divided. The link was not measured: both its numbers were given, or
# are the defaults of the command. Anchor: the last stage's block and head, timed together at the
# fewest rows.
summary = {json.dumps(profile.summary)}
source = {json.dumps(profile.source)}
stages = {list(profile.stages)}

[target]
layers = {profile.layers}
hidden = {profile.hidden}
value_bytes = {profile.value_bytes}
layer_ms = {_points(profile.layer)}
head_ms = {_points(profile.head)}

[drafters]
{drafters}
{models}
[link]
latency_ms = {plan.latency_ms:g}
mbit = {plan.mbit:g}

[anchors]
{anchors}
"""


def _models(target: str, drafters: Mapping[str, str]) -> dict[str, str]:
    """The measured models by their names in a profile; empty: they are the packaged ones."""
    measured = {kind: absolute_name(name) for kind, name in {"target": target, **drafters}.items()}
    if all(absolute_name(PACKAGED.get(kind, "")) == name for kind, name in measured.items()):
        return {}
    return {kind: name for kind, name in measured.items() if kind not in (NGRAM, BLOCK.name)}


def _points(times: Times) -> str:
    return "{" + ", ".join(f"{rows} = {seconds * 1e3:.4g}" for rows, seconds in times.points) + "}"


def _by_kind(drafts: str) -> dict[str, str]:
    """The drafters' names by their kind in a profile."""
    kinds: dict[str, str] = {}
    for name in source_names(drafts):
        kind = _kind(name)
        if kind in kinds:
            raise ConfigError(
                f"{kinds[kind]} and {name} are both of kind {kind}; a profile has one of each kind"
            )
        kinds[kind] = name
    return kinds


def _kind(name: str) -> str:
    return NGRAM if name == NGRAM else kind_of(fetch_weights(name, all_tensors)).name


def _needs(directory: ModelDirectory, plan: MeasurementPlan, drafts: str) -> tuple[str, ...]:
    """Prefixes of the target's tensors to load: two blocks, and those that drafters share."""
    from flowspec.model.layers.block import tensor_prefixes

    ranges = layer_ranges(directory.layers, plan.stages)
    blocks = tensor_prefixes(directory, ranges[0]) + tensor_prefixes(directory, ranges[-1])
    return blocks + target_needs(drafts)(directory)


def _stage_times(
    directory: ModelDirectory, plan: MeasurementPlan, placing: Any
) -> tuple[Times, Times, float]:
    """Times of one layer and of the head with its norm; ms of the last stage at the fewest rows."""
    import torch

    from flowspec.model.layers.block import LayerBlock

    ranges = layer_ranges(directory.layers, plan.stages)
    inner = LayerBlock(directory, ranges[0], first=False, last=False, placing=placing)
    ending = LayerBlock(directory, ranges[-1], first=False, last=True, placing=placing)

    @torch.inference_mode()
    def norm_and_head(given: RowArray) -> object:
        return ending.logits(ending.body.norm(torch.from_numpy(given).to(placing.rows)))

    calls: dict[tuple[str, int], Call] = {}
    for rows in plan.rows:
        given = random_rows(rows, directory.hidden_size)
        calls["layers", rows] = block_pass(inner, directory, given)
        calls["head", rows] = partial(norm_and_head, given)
    fewest = min(plan.rows)
    last_pass = block_pass(ending, directory, random_rows(fewest, directory.hidden_size))
    calls["last", fewest] = lambda: ending.logits(last_pass())
    seconds = medians(calls, plan.repeats)
    layer = {rows: seconds["layers", rows] / len(ranges[0]) for rows in plan.rows}
    head = {rows: seconds["head", rows] for rows in plan.rows}
    return rising(layer), rising(head), seconds["last", fewest] * 1e3


def _drafter_times(
    drafter: DraftExecutor, directory: ModelDirectory, plan: MeasurementPlan
) -> Times:
    context = context_of(directory)
    # A block drafter computes a block of rows for each row that is asked.
    block = 1 + (drafter.levels if isinstance(drafter, DraftsBlocks) else 0)
    capacity = context + block + max(plan.rows)
    drafter.allocate(MEASURED, capacity, Sampling(), Returns(hidden=drafter.wants_hidden))
    if drafter.wants_hidden:
        drafter.learn(MEASURED, range(context), random_rows(context, directory.hidden_size))
    drafter.run(Draft(prompt_part(directory), WIDTH))

    def draft(rows: int) -> Call:
        work = Draft(siblings(directory, -(-rows // block)), WIDTH)
        return lambda: drafter.run(work)

    seconds = medians({("draft", rows): draft(rows) for rows in plan.rows}, plan.repeats)
    drafter.release(MEASURED)
    return rising({rows: seconds["draft", rows] for rows in plan.rows})


def rising(seconds: Mapping[int, float]) -> Times:
    """Times by rows; a time below that of fewer rows is noise and raised to it."""
    rows = sorted(seconds)
    return Times(
        tuple(zip(rows, itertools.accumulate((seconds[count] for count in rows), max), strict=True))
    )
