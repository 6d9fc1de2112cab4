"""Half an hour of mixed jobs beside kills, and a rolling restart: texts and memory.

    python -m ops.bench.endurance [--target DIR --draft ngram] [--minutes 30] [--jobs 20]

Real processes with a model, by default the packaged pair, on two stages, supervised as by
`flowspec up`, two jobs at a time. Jobs of several strategies, prompts and temperatures come in
rounds of ``--jobs``; in every second round the draft worker or stage 1 is killed (SIGKILL). Each
text is compared with that of plain decoding before any kill. Memory is resident MiB at the end of a
round; of the broker what it says that it uses. *verify-2*, the scheduler and the broker live from
the beginning to the end. Then the rolling restart: beside as many jobs every worker is told to end
(SIGTERM), one after the other, each once the one before is ready again. Prints Markdown.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice, product
from pathlib import Path

from flowspec.client import Client, Job
from flowspec.cluster import Cluster, Setup
from flowspec.model.weights.directory import default_pair
from flowspec.transport.connections.connection import connect
from ops.bench.arguments import count
from ops.bench.report import machine_line
from ops.parser import Parser

PROMPTS = (
    "Describe how to open a text file in Python.",
    "What is a lighthouse for?",
    "Name three rivers and say where they end.",
)
STRATEGIES = ("flowspec", "auto", "pipedec", "specpipe", "autoregressive")
TEMPERATURES = (0.0, 1.0)
TOKENS = 96
#: Until a job has ended, and until a worker is ready again, seconds.
ENDS_SECONDS = 300.0
READY_SECONDS = 60.0
ROLES = ("draft", "verify-1", "verify-2", "scheduler")

Case = tuple[str, float, str]


class Service:
    """The pipeline of ``cluster`` and its client. ``wanted``: ids of plain decoding, by case."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self._cluster = cluster
        self._client = client
        self._cases = self._endless()
        plain = {
            case: self._submit((*case, "autoregressive")) for case in product(PROMPTS, TEMPERATURES)
        }
        self.wanted = {case: job.result(ENDS_SECONDS).token_ids for case, job in plain.items()}

    def _endless(self) -> Iterator[Case]:
        while True:
            yield from product(PROMPTS, TEMPERATURES, STRATEGIES)

    def _submit(self, case: Case) -> Job:
        prompt, temperature, strategy = case
        return self._client.submit(
            prompt, max_new_tokens=TOKENS, temperature=temperature, seed=7, strategy=strategy
        )

    def begin(self, jobs: int) -> list[tuple[Case, Job]]:
        return [(case, self._submit(case)) for case in islice(self._cases, jobs)]

    def end(self, begun: Sequence[tuple[Case, Job]]) -> int:
        """Wait for all jobs; how many have another text."""
        return sum(
            job.result(ENDS_SECONDS).token_ids != self.wanted[case[:2]] for case, job in begun
        )

    def pid(self, role: str) -> int:
        return int(self._client.workers()[role]["pid"])

    def restart(self, role: str) -> float:
        """Tell the worker to end; seconds until another one is ready."""
        before = self.pid(role)
        began = time.monotonic()
        os.kill(before, signal.SIGTERM)
        while time.monotonic() - began < READY_SECONDS + ENDS_SECONDS:
            holder = self._client.workers().get(role, {})
            if holder.get("pid") not in (None, before) and holder.get("state") == "ready":
                return time.monotonic() - began
            time.sleep(0.1)
        raise RuntimeError(f"{role} is not ready again")

    def memory(self) -> list[float]:
        """MiB of every role, then of the broker."""
        pages = [
            int(Path(f"/proc/{self.pid(role)}/statm").read_text(encoding="ascii").split()[1])
            for role in ROLES
        ]
        with closing(connect(self._cluster.url)) as broker:
            used = float(broker.info("memory")["used_memory"])
        return [*(number * resource.getpagesize() / 2**20 for number in pages), used / 2**20]


def rounds(service: Service, minutes: float, jobs: int) -> Iterator[str]:
    """A row for every tenth of the time."""
    began = time.monotonic()
    served = others = kills = at = 0
    shown = began
    while (now := time.monotonic()) - began < 60 * minutes:
        begun = service.begin(jobs)
        if at % 2:
            time.sleep(1.0)
            os.kill(service.pid(("draft", "verify-1")[at // 2 % 2]), signal.SIGKILL)
            kills += 1
        others += service.end(begun)
        served += jobs
        at += 1
        if now - shown >= 6 * minutes or at == 1:
            shown = now
            used = " | ".join(f"{size:.1f}" for size in service.memory())
            passed = (time.monotonic() - began) / 60
            yield f"| {passed:.1f} | {served} | {kills} | {others} | {used} |"


def main() -> None:
    parser = Parser(prog="python -m ops.bench.endurance", description=(__doc__ or ""))
    parser.add_argument("--target", default=default_pair()[0], metavar="FOLDER", help="(packaged)")
    parser.add_argument("--draft", default=default_pair()[1], help="drafter (packaged)")
    parser.add_argument("--minutes", type=float, default=30.0, help="of jobs (30)")
    parser.add_argument("--jobs", type=count, default=20, help="of a round (20)")
    given = parser.parse_args()
    print(f"{machine_line()}; two stages, texts of {TOKENS} tokens\n")
    with (
        tempfile.TemporaryDirectory() as kept,
        Cluster(Setup(given.target, given.draft, 2, jobs=2, persist=Path(kept))) as cluster,
        Client(cluster.url) as client,
    ):
        service = Service(cluster, client)
        sizes = " | ".join(f"{name}, MiB" for name in (*ROLES, "broker"))
        print(f"| minute | jobs | kills | other texts | {sizes} |")
        print("|---" * (len(ROLES) + 5) + "|")
        for row in rounds(service, given.minutes, given.jobs):
            print(row, flush=True)
        begun = service.begin(given.jobs)
        seconds = [service.restart(role) for role in ROLES]
        others = service.end(begun)
        print(f"\nRolling restart beside {given.jobs} jobs: {others} other texts.\n")
        print("| told to end | s until another one is ready |")
        print("|---|---|")
        for role, passed in zip(ROLES, seconds, strict=True):
            print(f"| {role} | {passed:.1f} |")


if __name__ == "__main__":
    main()
