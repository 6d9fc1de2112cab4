"""Cost of a hop, a commit and a prune, against a bare hop, bare writes and a bare copy.

    python -m ops.bench.hop [--rounds N] [--runs 1]

All in one run, on private servers over a unix socket and over TCP, with one thread per process. A
hop lasts from the end of a stage's pass to the start of the next stage's pass; both read the
machine-wide monotonic clock. It goes straight into the receiver's inbox, or through the broker;
"round trips" is the link of emulated workers, which waits for every answer. ``--runs``: measure
several times and print the median of the p50 and the highest p99. Prints Markdown.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from flowspec import observe
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.machine import Allocate, Commit, Keep, OpenJob, Send
from flowspec.core.protocol.messages import Answer, Envelope, Message, Open, Prune, Segment
from flowspec.core.protocol.sequence import SeqWriter
from flowspec.core.protocol.work import Choice, Pass, PassDone, Work, WorkResult
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.model.rows.masks import full_mask
from flowspec.model.rows.placement import ContiguousRows
from flowspec.rehearse.emulated_link import EmulatedLink
from flowspec.roles.worker import Worker
from flowspec.transport.base import CommitText, Link, role_of
from flowspec.transport.connections.redis_client import DirectClient
from flowspec.transport.connections.server import Listen, PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.link.inbox import FACT, InboxPlace, free_port, open_inbox
from flowspec.transport.link.live_link import LiveLink
from flowspec.transport.link.peers import Peers
from flowspec.transport.wire.keys import Keys
from ops.bench.jobs import running_job
from ops.bench.parts import PROMPT, ROWS, parts
from ops.bench.report import Quantiles, machine_line
from ops.bench.writes import commits, prunes

#: Hidden sizes (float32) at which 16 rows take 16 KB and 128 KB.
HIDDEN = {"16 KB": 256, "128 KB": 2048}
#: How a hop goes, in the order of the table.
WAYS = ("straight", "broker", "round trips")
HOST = "127.0.0.1"
#: Lifetime of the lease that announces an inbox, ms: longer than any run.
LASTING_MS = 600_000


# ---- our hop: two real stage workers whose passes take no time -----------------------------------


@dataclass
class Stopwatch:
    """A performer that computes no layers and records when its passes start and end.

    The hop includes the preparation of a pass: taking the rows, placing them and building their
    mask.
    """

    hidden: int
    last: bool
    places: ContiguousRows = field(default_factory=ContiguousRows)
    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    def compute(self, work: Work, link: Link) -> WorkResult:
        assert isinstance(work, Pass)
        (part,) = work.parts
        if not part.tokens:
            link.take_rows(part.run, part.segment)
        placement = self.places.place(part)
        full_mask(placement.context, placement.parents, len(part.ids))
        self.started[part.segment] = time.monotonic()
        self.out = np.zeros((len(part.ids), self.hidden), dtype=np.float32)
        done = PassDone((Choice(tuple(7 for _ in part.answers)),))
        self.ended[part.segment] = time.monotonic()
        return done

    def allocate(self, output: Allocate) -> None: ...

    def keep(self, output: Keep) -> None: ...

    def evict(self, run: RunKey) -> None: ...

    def learn(self, output: Any, link: Link) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        """It has no rows."""

    def release(self, run: RunKey) -> None: ...

    def rows(self, part: int, offsets: Sequence[int]) -> Any:
        return self.out if len(offsets) == len(self.out) else self.out[list(offsets)]

    def written(self, commit: Commit) -> CommitText:
        raise NotImplementedError


def stage_link(url: str, stage: int, way: str, stages: int = 2) -> Link:
    """The link of one of ``stages`` by one of WAYS; straight, the next one's must be open."""
    address = stage_address(stage)
    if way == "round trips":
        return EmulatedLink(url, Keys(), address, stages)
    if way == "broker":
        return LiveLink(url, Keys(), address, stages)
    control = RedisControl(url, Keys())
    inbox = peers = None
    if stage > 1:
        # The stage before finds the inbox in this lease.
        place = InboxPlace(host="" if url.startswith("unix:") else HOST)
        inbox = open_inbox(url, Keys(), address, place)
        control.claim(role_of(address), "bench", {FACT: inbox.announced.facts}, LASTING_MS)
    if stage < stages:
        following = stage_address(stage + 1)
        peers = Peers(control, [following], straight=True)
        peers.start()
        peers.wait()
        assert peers.get(following) is not None
    return LiveLink(url, Keys(), address, stages, inbox=inbox, peers=peers)


def stage_process(url: str, stage: int, way: str, hidden: int, pipe: Any, stages: int = 2) -> None:
    observe.configure()
    watch = Stopwatch(hidden, last=stage == stages)
    link = stage_link(url, stage, way, stages)
    worker = Worker(StageMachine(stage, stages), link, watch)
    pipe.send("ready")
    worker.run(pipe.poll)
    pipe.send((watch.started, watch.ended))
    link.close()


def our_hop(url: str, way: str, hidden: int, rounds: int) -> list[float]:
    """Seconds from the end of stage 1's pass to the start of stage 2's, per segment."""
    ends = []
    processes = []
    announce(url, 2)
    for stage in (2, 1):  # the inbox of stage 2 must be announced when stage 1 looks for it
        ours, theirs = mp.Pipe()
        process = mp.Process(target=stage_process, args=(url, stage, way, hidden, theirs))
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
    ended = stamps[1][1]
    started = stamps[0][0]
    return [started[segment] - ended[segment] for segment in sorted(started) if segment > 10]


def announce(url: str, stages: int) -> None:
    """Write the pipeline's record, which a stage's link needs."""
    RedisControl(url, Keys()).set_pipeline({"stages": str(stages)})


def drive(url: str, rounds: int, *, count: int = 2, width: int = ROWS) -> None:
    """Act as the draft worker of ``count`` stages: one segment at a time; accept its root.

    A segment has ``width`` rows, a root and its children.
    """
    control = RedisControl(url, Keys())
    link = EmulatedLink(url, Keys(), DRAFT, count)
    seqs = SeqWriter()
    stages = tuple(map(stage_address, range(1, count + 1)))
    job = running_job(control, stages=count)
    run = RunKey(job, 1)
    link.read(1.0)

    def tell(to: Address, message: Message) -> Send:
        return Send(to, Envelope(DRAFT, seqs.next(to), message))

    opened = Open(run, PROMPT, PROMPT + rounds + 600, Sampling())
    ids = tuple(range(PROMPT))
    prompt = Segment(run, 0, 0, ids, tuple(at - 1 for at in ids), ids, ids)
    link.write(
        [
            OpenJob(run, ids, "bench"),
            *(tell(stage, opened) for stage in stages),
            tell(stages[0], prompt),
        ]
    )
    wait_for_result(link)
    root = PROMPT
    last = PROMPT - 1
    for at in range(rounds):
        prune = Prune(run, PROMPT - 1 + at, (last,), root, ())
        envelopes = tuple(Envelope(DRAFT, seqs.next(stage), prune) for stage in stages)
        commit = Commit(run, PROMPT - 1 + at, at, 1, (7,), "", stages, envelopes)
        link.write([CommitText(commit, " seven", (0,))])
        rows = tuple(range(root, root + width))
        parents = (last, *(root for _ in rows[1:]))
        positions = (PROMPT + at, *(PROMPT + at + 1 for _ in rows[1:]))
        segment = Segment(run, at + 1, 1, rows, parents, positions, rows)
        link.write([tell(stages[0], segment)])
        wait_for_result(link)
        last = root
        root = root + width
    control.revoke(job, "cancelled")


def wait_for_result(link: EmulatedLink) -> None:
    while not any(isinstance(envelope.message, Answer) for envelope in link.read(2.0).envelopes):
        continue


# ---- the bare hop --------------------------------------------------------------------------------


def bare_reader(url: str, rounds: int, pipe: Any) -> None:
    client = DirectClient(url)
    cursor = b"0"
    stamps: list[float] = []
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
    """Seconds from before XADD to after the blocking XREAD of its entry, by the fastest client.

    The stream is trimmed, as ours are: a server whose memory grows per entry is slower.
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


def repeated(
    runs: int, measure: Callable[[str], Sequence[Sequence[float]]], *, tcp: bool = False
) -> list[Quantiles]:
    """Quantiles over ``runs`` calls of ``measure``, one per series of seconds it returns.

    ``measure`` gets the URL of a new broker each time, over a unix socket or over ``tcp``.
    """
    found = []
    for _ in range(runs):
        with PrivateBroker(listen=Listen(HOST, free_port(HOST)) if tcp else None) as broker:
            found.append([Quantiles.of(series) for series in measure(broker.url)])
    return [Quantiles.over(series) for series in zip(*found, strict=True)]


def main() -> None:
    arguments = Parser()
    arguments.add_argument("--rounds", type=int, default=2000)
    arguments.add_argument("--runs", type=int, default=1)
    given = arguments.parse_args()
    print(machine_line())
    report_hops(given.rounds, given.runs)
    bare, ours = repeated(given.runs, lambda url: commits(url, given.rounds))
    print("\n| | p50 us | p99 us | over bare |\n|---|---|---|---|")
    print(bare.row("bare EVALSHA, 10 writes"))
    print(ours.row("our commit, 4 stages", bare=bare))
    same, block, prune = repeated(given.runs, lambda _: prunes(max(200, given.rounds // 5)))
    print("\n| | p50 us | p99 us | over bare |\n|---|---|---|---|")
    print(same.row("in-place copy of the same 12 rows"))
    print(block.row("in-place copy of 12 neighbouring rows"))
    print(prune.row("our prune, 80 rows to 12", bare=same))


def report_hops(rounds: int, runs: int) -> None:
    print("\n| hop | p50 us | p99 us | over bare |\n|---|---|---|---|")
    for tcp, (name, hidden) in product((False, True), HIDDEN.items()):
        measure = partial(_all_hops, hidden=hidden, rounds=rounds)
        bare, *ours = repeated(runs, measure, tcp=tcp)
        where = f"{name}, {'TCP' if tcp else 'unix socket'}"
        print(bare.row(f"bare, {where}"))
        for way, hop in zip(WAYS, ours, strict=True):
            print(hop.row(f"ours, {way}, {where}", bare=bare))
    for name, hidden in HIDDEN.items():
        print(f"\n| of ours at {name} | us |\n|---|---|")
        with PrivateBroker() as broker:
            for part, seconds in parts(broker.url, hidden).items():
                print(f"| {part} | {seconds * 1e6:.0f} |")


def _all_hops(url: str, *, hidden: int, rounds: int) -> list[list[float]]:
    bare = bare_hop(url, ROWS * hidden * 4, rounds)
    return [bare, *(our_hop(url, way, hidden, rounds) for way in WAYS)]


if __name__ == "__main__":
    main()
