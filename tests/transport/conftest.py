from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.bundles import Bundle
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.in_order import InOrder
from flowspec.core.protocol.ledger import JobState
from flowspec.core.protocol.machine import Commit, OpenJob, Send
from flowspec.core.protocol.messages import Close, Envelope, Message, Prune
from flowspec.core.run.key import RunKey
from flowspec.rehearse.emulated_link import EmulatedLink
from flowspec.transport.base import CommitText, Link, Op, PutRows, ReadResult
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.redis_client import BrokerClient
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.link.commands import codes_of
from flowspec.transport.link.live_link import LiveLink
from flowspec.transport.link.log_reader import last_id
from flowspec.transport.wire.entries import order
from flowspec.transport.wire.keys import Keys
from tests.addresses import D0, S1, S2
from tests.clients import ControlAndClient, RedisControlAndClient
from tests.transport.memory import MemoryBroker, MemoryLink
from tests.transport.memory_control import MemoryControl

STAGES = 2


class Settled(LiveLink):
    """A live link that waits for what is under way: it returns codes, and reads all there is."""

    def write(self, ops: Sequence[Op]) -> list[Code]:
        self._noted: list[tuple[Op, list[Code]]] = []
        super().write(ops)
        while self._writes.under_way:
            self._confirm()
        full = {id(op) for op, code in self._unwritten if isinstance(op, PutRows)}
        self._unwritten = []
        codes = ([Code.FULL] if id(op) in full else self._codes(op) for op in ops)
        return [code for found in codes for code in found]

    def _codes(self, op: Op) -> list[Code]:
        """The codes of the first operation noted that is ``op``; a line beyond its cap has none."""
        at = next((at for at, (noted, _) in enumerate(self._noted) if _same(noted, op)), None)
        return [Code.OK] if at is None else self._noted.pop(at)[1]

    def _note_codes(self, ops: Sequence[Op], answers: list[Any]) -> None:
        super()._note_codes(ops, answers)
        pairs = zip(ops, answers, strict=True)
        self._noted += [(op, codes_of(op, answer)) for op, answer in pairs]

    def read(self, block_seconds: float) -> ReadResult:
        asking = BrokerClient(self._writes.url)
        ends = {stream: last_id(asking, stream) for stream in self._reader.cursors}
        asking.close()
        found = super().read(block_seconds)
        while self._is_behind(ends):
            found = _together(found, super().read(block_seconds))
        return found

    def _is_behind(self, ends: Mapping[str, str]) -> bool:
        cursors = self._reader.cursors
        return any(order(cursors[stream]) < order(end) for stream, end in ends.items())


def _same(noted: Op, op: Op) -> bool:
    """Whether ``noted`` is ``op``; the link makes its own bundles."""
    if isinstance(noted, Bundle) and isinstance(op, Bundle):
        return noted.sends == op.sends
    return noted is op


def _together(first: ReadResult, second: ReadResult) -> ReadResult:
    return ReadResult(
        first.envelopes + second.envelopes,
        first.refused + second.refused,
        first.stamps + second.stamps,
        first.unwritten + second.unwritten,
    )


@dataclass
class Rig:
    """A broker of either kind and its links; closes them.

    ``live``: whether workers have live links, which never wait for the network.
    """

    url: str = ""
    live: bool = False
    memory: MemoryBroker | None = None
    middles: int = 0
    given: list[Link | ControlAndClient] = field(default_factory=list)
    keys: Keys = field(default_factory=Keys)

    def link(self, address: Address, holder: Holder | None = None) -> Link:
        link: Link
        if self.memory is not None:
            link = MemoryLink(self.memory, address, holder)
        else:
            kind = Settled if self.live else EmulatedLink
            made = kind(self.url, self.keys, address, STAGES, middles=self.middles, holder=holder)
            if isinstance(made, LiveLink):
                made._order = InOrder(patience=0.1)
            link = made
        self.given.append(link)
        return link

    def control(self) -> ControlAndClient:
        control: ControlAndClient
        if self.memory is not None:
            control = MemoryControl(self.memory)
        else:
            control = RedisControlAndClient(self.url, self.keys)
        control.join_intake()
        if not control.pipeline():
            middles = [f"middle-{model}" for model in range(1, self.middles + 1)]
            control.set_pipeline({"stages": str(STAGES), "middles": json.dumps(middles)})
        self.given.append(control)
        return control

    def start(self, control: ControlAndClient, draft: Link, **fields: str) -> str:
        """A job running under epoch 1 with a known prompt of two tokens."""
        job = control.submit({"prompt": "p", **fields})
        (intake,) = [found for found in control.read_intake(1.0) if found.job == job]
        assert control.admit(job, intake.fields) is Code.OK
        control.acknowledge([job])
        assert control.assign(job, 100, {}) is Code.OK
        draft.read(1.0)
        assert draft.write([OpenJob(RunKey(job, 1), (5, 6), "flowspec")]) == [Code.OK]
        return job

    def requeue(self, job: str) -> None:
        """Put a running job back at the end of the queue, as if its run had done nothing."""
        if self.memory is not None:
            ledger = self.memory.ledger
            ledger.jobs[job].state = JobState.QUEUED
            ledger.queue.append(job)
            ledger.running.discard(job)
            return
        client = connect(self.url)
        client.hset(self.keys.job(job), "state", JobState.QUEUED.value)
        client.srem(self.keys.running, job)
        client.rpush(self.keys.queue, job)
        client.close()

    def close(self) -> None:
        """Close all links."""
        for given in self.given:
            given.close()
        self.given.clear()


def send(
    to: Address,
    job: str,
    seq: int,
    message: Message | None = None,
    *,
    sender: Address = D0,
    epoch: int = 1,
    **more: Any,
) -> Op:
    """Some message of a run of ``job``."""
    return Send(to, Envelope(sender, seq, message or Close(RunKey(job, epoch))), **more)


def bundle(to: Address, *messages: Message, seq: int = 1) -> Op:
    """``messages`` of the draft worker as one entry, each its run's number ``seq``."""
    sends = tuple(Send(to, Envelope(D0, seq, message)) for message in messages)
    return Bundle(sends) if len(sends) > 1 else sends[0]


def commit(
    job: str,
    offset: int = 1,
    *,
    seq: int = 1,
    epoch: int = 1,
    finish: str = "",
    completes: tuple[str, ...] = (),
) -> CommitText:
    """A commit of one row at context length ``offset``; the prompt has two tokens."""
    run = RunKey(job, epoch)
    prune = Envelope(D0, seq, Prune(run, offset, (offset,), offset + 1, ()))
    made = Commit(
        run,
        offset,
        emitted=offset - 1,
        advance=1,
        tokens=(40 + offset,),
        finish=finish,
        to=(S1, S2),
        prunes=(prune, prune),
        completes=completes,
    )
    return CommitText(made, f"t{offset}", (len(f"t{offset}"),))


@contextmanager
def rig_over(kind: str, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig over an empty broker: ``memory``, ``redis``, or ``live`` with live links to it."""
    if kind == "memory":
        rig = Rig(memory=MemoryBroker())
    else:
        broker: PrivateBroker = request.getfixturevalue("server")
        request.getfixturevalue("client")
        rig = Rig(url=broker.url, live=kind == "live")
    yield rig
    rig.close()


@pytest.fixture(params=["memory", "redis", "live"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with rig_over(request.param, request) as rig:
        yield rig
