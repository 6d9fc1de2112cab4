"""The software parts of a hop, each by itself, at 16 rows."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flowspec.broker import codec
from flowspec.broker.base import PutRows
from flowspec.broker.keys import Keys
from flowspec.broker.redis_client import DirectClient
from flowspec.broker.redis_control import RedisControl
from flowspec.broker.redis_link import RedisLink
from flowspec.core.protocol.machine import Choice, Done, PassDone, Poll, Received, Send
from flowspec.core.protocol.messages import Envelope, Open, Prune, Segment
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.core.tree.slots import SlotTable
from flowspec.model.masks import full_mask
from ops.bench.jobs import running_job

ROWS = 16
PROMPT = 32


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
    """Seconds each software part of a hop takes, at 16 rows of ``hidden`` float32."""
    rows = np.zeros((ROWS, hidden), dtype=np.float32)
    ids = tuple(range(40, 40 + ROWS))
    segment = Segment("1700000000000-0", 1, 9, 1, ids, (39, *(40 for _ in ids[1:])), ids)
    wire = codec.encode_rows(rows)
    message = codec.encode(segment)
    table = SlotTable(PROMPT)
    table.plan(tuple(range(PROMPT)), tuple(range(-1, PROMPT - 1)), PROMPT - 1)
    table.prune([PROMPT - 1], 40)
    plan = table.plan(ids, segment.parents)
    out, into = machine_steps()
    pack, unpack, mask = timed(
        lambda: (codec.encode(segment), codec.encode_rows(rows)),
        lambda: (codec.decode(message), codec.decode_rows(wire)),
        lambda: full_mask(plan.context, plan.parents, ROWS),
    )
    return {
        "sender: machine (pass done, message out)": out,
        "sender: codec (envelope, rows)": pack,
        **broker_parts(url, segment, rows),
        "receiver: codec (envelope, rows)": unpack,
        "receiver: machine (message in, pass out)": into,
        "receiver: mask": mask,
    }


def broker_parts(url: str, segment: Segment, rows: np.ndarray) -> dict[str, float]:
    """Seconds a hop's write takes over bare ones of the same bytes, each a round trip
    of its own.
    """
    keys = Keys("parts")
    job = running_job(RedisControl(url, keys), stages=2)
    segment = dataclasses.replace(segment, job=job)
    link = RedisLink(url, keys, "s1", 2)
    bare = DirectClient(url)
    message = codec.encode(segment)
    data = codec.encode_rows(rows)
    seqs = itertools.count(1)

    def send() -> Send:
        return Send("s2", Envelope("s1", next(seqs), segment))

    def put() -> PutRows:
        return PutRows("s2", job, 1, segment.segment, rows)

    def add(data: bytes) -> Callable[[], Any]:
        return lambda: bare.run([("XADD", "bare", "*", "d", data)])

    script, envelope, whole, payload = timed(
        lambda: link.write([send()]), add(message), lambda: link.write([put(), send()]), add(data)
    )
    bare.run([("DEL", "bare", keys.rows("s2"))])
    return {
        "write: script (fence, sequence, graph step) and envelope, over a bare XADD": script
        - envelope,
        "write: rows, script and envelope in one transaction, over a bare XADD of the rows": whole
        - payload,
    }


def machine_steps(rounds: int = 300) -> tuple[float, float]:
    """Median seconds of a stage's two steps around a pass of 16 rows."""
    sender = StageMachine(1, 3)
    receiver = StageMachine(2, 3)
    seq = 2
    opened = Open("j", 1, PROMPT, 100_000, Sampling())
    ids = tuple(range(PROMPT))
    prompt = Segment("j", 1, 0, 0, ids, tuple(at - 1 for at in ids), ids, ids)
    for machine in (sender, receiver):
        machine.step(Received((Envelope("d0", 1, opened), Envelope("x", 1, prompt))), 0.0)
        machine.step(Poll(), 0.0)
        machine.step(Done(PassDone((Choice(),))), 0.0)
    last = PROMPT - 1
    root = PROMPT
    out = []
    into = []
    for at in range(rounds):
        prune = Prune("j", 1, PROMPT - 1 + at, (last,), root, ())
        rows = tuple(range(root, root + ROWS))
        segment = Segment("j", 1, at + 1, 1, rows, (last, *(root for _ in rows[1:])), rows, rows)
        for machine in (sender, receiver):
            machine.step(Received((Envelope("d0", seq, prune),)), 0.0)
            began = time.perf_counter()
            machine.step(Received((Envelope("x", seq, segment),)), 0.0)
            machine.step(Poll(), 0.0)
            middle = time.perf_counter()
            machine.step(Done(PassDone((Choice(),))), 0.0)
            into.append(middle - began)
            out.append(time.perf_counter() - middle)
        last = root
        root = root + ROWS
        seq = seq + 1
    return statistics.median(out), statistics.median(into)
