"""The draft worker: ``python -m workers.draft`` is enough; the pipeline's record has the rest."""

from __future__ import annotations

from flowspec.broker.redis_link import RedisLink
from flowspec.core.draft import DraftMachine
from flowspec.core.messages import DRAFT
from flowspec.core.session import Limits
from flowspec.drivers.live import Worker
from flowspec.drivers.replay import header
from flowspec.drivers.roles import DraftRole
from flowspec.model.directory import check_pair, fetch_weights, open_directory
from flowspec.strategies import build
from workers._boot import Process, check_fingerprint, parser, run


def main() -> None:
    arguments = parser("draft")
    arguments.add_argument("--target", help="where the target is on this machine (default: as the record says)")
    arguments.add_argument("--draft", help="where the draft is on this machine (default: as the record says)")
    given = arguments.parse_args()
    process = Process(given.redis_url)
    control = process.control()
    record = process.pipeline_record(control)
    stages = int(record["stages"])
    worker: list[Worker] = []

    with process.leased(control, "draft", lambda: worker[0].facts() if worker else {}) as stop:
        from flowspec.model.drafter import load_drafter
        from flowspec.model.text import Tokenizer

        target = open_directory(given.target or record["target"])
        draft = fetch_weights(given.draft or record["draft"], lambda found: ("",))
        check_fingerprint(draft, record["draft_fingerprint"], str(draft.path))
        check_pair(target, draft)
        limits = Limits(stages, target.context, target.vocabulary, target.eos)
        link = RedisLink(process.url, process.keys, DRAFT, stages)
        role = DraftRole(load_drafter(draft), Tokenizer(target))
        worker.append(Worker(DraftMachine(limits, build), link, role, header=header(limits)))
        process.state = "ready"
        worker[0].run(stop)
        link.close()
    control.close()


if __name__ == "__main__":
    run(main, "draft")
