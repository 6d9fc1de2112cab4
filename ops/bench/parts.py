"""The software parts of a hop, each timed on its own, at 16 rows."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowspec.core.protocol.addresses import DRAFT, GRAPH, stage_address
from flowspec.core.protocol.machine import Compute, Done, Output, Poll, Received, Send
from flowspec.core.protocol.messages import Envelope, Open, Prune, Segment
from flowspec.core.protocol.work import Choice, Part, Pass, PassDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.model.rows.masks import full_mask
from flowspec.model.rows.placement import ContiguousRows, Placement
from flowspec.rehearse.emulated_link import EmulatedLink
from flowspec.transport.base import PutRows
from flowspec.transport.connections.redis_client import DirectClient
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.wire import codec
from flowspec.transport.wire.keys import Keys
from ops.bench.jobs import running_job

ROWS = 16
PROMPT = 32


@dataclass(frozen=True)
class StageSteps:
    """Median seconds of a stage's work around a pass, without its layers.

    ``out``: from the end of the pass to the message to send. ``into``: from a message to the next
    pass. ``placing``: placing that pass's rows; ``placement`` is one result.
    """

    out: float
    into: float
    placing: float
    placement: Placement


def timed(*calls: Callable[[], Any], rounds: int = 300) -> list[float]:
    """Median seconds of each of ``calls``, taken in turn."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, seconds in zip(calls, taken, strict=True):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in taken]


def parts(url: str, hidden: int) -> dict[str, float]:
    """Seconds per software part of a hop, at 16 rows of ``hidden`` float32."""
    rows = np.zeros((ROWS, hidden), dtype=np.float32)
    ids = tuple(range(40, 40 + ROWS))
    segment = Segment(RunKey("1700000000000-0", 1), 9, 1, ids, (39, *(40 for _ in ids[1:])), ids)
    wire = codec.encode_rows(rows)
    message = codec.encode(segment)
    steps = machine_steps()
    placement = steps.placement
    pack, unpack, mask = timed(
        lambda: (codec.encode(segment), codec.encode_rows(rows)),
        lambda: (codec.decode(message), codec.decode_rows(wire)),
        lambda: full_mask(placement.context, placement.parents, ROWS),
    )
    return {
        "sender: machine (pass done, message out)": steps.out,
        "sender: codec (envelope, rows)": pack,
        **broker_parts(url, segment, rows),
        "receiver: codec (envelope, rows)": unpack,
        "receiver: machine (message in, pass out)": steps.into,
        "receiver: places of the rows": steps.placing,
        "receiver: mask": mask,
    }


def broker_parts(url: str, segment: Segment, rows: np.ndarray) -> dict[str, float]:
    """Seconds of a hop's write beyond a bare write of the same bytes, each one round trip."""
    keys = Keys("parts")
    job = running_job(RedisControl(url, keys), stages=2)
    run = RunKey(job, 1)
    segment = dataclasses.replace(segment, run=run)
    sender = stage_address(1)
    receiver = stage_address(2)
    link = EmulatedLink(url, keys, sender, 2)
    bare = DirectClient(url)
    message = codec.encode(segment)
    data = codec.encode_rows(rows)
    seqs = itertools.count(1)

    def send() -> Send:
        return Send(receiver, Envelope(sender, next(seqs), segment))

    def put() -> PutRows:
        return PutRows(receiver, run, segment.segment, rows)

    def add(data: bytes) -> Callable[[], Any]:
        return lambda: bare.run([("XADD", "bare", "*", "d", data)])

    script, envelope, whole, payload = timed(
        lambda: link.write([send()]), add(message), lambda: link.write([put(), send()]), add(data)
    )
    bare.run([("DEL", "bare", keys.rows(receiver))])
    return {
        "write: script (fence, sequence, graph step) and envelope, over a bare XADD": script
        - envelope,
        "write: rows, script and envelope in one transaction, over a bare XADD of the rows": whole
        - payload,
    }


def machine_steps(rounds: int = 300) -> StageSteps:
    """Time a stage's steps around passes of 16 rows."""
    stages = [(StageMachine(stage, 3), ContiguousRows()) for stage in (1, 2)]
    run = RunKey("j", 1)
    opened = Open(run, PROMPT, 100_000, Sampling())
    ids = tuple(range(PROMPT))
    prompt = Segment(run, 0, 0, ids, tuple(at - 1 for at in ids), ids, ids)
    for machine, places in stages:
        machine.step(Received((Envelope(DRAFT, 1, opened), Envelope(GRAPH, 1, prompt))), 0.0)
        places.place(part_of(machine.step(Poll(), 0.0)))
        machine.step(Done(PassDone((Choice(),))), 0.0)
    last = PROMPT - 1
    root = PROMPT
    out = []
    into = []
    placing = []
    for at in range(rounds):
        prune = Prune(run, PROMPT - 1 + at, (last,), root, ())
        rows = tuple(range(root, root + ROWS))
        segment = Segment(run, at + 1, 1, rows, (last, *(root for _ in rows[1:])), rows, rows)
        for machine, places in stages:
            machine.step(Received((Envelope(DRAFT, at + 2, prune),)), 0.0)
            began = time.perf_counter()
            machine.step(Received((Envelope(GRAPH, at + 2, segment),)), 0.0)
            outputs = machine.step(Poll(), 0.0)
            into.append(time.perf_counter() - began)
            part = part_of(outputs)
            began = time.perf_counter()
            placement = places.place(part)
            placing.append(time.perf_counter() - began)
            began = time.perf_counter()
            machine.step(Done(PassDone((Choice(),))), 0.0)
            out.append(time.perf_counter() - began)
        last = root
        root = root + ROWS
    return StageSteps(
        statistics.median(out), statistics.median(into), statistics.median(placing), placement
    )


def part_of(outputs: Sequence[Output]) -> Part:
    """The only part of the pass that a stage requests."""
    (output,) = outputs
    assert isinstance(output, Compute)
    assert isinstance(output.work, Pass)
    (part,) = output.work.parts
    return part
