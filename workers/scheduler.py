"""The scheduler: ``python -m workers.scheduler --target DIR --draft DIR --stages N``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from flowspec.core.run.limits import CONTIGUOUS, STORES, TREE_ROWS, in_blocks
from flowspec.errors import ConfigError
from flowspec.model.drafters.kinds import default_draft
from flowspec.model.drafters.sources import fingerprint, labels, open_models, recorded_taps
from flowspec.model.weights.directory import ModelDirectory, default_pair, layer_ranges
from flowspec.model.weights.precision import AUTO, by_stage, check_device, check_dtype
from flowspec.observe import note
from flowspec.plan.cluster_file import check_ranges, parse_ranges, ranges_text, read_cluster
from flowspec.rehearse.devices.setup import EMULATED, Emulation
from flowspec.roles.lease import Lease
from flowspec.roles.scheduler import Scheduler
from flowspec.start.boot import WIRE, Facts, Process, parser, run
from flowspec.transport.base import BROKER_FULL, QUEUE_CAP
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.ways import ROWS
from flowspec.transport.wire.codec import VERSION

#: Flags that the pipeline's record keeps for workers that are not told otherwise.
PLACINGS = {
    "--dtype": "precision of the target and the middle models (default: %(default)s)",
    "--device": "device of the target and the middle models (default: %(default)s)",
    "--draft-dtype": "precision of the drafters (default: %(default)s)",
    "--draft-device": "device of the drafters (default: %(default)s)",
}
#: The least value of a flag, by its name.
_LEAST = {"jobs": 1, "most_waiting": 1, "keep_rows": 0, "most_rows": 0}
#: What a cluster file says, by the names of the flags for it.
_IN_CLUSTER = ("stages", "layers", "context", "dtype", "device", "draft_dtype")


def main() -> None:
    given = _read_arguments()
    target, middles = open_models(given.target, given.draft, given.middle)
    ranges = _ranges(target, given)
    runs = _run_record(given, target, ranges)
    record: dict[str, str] = {}  # made under the first lease
    emulation = Emulation.read(given.emulate) if given.emulate else None
    if emulation and given.layers:
        emulation = emulation.following([len(block) for block in ranges])
    if emulation:
        runs[EMULATED] = replace(emulation, began=time.monotonic()).text()
    process = Process(given.redis_url)

    @contextmanager
    def begin() -> Iterator[Callable[[Lease], None]]:
        with closing(process.control()) as control:
            control.drop_mistyped()  # some of which end every claim
            yield lambda lease: serve(control, lease)

    def serve(control: RedisControl, lease: Lease) -> None:
        if not record:  # the digests of a large model's weights take long
            record.update(_model_record(given, target, middles) | runs)
            process.built_for(record)
        if control.pipeline() != record:
            control.set_pipeline(record, lease.holder.generation)
        scheduler = Scheduler(
            control,
            given.stages,
            most_running=given.jobs,
            most_waiting=given.most_waiting,
            generation=lease.holder.generation,
        )
        if not process.has_served:  # later it is a warning: what runs goes on
            scheduler.check_eviction()
        facts.begin(lambda: {BROKER_FULL: scheduler.full} if scheduler.full else {})
        process.state = "ready"
        note(
            f"ready: a pipeline of {given.stages} stages of {given.target}, "
            f"drafted by {given.draft}"
        )
        scheduler.run(process.stop(lease))

    facts = Facts()
    facts.know({"jobs": given.jobs})
    process.serve("scheduler", facts, begin, writes_record=True)


def _read_arguments() -> argparse.Namespace:
    """The command line; what a cluster file says is in the place of the flags for it."""
    arguments = parser("scheduler")
    _add_models(arguments)
    _add_workers(arguments)
    _add_bounds(arguments)
    given = arguments.parse_args()
    for name, least in _LEAST.items():
        count = getattr(given, name)
        if count is not None and count < least:
            raise ConfigError(f"{_flag(name)} is {count}; expected {least} or more")
    if given.cluster is not None:
        _check_alone(arguments, given)
        _use_cluster(given)
    if given.draft is None:
        given.draft = default_draft(given.target)
    return given


def _add_workers(arguments: argparse.ArgumentParser) -> None:
    """Flags for what the other workers are, unless they are told otherwise."""
    arguments.add_argument(
        "--stages", type=int, default=4, help="verify stages (default: %(default)s)"
    )
    arguments.add_argument(
        "--layers", help="the target's layers by stage, like '0-5 5-12' (default: near-equal)"
    )
    arguments.add_argument(
        "--cluster", type=Path, help="a file of `flowspec plan` instead of flags that it replaces"
    )
    for flag, what in PLACINGS.items():
        arguments.add_argument(flag, default=AUTO, help=what)
    arguments.add_argument(
        "--kv",
        choices=STORES,
        default=CONTIGUOUS,
        help="how stages that are not told otherwise store KV rows (default: %(default)s)",
    )
    arguments.add_argument(
        "--rows",
        choices=ROWS,
        default=ROWS[0],
        help="how rows travel between workers that are not told otherwise (default: %(default)s)",
    )
    arguments.add_argument("--emulate", default="", help="devices and links to emulate, as JSON")


def _add_bounds(arguments: argparse.ArgumentParser) -> None:
    """Flags for how many jobs, tokens and rows there may be."""
    arguments.add_argument(
        "--jobs", type=int, default=1, help="jobs that run at once (default: %(default)s)"
    )
    arguments.add_argument(
        "--most-waiting",
        type=int,
        default=QUEUE_CAP,
        help="jobs that may wait; one more is refused (default: %(default)s)",
    )
    arguments.add_argument(
        "--context", type=int, help="most tokens of a job (default: as many as the target takes)"
    )
    arguments.add_argument(
        "--keep-rows",
        type=int,
        help="most rows of jobs that are kept for others (default: twice the context, "
        "at most 4096)",
    )
    arguments.add_argument(
        "--most-rows",
        type=int,
        default=0,
        help="KV rows that a stage has for all jobs at once; one without room waits "
        "(default: as many as --jobs of them can need)",
    )


def _add_models(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument(
        "--target", default=default_pair()[0], help="model to serve (default: the packaged one)"
    )
    arguments.add_argument(
        "--draft",
        help="the draft: a model or head, ngram, or several joined by +; drafts to choose from "
        "are joined by : (default: the packaged target's own, of others ngram)",
    )
    arguments.add_argument(
        "--middle",
        action="append",
        default=[],
        help="a middle model of a chain; repeat it, smaller ones first",
    )


def _model_record(
    given: argparse.Namespace, target: ModelDirectory, middles: Sequence[ModelDirectory]
) -> dict[str, str]:
    """What the pipeline's record says of the models: where they are, and which they are."""
    taps = recorded_taps(given.draft, target)
    return {
        "target": given.target,
        "draft": given.draft,
        "target_fingerprint": target.identity,
        "target_values": json.dumps(target.values()),
        "draft_fingerprint": fingerprint(given.draft),
        "drafts": json.dumps(labels(given.draft)),
        **({"taps": taps} if taps else {}),
        "middles": json.dumps(given.middle),
        "middle_fingerprints": " ".join(middle.identity for middle in middles),
        "middle_values": json.dumps([middle.values() for middle in middles]),
    }


def _run_record(
    given: argparse.Namespace, target: ModelDirectory, ranges: Sequence[range]
) -> dict[str, str]:
    """What the record says of how they run; ConfigError for a precision or device unknown."""
    most = in_blocks((given.context or target.context) + TREE_ROWS) * given.jobs
    return {
        WIRE: str(VERSION),
        "stages": str(given.stages),
        "dtype": by_stage(given.dtype, given.stages, check_dtype),
        "device": by_stage(given.device, given.stages, check_device),
        "draft_dtype": check_dtype(given.draft_dtype),
        "draft_device": check_device(given.draft_device),
        "layers": ranges_text(ranges),
        "rows": given.rows,
        "kv": given.kv,
        "most_rows": str(given.most_rows or most),
        **({"context": str(given.context)} if given.context is not None else {}),
        **({"kept_rows": str(given.keep_rows)} if given.keep_rows is not None else {}),
    }


def _check_alone(arguments: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """ConfigError if a flag says what the cluster file says too."""
    said = [name for name in _IN_CLUSTER if getattr(given, name) != arguments.get_default(name)]
    if said:
        flags = " and ".join(map(_flag, said))
        raise ConfigError(f"--cluster says it already: leave out {flags}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _use_cluster(given: argparse.Namespace) -> None:
    """Take what the cluster file says; a model's place on this machine may be given beside it."""
    cluster = read_cluster(given.cluster)
    given.target = cluster.model if given.target == default_pair()[0] else given.target
    given.draft = cluster.draft if given.draft is None else given.draft
    given.stages = len(cluster.stages)
    given.layers = ranges_text(cluster.layers)
    given.context = cluster.context
    given.dtype = cluster.dtypes
    given.device = cluster.devices
    given.draft_dtype = cluster.draft_dtype


def _ranges(target: ModelDirectory, given: argparse.Namespace) -> Sequence[range]:
    """The layers of every stage; ConfigError unless they are those of the target."""
    if given.context is not None and not 1 <= given.context <= target.context:
        raise ConfigError(
            f"--context is {given.context}; expected 1 to {target.context}, "
            f"as many tokens as {given.target} takes"
        )
    if given.layers is None:
        return layer_ranges(target.layers, given.stages, surplus=bool(given.emulate))
    ranges = parse_ranges(given.layers)
    check_ranges(ranges, target.layers, given.stages)
    return ranges


if __name__ == "__main__":
    run(main, "scheduler")
