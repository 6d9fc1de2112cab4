"""What a hop costs: ours against a bare one, our commit against bare writes, our prune against a
bare copy.

    python -m ops.bench.hop [--rounds N]

Everything in one run, on a private broker over a unix socket, each process with one thread. A
hop is from the moment a stage has finished its pass to the moment the next one starts on it;
both read the machine-wide monotonic clock. Prints Markdown.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from flowspec.broker.base import CommitText, Link
from flowspec.broker.keys import Keys
from flowspec.broker.redis_client import DirectClient
from flowspec.broker.redis_control import RedisControl
from flowspec.broker.redis_link import RedisLink
from flowspec.broker.server import PrivateBroker
from flowspec.core.protocol.machine import (
    Accepted,
    Allocate,
    Choice,
    Commit,
    Pass,
    PassDone,
    Send,
    Work,
    WorkResult,
)
from flowspec.core.protocol.messages import Answer, Envelope, Open, Prune, Segment, stage_node
from flowspec.core.protocol.sequence import SeqWriter
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.drivers.live import Worker
from flowspec.model.masks import full_mask
from ops.bench.jobs import running_job
from ops.bench.parts import PROMPT, ROWS, parts
from ops.bench.report import Quantiles, machine_line
from ops.bench.writes import commits, prunes

#: Hidden sizes (float32) that make 16 rows of 16 and of 128 KB.
HIDDEN = {"16 KB": 256, "128 KB": 2048}


# ---- our hop: two real stage workers whose passes take no time -----------------------------------


@dataclass
class Stopwatch:
    """A performer that computes nothing and notes when its passes start and end."""

    hidden: int
    last: bool
    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    def compute(self, work: Work, link: Link) -> WorkResult:
        assert isinstance(work, Pass)
        (part,) = work.parts
        if not part.tokens:
            link.take_rows(part.job, part.epoch, part.segment)
        full_mask(part.context, part.parents, len(part.ids))
        self.started[part.segment] = time.monotonic()
        self.out = np.zeros((len(part.ids), self.hidden), dtype=np.float32)
        done = PassDone((Choice(tuple(7 for _ in part.answers)),))
        self.ended[part.segment] = time.monotonic()
        return done

    def allocate(self, output: Allocate) -> None: ...

    def learn(self, output: Any, link: Link) -> None:
        raise NotImplementedError

    def release(self, job: str) -> None: ...

    def rows(self, part: int, offsets: Sequence[int]) -> Any:
        return self.out if len(offsets) == len(self.out) else self.out[list(offsets)]

    def text(self, commit: Commit) -> str:
        raise NotImplementedError


def stage_process(url: str, stage: int, hidden: int, pipe: Any) -> None:
    watch = Stopwatch(hidden, last=stage == 2)
    worker = Worker(StageMachine(stage, 2), RedisLink(url, Keys(), stage_node(stage), 2), watch)
    pipe.send("ready")
    worker.run(pipe.poll)
    pipe.send((watch.started, watch.ended))


def our_hop(url: str, hidden: int, rounds: int) -> list[float]:
    """Seconds from stage 1's end to stage 2's start per segment."""
    ends = []
    processes = []
    for stage in (1, 2):
        ours, theirs = mp.Pipe()
        process = mp.Process(target=stage_process, args=(url, stage, hidden, theirs))
        process.start()
        ours.recv()
        ends.append(ours)
        processes.append(process)
    drive(url, rounds)
    stamps = []
    for end, process in zip(ends, processes, strict=True):
        end.send("stop")
        stamps.append(end.recv())
        process.join()
    ended = stamps[0][1]
    started = stamps[1][0]
    return [started[segment] - ended[segment] for segment in sorted(started) if segment > 10]


def drive(url: str, rounds: int) -> None:
    """Play the draft worker: one segment of a root and 15 children at a time, the root always
    accepted.
    """
    control = RedisControl(url, Keys())
    link = RedisLink(url, Keys(), "d0", 2)
    seqs = SeqWriter()
    job = running_job(control, stages=2)
    link.read(1.0)

    def tell(node: str, message: Any) -> Send:
        return Send(node, Envelope("d0", seqs.next(node), message))

    opened = Open(job, 1, PROMPT, PROMPT + rounds + 600, Sampling())
    ids = tuple(range(PROMPT))
    prompt = Segment(job, 1, 0, 0, ids, tuple(at - 1 for at in ids), ids, ids)
    link.write(
        [Accepted(job, 1, ids, "bench"), tell("s1", opened), tell("s2", opened), tell("s1", prompt)]
    )
    wait_for_result(link)
    root = PROMPT
    last = PROMPT - 1
    for at in range(rounds):
        prune = Prune(job, 1, PROMPT - 1 + at, (last,), root, ())
        envelopes = tuple(Envelope("d0", seqs.next(node), prune) for node in ("s1", "s2"))
        commit = Commit(job, 1, PROMPT - 1 + at, at, 1, (7,), "", ("s1", "s2"), envelopes)
        link.write([CommitText(commit, " seven")])
        rows = tuple(range(root, root + ROWS))
        parents = (last, *(root for _ in rows[1:]))
        positions = (PROMPT + at, *(PROMPT + at + 1 for _ in rows[1:]))
        link.write([tell("s1", Segment(job, 1, at + 1, 1, rows, parents, positions, rows))])
        wait_for_result(link)
        last = root
        root = root + ROWS
    control.revoke(job, "cancelled")


def wait_for_result(link: RedisLink) -> None:
    while not any(isinstance(envelope.message, Answer) for envelope in link.read(2.0).envelopes):
        continue


# ---- the bare hop --------------------------------------------------------------------------------


def bare_reader(url: str, rounds: int, pipe: Any) -> None:
    client = DirectClient(url)
    cursor = b"0"
    stamps = []
    pipe.send("ready")
    while len(stamps) < rounds:
        (found,) = client.run([("XREAD", "BLOCK", 2000, "STREAMS", "bare", cursor)])
        now = time.monotonic()
        for entry, _ in found[0][1]:
            cursor = entry
            stamps.append(now)
        client.run([("XADD", "bare-ack", "*", "a", 1)])
    pipe.send(stamps)


def bare_hop(url: str, size: int, rounds: int) -> list[float]:
    """Seconds from before XADD to after the blocking XREAD that got it, by the fastest client we
    have.

    The stream is kept short, as ours are: a server whose memory grows with every entry is no
    measure.
    """
    ours, theirs = mp.Pipe()
    process = mp.Process(target=bare_reader, args=(url, rounds, theirs))
    process.start()
    ours.recv()
    client = DirectClient(url)
    payload = os.urandom(size)
    sent = []
    cursor = b"0"
    for _ in range(rounds):
        sent.append(time.monotonic())
        client.run([("XADD", "bare", "MAXLEN", "~", 100, "*", "d", payload)])
        (found,) = client.run([("XREAD", "BLOCK", 2000, "STREAMS", "bare-ack", cursor)])
        cursor = found[0][1][-1][0]
    stamps = ours.recv()
    process.join()
    client.run([("DEL", "bare", "bare-ack")])
    return [got - put for got, put in zip(stamps[10:], sent[10:], strict=True)]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=2000)
    rounds = arguments.parse_args().rounds
    print(machine_line())
    with PrivateBroker() as broker:
        report_hops(broker.url, rounds)
        bare, ours = commits(broker.url, rounds)
    print("\n| | p50 us | p99 us | over bare |\n|---|---|---|---|")
    print(Quantiles.of(bare).row("bare EVALSHA, 10 writes"))
    print(Quantiles.of(ours).row("our commit, 4 stages", bare=Quantiles.of(bare)))
    same, block, prune = prunes(max(200, rounds // 5))
    print("\n| | p50 us | p99 us | over bare |\n|---|---|---|---|")
    print(Quantiles.of(same).row("in-place copy of the same 12 rows"))
    print(Quantiles.of(block).row("in-place copy of 12 neighbouring rows"))
    print(Quantiles.of(prune).row("our prune, 80 rows to 12", bare=Quantiles.of(same)))


def report_hops(url: str, rounds: int) -> None:
    print("\n| hop | p50 us | p99 us | over bare |\n|---|---|---|---|")
    for name, hidden in HIDDEN.items():
        bare = Quantiles.of(bare_hop(url, ROWS * hidden * 4, rounds))
        ours = Quantiles.of(our_hop(url, hidden, rounds))
        print(bare.row(f"bare, {name}"))
        print(ours.row(f"ours, {name}", bare=bare))
    for name, hidden in HIDDEN.items():
        print(f"\n| of ours at {name} | us |\n|---|---|")
        for part, seconds in parts(url, hidden).items():
            print(f"| {part} | {seconds * 1e6:.0f} |")


if __name__ == "__main__":
    main()
