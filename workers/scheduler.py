"""The scheduler: ``python -m workers.scheduler --target DIR --draft DIR --stages N``."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from flowspec.drivers.scheduler import Scheduler
from flowspec.emulation.setup import EMULATED, Emulation
from flowspec.model.directory import default_pair, layer_ranges
from flowspec.model.sources import fingerprint, labels, open_models
from workers._boot import Process, parser, run


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
                "target_fingerprint": target.fingerprint,
                "draft_fingerprint": fingerprint(given.draft),
                "drafts": json.dumps(labels(given.draft)),
                "middles": json.dumps(given.middle),
                "middle_fingerprints": " ".join(middle.fingerprint for middle in middles),
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
