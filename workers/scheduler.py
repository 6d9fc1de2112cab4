"""The scheduler: ``python -m workers.scheduler --target DIR --draft DIR --stages N``."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from flowspec.drivers.scheduler import Scheduler
from flowspec.emulation.setup import EMULATED, Emulation
from flowspec.model.directory import default_pair, layer_ranges
from flowspec.model.precision import AUTO, check_device, check_dtype
from flowspec.model.sources import fingerprint, labels, open_models
from workers._boot import Process, parser, run

#: Flags that the pipeline's record keeps for workers that are not told otherwise.
PLACINGS = {
    "--dtype": "precision of the target and the middle models (default: %(default)s)",
    "--device": "device of the target and the middle models (default: %(default)s)",
    "--draft-dtype": "precision of the drafters (default: %(default)s)",
    "--draft-device": "device of the drafters (default: %(default)s)",
}


def main() -> None:
    arguments = parser("scheduler")
    arguments.add_argument(
        "--target", default=default_pair()[0], help="model to serve (default: the packaged one)"
    )
    arguments.add_argument(
        "--draft",
        default=default_pair()[1],
        help="the draft: a model or head, ngram, or several joined by +; drafts to choose from "
        "are joined by :",
    )
    arguments.add_argument(
        "--middle",
        action="append",
        default=[],
        help="a middle model of a chain; repeat it, smaller ones first",
    )
    arguments.add_argument(
        "--stages", type=int, default=4, help="verify stages (default: %(default)s)"
    )
    arguments.add_argument(
        "--jobs", type=int, default=1, help="jobs that run at once (default: %(default)s)"
    )
    arguments.add_argument("--emulate", default="", help="devices and links to emulate, as JSON")
    for flag, what in PLACINGS.items():
        arguments.add_argument(flag, default=AUTO, help=what)
    given = arguments.parse_args()
    target, middles = open_models(given.target, given.draft, given.middle)
    ranges = layer_ranges(target.layers, given.stages, surplus=bool(given.emulate))
    emulation = Emulation.read(given.emulate) if given.emulate else None
    process = Process(given.redis_url)
    control = process.control()
    process.state = "ready"
    with process.leased("scheduler", dict) as stop:
        control.set_pipeline(
            {
                "stages": str(given.stages),
                "target": given.target,
                "draft": given.draft,
                "target_fingerprint": target.identity,
                "target_values": json.dumps(target.values()),
                "draft_fingerprint": fingerprint(given.draft),
                "drafts": json.dumps(labels(given.draft)),
                "middles": json.dumps(given.middle),
                "middle_fingerprints": " ".join(middle.identity for middle in middles),
                "middle_values": json.dumps([middle.values() for middle in middles]),
                "dtype": check_dtype(given.dtype),
                "device": check_device(given.device),
                "draft_dtype": check_dtype(given.draft_dtype),
                "draft_device": check_device(given.draft_device),
                "layers": " ".join(f"{block.start}-{block.stop}" for block in ranges),
                **(
                    {EMULATED: replace(emulation, began=time.monotonic()).text()}
                    if emulation
                    else {}
                ),
            }
        )
        Scheduler(control, given.stages, most_running=given.jobs).run(stop)
    control.close()


if __name__ == "__main__":
    run(main, "scheduler")
