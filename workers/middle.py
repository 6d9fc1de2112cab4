"""A middle model, ``python -m workers.middle --model 1``; its settings are in the record."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import closing

from flowspec.core.protocol.addresses import middle_address
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import ConfigError
from flowspec.model.base import placed
from flowspec.model.weights.precision import of_all
from flowspec.observe import logger, note
from flowspec.roles.lease import Lease
from flowspec.roles.performers import VerifyPerformer
from flowspec.start.boot import Facts, Process, add_placing, make_worker, parser, run
from flowspec.start.models import located, open_middle
from flowspec.start.wiring import Wiring, add_rows, serve_wired
from flowspec.transport.base import middles_of


def main() -> None:
    arguments = parser("middle")
    arguments.add_argument(
        "--model", required=True, help="which of the pipeline's middle models to serve, from 1"
    )
    arguments.add_argument(
        "--path", help="where that model is on this machine (default: as the record says)"
    )
    add_placing(arguments)
    add_rows(arguments)
    given = arguments.parse_args()
    process = Process(given.redis_url)
    control = process.control()
    record = process.pipeline_record(control)
    stages = int(record["stages"])
    middles = middles_of(record)
    model = _number(given.model, len(middles))
    address = middle_address(model)
    facts = Facts()
    loaded: list[tuple[VerifyPerformer, Callable[[], float] | None]] = []  # once

    def serve(wiring: Wiring, lease: Lease) -> None:
        if not loaded:
            loaded.append(_load(given, record, model, facts))
        performer, model_seconds = loaded[0]
        performer.drop()
        machine = StageMachine(1, stages, middle=model, generation=lease.holder.generation)
        with closing(wiring.link(lease.holder)) as link:
            worker = make_worker(
                record, machine, link, performer, lease, model_seconds=model_seconds
            )
            facts.ask(worker.facts)
            process.ready(f"middle model {model} of {len(middles)}, {placed(facts())}")
            worker.run(process.stop(lease, worker))

    serve_wired(process, record, address, given, facts, serve)
    control.close()


def _load(
    given: argparse.Namespace, record: Mapping[str, str], model: int, facts: Facts
) -> tuple[VerifyPerformer, Callable[[], float] | None]:
    """The model's performer, and its CPU seconds so far; ``facts`` learns what it runs on."""
    from flowspec.model.layers.placing import place
    from flowspec.model.stage import load_stage

    name = located(given.path, middles_of(record)[model - 1], "--path")
    directory = open_middle(name, model, record)
    placing = place(
        given.dtype or of_all(record["dtype"]),
        given.device or of_all(record["device"]),
        directory.config,
    )
    note(f"loading {directory.source} in {placing.precision}")
    executor = load_stage(directory, range(directory.layers), placing=placing)
    known = executor.facts()
    facts.know(known)
    logger(middle=model).info("middle model loaded", **known)
    performer = VerifyPerformer(executor, (directory.hidden_size,))
    return performer, executor.clock


def _number(text: str, models: int) -> int:
    if not models:
        raise ConfigError(
            "this pipeline has no middle models; start it with --models SMALL,MIDDLE,TARGET"
        )
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= models:
        raise ConfigError(
            f"middle model {text} is not in the pipeline; its middle models are 1 to {models}"
        )
    return int(text)


if __name__ == "__main__":
    run(main, "middle")
