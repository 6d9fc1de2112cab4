"""A middle model, ``python -m workers.middle --model 1``; its settings are in the record."""

from __future__ import annotations

from flowspec.broker.base import middles_of, role_of
from flowspec.core.protocol.addresses import middle_address
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.drivers.performers import VerifyPerformer
from flowspec.errors import ConfigError
from flowspec.model.base import placed
from flowspec.model.precision import of_all
from flowspec.observe import logger
from workers._boot import Facts, Process, add_placing, make_worker, parser, run
from workers._models import open_middle
from workers._wiring import add_rows, wired


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
    with (
        wired(process, record, address, given) as wiring,
        process.leased(role_of(address), facts := Facts(wiring.facts)) as lease,
    ):
        from flowspec.model.placing import place
        from flowspec.model.stage import load_stage

        name = given.path or middles[model - 1]
        directory = open_middle(name, model, record)
        placing = place(
            given.dtype or of_all(record["dtype"]),
            given.device or of_all(record["device"]),
            directory.config,
        )
        executor = load_stage(directory, range(directory.layers), placing=placing)
        loaded = executor.facts()
        facts.know(loaded)
        logger(middle=model).info("middle model loaded", **loaded)
        role = VerifyPerformer(executor, (directory.hidden_size,))
        link = wiring.link(lease.holder)
        machine = StageMachine(1, stages, middle=model, generation=lease.holder.generation)
        worker = make_worker(
            record, machine, link, role, lease, model_seconds=lambda: executor.model_seconds
        )
        facts.ask(worker.facts)
        process.ready(f"middle model {model} of {len(middles)}, {placed(loaded)}")
        worker.run(process.stop(lease))
        link.close()
    control.close()


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
