"""How long a text pauses when a process is killed, and how long a pipeline takes to start.

    python -m ops.bench.recovery [--target DIR --draft ngram] [--middle DIR] [--only verify-1]
        [--kills 12] [--starts 20] [--busy 8]

Real processes with a model, by default the packaged pair, on two stages, supervised as by `flowspec
up`; with a ``--middle`` model texts are by `pipespec`, in place of `flowspec`. A process is killed
(SIGKILL) in the middle of a text; *pause*: the longest time between two pieces of this text from
then on, at its reader. A *spare* waits beside with the weights of both stages. Every text is
compared with one before any kill; *other texts* counts those that differ. Without a kill: the same
of texts that nobody disturbs. A *start* is that of all processes until they are ready, alone and
beside ``--busy`` endless loops a core. Prints Markdown.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from flowspec.client import Client
from flowspec.cluster import BROKER, Cluster, Setup
from flowspec.model.weights.directory import default_pair
from flowspec.start.forks import spawn
from ops.bench.arguments import count
from ops.bench.report import machine_line
from ops.parser import Parser

STAGES = 2
PROMPT = "Describe how to open a text file in Python."
TOKENS = 160
#: Tokens of a text before its process is killed.
BEFORE = 24
#: Until a spare is ready, seconds.
READY_SECONDS = 60.0
UNDISTURBED = "none"


def pauses(setup: Setup, role: str, kills: int, *, spare: bool) -> tuple[list[float], int]:
    """Seconds of the longest pauses of ``kills`` texts, and how many texts were others.

    ``role``: whose process is killed. Each time in a new pipeline, as a process that has stopped
    before waits for a while until it is started again.
    """
    found: list[float] = []
    others = 0
    for _ in range(kills):
        with (
            tempfile.TemporaryDirectory() as kept,
            pipeline(setup, Path(kept), spare=spare) as cluster,
            Client(cluster.url) as client,
        ):
            wanted, _ = text(client, cluster, UNDISTURBED)
            ids, pause = text(client, cluster, role)
            found.append(pause)
            others += ids != wanted
    return found, others


@contextmanager
def pipeline(setup: Setup, kept: Path, *, spare: bool) -> Iterator[Cluster]:
    """A pipeline whose broker keeps its data in ``kept``, and a spare of its stages."""
    with Cluster(replace(setup, persist=kept)) as cluster:
        if not spare:
            yield cluster
            return
        stages = [part for stage in range(1, STAGES + 1) for part in ("--stage", str(stage))]
        surroundings = {**os.environ, "FLOWSPEC_REDIS_URL": cluster.url}
        log = kept / "spare.log"
        waiting = spawn("workers.verify", ("--spare", *stages), surroundings, log)
        try:
            until = time.monotonic() + READY_SECONDS
            while "ready: a spare" not in log.read_text(encoding="utf-8"):
                if time.monotonic() > until:
                    raise RuntimeError(f"the spare is not ready: {log.read_text(encoding='utf-8')}")
                time.sleep(0.1)
            yield cluster
        finally:
            waiting.kill()
            waiting.wait()


def _strategy(setup: Setup) -> str:
    return "pipespec" if setup.middles else "flowspec"


def text(client: Client, cluster: Cluster, role: str) -> tuple[tuple[int, ...], float]:
    """The ids of a text, and its longest pause; the process of ``role`` is killed in its middle."""
    strategy = _strategy(cluster.setup)
    job = client.submit(PROMPT, max_new_tokens=TOKENS, strategy=strategy)
    ids: list[int] = []
    pause, last = 0.0, 0.0
    for chunk in job.stream():
        now = time.monotonic()
        if last:
            pause = max(pause, now - last)
        ids += chunk.token_ids
        if len(ids) >= BEFORE and not last:
            if role != UNDISTURBED:
                os.kill(_pid(cluster, client, role), signal.SIGKILL)
            last = time.monotonic()
        elif last:
            last = now
    return tuple(ids), pause


def _pid(cluster: Cluster, client: Client, role: str) -> int:
    if role == BROKER:
        return cluster.pids[BROKER]
    return int(client.workers()[role]["pid"])


def starts(setup: Setup, number: int, busy: int) -> list[float]:
    """Seconds of ``number`` starts beside ``busy`` endless loops a core."""
    cores = os.cpu_count() or 1
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy * cores)
    ]
    found = []
    try:
        for _ in range(number):
            began = time.monotonic()
            with Cluster(setup):
                found.append(time.monotonic() - began)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return found


def row(name: str, seconds: Sequence[float]) -> str:
    half, most = np.quantile(seconds, (0.5, 0.95))
    return f"| {name} | {len(seconds)} | {half:.2f} | {most:.2f} | {max(seconds):.2f} |"


def main() -> None:
    parser = Parser(prog="python -m ops.bench.recovery", description=(__doc__ or ""))
    parser.add_argument("--target", default=default_pair()[0], metavar="FOLDER", help="(packaged)")
    parser.add_argument("--draft", default=default_pair()[1], help="drafter (packaged)")
    parser.add_argument("--middle", metavar="FOLDER", help="a middle model (none)")
    parser.add_argument("--only", default="", help="roles whose name has this in it (all)")
    parser.add_argument("--kills", type=count, default=12, help="of each role (12)")
    parser.add_argument("--starts", type=count, default=20, help="of each kind (20)")
    parser.add_argument("--busy", type=count, default=8, help="endless loops a core (8)")
    given = parser.parse_args()
    middles = (given.middle,) if given.middle else ()
    setup = Setup(given.target, given.draft, STAGES, middles)
    print(f"{machine_line()}; two stages, texts of {TOKENS} tokens by `{_strategy(setup)}`\n")
    print("| killed | times | pause, median s | 95% s | most s | other texts |")
    print("|---|---|---|---|---|---|")
    verify = [f"verify-{stage}" for stage in range(1, STAGES + 1)]
    middle = ["middle-1"] if middles else []
    roles = (UNDISTURBED, "scheduler", "draft", *middle, *verify, BROKER)
    plain = [(role, False) for role in roles]
    for role, spare in (*plain, *((role, True) for role in verify)):
        if given.only not in role:
            continue
        seconds, others = pauses(setup, role, given.kills, spare=spare)
        name = f"{role}, with a spare" if spare else role
        print(f"{row(name, seconds)} {others} |", flush=True)
    print("\n| start | times | median s | 95% s | most s |")
    print("|---|---|---|---|---|")
    print(row("alone", starts(setup, given.starts, 0)), flush=True)
    print(row(f"beside {given.busy} loops a core", starts(setup, given.starts, given.busy)))


if __name__ == "__main__":
    main()
