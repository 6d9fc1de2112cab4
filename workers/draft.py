"""The draft worker, ``python -m workers.draft``; its settings are in the pipeline's record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowspec.broker.base import Op, drafts_of, middles_of
from flowspec.broker.redis_link import RedisLink
from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import Finish
from flowspec.core.run.limits import Limits
from flowspec.drivers.live import Worker
from flowspec.drivers.performers import DraftPerformer
from flowspec.drivers.replay import header
from flowspec.model.directory import fetch_weights
from flowspec.model.drafter_choice import wanting_hidden
from flowspec.model.sources import fingerprint, load_sources, target_needs
from flowspec.strategies import build
from flowspec.strategies.auto.decisions import with_drafter_names
from workers._boot import Process, check_fingerprint, make_worker, parser, run


class _NamingLink(RedisLink):
    """A link that adds the drafters' names to a job's stats.

    Machines, and so recordings, only have the drafters' numbers.
    """

    def __init__(self, process: Process, limits: Limits, drafts: Sequence[str]) -> None:
        super().__init__(process.url, process.keys, DRAFT, limits.stages, middles=limits.middles)
        self._drafts = drafts

    def write(self, ops: Sequence[Op], at: float | None = None) -> list[Code]:
        told = [
            replace(op, stats=with_drafter_names(op.stats, self._drafts))
            if isinstance(op, Finish)
            else op
            for op in ops
        ]
        return super().write(told, at)


def main() -> None:
    arguments = parser("draft")
    arguments.add_argument(
        "--target", help="where the target is on this machine (default: as the record says)"
    )
    arguments.add_argument(
        "--draft",
        help="the drafts as found on this machine, joined by + and : as in the record "
        "(default: as the record says)",
    )
    given = arguments.parse_args()
    process = Process(given.redis_url)
    control = process.control()
    record = process.pipeline_record(control)
    stages = int(record["stages"])
    middles = len(middles_of(record))
    worker: list[Worker] = []

    with process.leased("draft", lambda: worker[0].facts() if worker else {}) as stop:
        from flowspec.model.text import Tokenizer

        name = given.target or record["target"]
        draft = record["draft"] if given.draft is None else given.draft
        check_fingerprint(fingerprint(draft), record["draft_fingerprint"], draft)
        target = fetch_weights(name, target_needs(draft))
        drafter = load_sources(draft, target)
        wanting = wanting_hidden(drafter)
        limits = Limits(
            stages,
            min(target.context, int(record.get("context", target.context))),
            target.vocabulary,
            target.eos,
            middles=middles,
            hidden=wanting[0],
            others=wanting[1:],
        )
        link = _NamingLink(process, limits, drafts_of(record))
        role = DraftPerformer(drafter, Tokenizer(target), target.hidden_size)
        machine = DraftMachine(limits, build)
        worker.append(make_worker(record, machine, link, role, header=header(limits)))
        process.state = "ready"
        worker[0].run(stop)
        link.close()
    control.close()


if __name__ == "__main__":
    run(main, "draft")
