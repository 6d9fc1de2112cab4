"""A verify worker, ``python -m workers.verify --stage 2``; its settings are in the record."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from flowspec.core.prefixes.kept_prefixes import most_blocks
from flowspec.core.protocol.addresses import stage_address
from flowspec.core.protocol.lease import ROW_SECONDS
from flowspec.core.run.limits import BLOCK_ROWS, CONTIGUOUS, PAGED, STORES
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import ClaimError, ConfigError
from flowspec.model.base import ROW, HasFacts, HasRoom, StageExecutor, placed
from flowspec.model.empty_stage import PassingStage
from flowspec.model.layers.taps import Taps
from flowspec.model.weights.directory import ModelDirectory, layer_range, open_directory
from flowspec.model.weights.precision import PRECISIONS, of_stage
from flowspec.observe import logger, note
from flowspec.plan.fit import gib
from flowspec.plan.needs import StageNeeds
from flowspec.roles.lease import WAS_SPARE, Lease
from flowspec.roles.performers import VerifyPerformer
from flowspec.start.boot import (
    SPARE,
    Facts,
    Process,
    add_placing,
    make_worker,
    parser,
    run,
    stage_number,
)
from flowspec.start.models import context_of, kept_rows_of, located, open_stage, open_tapping
from flowspec.start.wiring import Wiring, add_rows, serve_wired
from flowspec.transport.base import FREE, NEEDS, role_of

#: A prefix no tensor has: a stage without layers reads none.
NO_WEIGHTS = "none"
#: Gives the executor of a stage's layers, as ``load_layers`` does.
Load = Callable[
    [
        ModelDirectory,
        range,
        tuple[str, str],
        tuple[Taps | None, ModelDirectory | None],
        int,
    ],
    tuple[StageExecutor, Callable[[], float] | None],
]


class _Stage(NamedTuple):
    """A loaded stage. ``model_seconds``: CPU seconds in its model so far; None: not measured.

    ``row_seconds``: that a lone row takes.
    """

    performer: VerifyPerformer
    model_seconds: Callable[[], float] | None
    executor: StageExecutor
    row_seconds: float


@dataclass(slots=True)
class _Spare:
    """A stage that this process serves, or would. ``loaded``: None: its weights are not read."""

    stage: int
    facts: Facts
    loaded: _Stage | None = None


def load_layers(
    target: ModelDirectory,
    layers: range,
    wanted: tuple[str, str],
    tapped: tuple[Taps | None, ModelDirectory | None],
    blocks: int,
) -> tuple[StageExecutor, Callable[[], float] | None]:
    """The executor of ``layers``, and its CPU seconds in the model so far; None: not measured.

    ``wanted``: the names of its precision and its device. ``tapped``, ``blocks``: as in
    ``load_stage``.
    """
    if not layers:
        return PassingStage(), None
    from flowspec.model.layers.placing import place
    from flowspec.model.stage import load_stage

    placing = place(*wanted, target.config)
    executor = load_stage(target, layers, placing, *tapped, blocks=blocks)
    return executor, executor.clock


def main(load: Load = load_layers, given_arguments: Sequence[str] | None = None) -> None:
    """Serve a stage with the executor of ``load``; the arguments are the process's by default."""
    given = _read_arguments(given_arguments)
    for text in given.stage:
        stage_number(text)
    process = Process(given.redis_url)
    with closing(process.control()) as control:
        record = process.pipeline_record(control)
    stages = int(record["stages"])
    numbers = [stage_number(text, stages) for text in given.stage]
    if not given.spare:
        if len(numbers) > 1:
            raise ConfigError("--stage is given several times; only a --spare takes several")
        _serve(process, record, numbers[0], given, load)
        return
    waiting = {number: _Spare(number, Facts()) for number in numbers}
    for number, spare in waiting.items():
        spare.loaded = _load(load, given, record, number, spare.facts)
    note(f"ready: a spare of {_named(numbers)}")
    while (free := process.free_role(map(_role, numbers))) is not None:
        number = numbers[[*map(_role, numbers)].index(free)]
        try:
            _serve(process, record, number, given, load, waiting[number], numbers)
            return
        except ClaimError as error:
            note(f"{error}; waits again")
            process.state = SPARE


def _named(stages: Sequence[int]) -> str:
    return " and ".join(f"stage {stage}" for stage in stages)


def _first_to_last(layers: range) -> str:
    return f"{layers.start} to {layers.stop - 1}"


def _role(stage: int) -> str:
    return role_of(stage_address(stage))


def _serve(
    process: Process,
    record: Mapping[str, str],
    stage: int,
    given: argparse.Namespace,
    load: Load,
    spare: _Spare | None = None,
    waited_for: Sequence[int] = (),
) -> None:
    """Serve ``stage``, with the weights of ``spare`` if there is one.

    ``waited_for``: all stages that it was a spare of.
    """
    stages = int(record["stages"])
    address = stage_address(stage)
    known = spare if spare is not None else _Spare(stage, Facts())
    facts = known.facts
    if spare is not None:
        facts.know({WAS_SPARE: True})

    def serve(wiring: Wiring, lease: Lease) -> None:
        if known.loaded is None:
            known.loaded = _load(load, given, record, stage, facts)
        performer, model_seconds, executor, row_seconds = known.loaded
        performer.drop()
        if isinstance(executor, HasRoom):
            facts.ask(executor.room)
        machine = StageMachine(stage, stages, generation=lease.holder.generation)
        with closing(wiring.link(lease.holder)) as link:
            worker = make_worker(
                record,
                machine,
                link,
                performer,
                lease,
                model_seconds=model_seconds,
                row_seconds=row_seconds,
            )
            facts.ask(worker.facts)
            layers = layer_range(record["layers"], stage)
            runs_on = placed(facts()) or "no weights"
            process.ready(f"stage {stage} of {stages}, layers {_first_to_last(layers)}, {runs_on}")
            if others := [other for other in waited_for if other != stage]:
                note(f"it is no spare of {_named(others)} until it is started again")
            worker.run(process.stop(lease, worker))

    serve_wired(process, record, address, given, facts, serve)


def _load(
    load: Load, given: argparse.Namespace, record: Mapping[str, str], stage: int, facts: Facts
) -> _Stage:
    """The stage's performer and the CPU seconds in its model; ``facts`` learns what it runs on."""
    layers = layer_range(record["layers"], stage)
    taps = Taps.read(record["taps"]) if "taps" in record else None
    target, executor, model_seconds = _load_stage(load, given, record, stage, taps, facts)
    row = None
    if isinstance(executor, HasFacts):
        known = executor.facts()
        row = known.get(ROW)
        facts.know(known)
        logger(stage=stage).info("stage loaded", **known)
    beside = taps.width if taps is not None and taps.reach(layers.start) else 0
    performer = VerifyPerformer(executor, (target.hidden_size,), beside=beside)
    row_seconds = row if isinstance(row, float) else ROW_SECONDS
    return _Stage(performer, model_seconds, executor, row_seconds)


def _read_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser("verify")
    arguments.add_argument(
        "--stage",
        required=True,
        action="append",
        help="which block of the target's layers to serve, from 1; of a spare repeatable",
    )
    arguments.add_argument(
        "--spare",
        action="store_true",
        help="load the weights, and serve a stage only once its worker is lost",
    )
    arguments.add_argument(
        "--target", help="where the target is on this machine (default: as the record says)"
    )
    arguments.add_argument(
        "--draft",
        help="where the head is on this machine that reads hidden rows inside the target "
        "(default: as the record says)",
    )
    arguments.add_argument(
        "--kv",
        choices=STORES,
        help="how KV rows are stored: a range for every job, or blocks of one pool, which kept "
        "rows and the jobs that begin with them share (default: as the record says)",
    )
    add_placing(arguments)
    add_rows(arguments)
    return arguments.parse_args(given)


def _load_stage(
    load: Load,
    given: argparse.Namespace,
    record: Mapping[str, str],
    stage: int,
    taps: Taps | None,
    facts: Facts,
) -> tuple[ModelDirectory, StageExecutor, Callable[[], float] | None]:
    """The target's folder, checked against the record, and what ``load`` gives for the stage."""
    name = located(given.target, record["target"], "--target")
    layers = layer_range(record["layers"], stage)
    asked = given.dtype or of_stage(record["dtype"], stage)
    device = given.device or of_stage(record["device"], stage)
    _check_place(layers, name, asked, device)
    target, dtype = open_stage(
        name, stage, layers, record, asked, lambda found: _needs(found, layers)
    )
    tapping = _tapping(taps, target, layers, given.draft)
    blocks = 0
    if (given.kv or record.get("kv", CONTIGUOUS)) == PAGED:
        blocks = int(record["most_rows"]) // BLOCK_ROWS + most_blocks(kept_rows_of(record, target))
    if layers:
        facts.know(_memory(target, layers, (dtype, device), record))
    loaded = load(target, layers, (dtype, device), (taps, tapping), blocks)
    return target, *loaded


def _memory(
    target: ModelDirectory, layers: range, wanted: tuple[str, str], record: Mapping[str, str]
) -> dict[str, object]:
    """Bytes that the stage will need, and that are free before it loads anything; says so."""
    from flowspec.model.layers.placing import place
    from flowspec.model.memory import available_bytes
    from flowspec.model.weights.shapes import shapes_of

    placing = place(*wanted, target.config)
    rows = int(record["most_rows"]) + kept_rows_of(record, target)
    needs = StageNeeds(shapes_of(target), PRECISIONS[placing.precision], context_of(record, target))
    needed, free = needs.stage(layers, rows), available_bytes(str(placing.device))
    note(
        f"loading layers {_first_to_last(layers)} of {target.source} in {placing.precision}: "
        f"needs {gib(needed)}, {gib(free)} are free"
        + ("" if needed <= free else "; the system may end it for want of memory")
    )
    return {NEEDS: needed, FREE: free, "device": str(placing.device)}


def _check_place(layers: range, name: str, dtype: str, device: str) -> None:
    """ConfigError before any weight is read if this machine lacks the precision or the device."""
    if layers:
        from flowspec.model.layers.placing import place

        place(dtype, device, open_directory(name).config)


def _needs(target: ModelDirectory, layers: range) -> tuple[str, ...]:
    """Prefixes of the tensors that ``layers`` need."""
    if not layers:
        return (NO_WEIGHTS,)
    from flowspec.model.layers.block import tensor_prefixes

    return tensor_prefixes(target, layers)


def _tapping(
    taps: Taps | None, target: ModelDirectory, layers: range, name: str | None
) -> ModelDirectory | None:
    """The head that reads ``taps``; None if none of ``layers`` is tapped.

    ``name``: of its folder here, None: as the record says.
    """
    if taps is None or not layers or not taps.within(layers, last=layers.stop == target.layers):
        return None
    return open_tapping(taps, located(name, taps.drafter, "--draft"))


if __name__ == "__main__":
    run(main, "verify")
