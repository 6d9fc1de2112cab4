from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import redis

from flowspec.broker.base import Control, Link, Op
from flowspec.broker.keys import Keys
from flowspec.broker.memory import MemoryBroker, MemoryLink
from flowspec.broker.memory_control import MemoryControl
from flowspec.broker.redis_control import RedisControl
from flowspec.broker.redis_link import RedisLink
from flowspec.broker.server import PrivateBroker
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import Accepted, Send
from flowspec.core.protocol.messages import Close, Envelope, Message

STAGES = 2


@dataclass
class Rig:
    """A broker of either kind with its links; closes what it gave out."""

    url: str = ""
    memory: MemoryBroker | None = None
    given: list[Link | Control] = field(default_factory=list)
    keys: Keys = field(default_factory=Keys)

    def link(self, node: str) -> Link:
        link: Link = (
            MemoryLink(self.memory, node)
            if self.memory
            else RedisLink(self.url, self.keys, node, STAGES)
        )
        self.given.append(link)
        return link

    def control(self) -> Control:
        control: Control = (
            MemoryControl(self.memory) if self.memory else RedisControl(self.url, self.keys)
        )
        control.join_intake()  # type: ignore[attr-defined]
        control.set_pipeline({"stages": str(STAGES)})
        self.given.append(control)
        return control

    def start(self, control: Control, draft: Link, **fields: str) -> str:
        """A job that runs under epoch 1, its prompt of two tokens known."""
        job = control.submit({"prompt": "p", **fields})
        (intake,) = [found for found in control.read_intake(1.0) if found.job == job]
        assert control.admit(job, intake.fields) is Code.OK
        control.acknowledge([job])
        assert control.assign(job, 100, {}) is Code.OK
        draft.read(1.0)
        assert draft.write([Accepted(job, 1, (5, 6), "flowspec")]) == [Code.OK]
        return job


def send(
    to: str,
    job: str,
    seq: int,
    message: Message | None = None,
    *,
    sender: str = "d0",
    **more: object,
) -> Op:
    """A message of ``job``; any will do."""
    return Send(to, Envelope(sender, seq, message or Close(job, 1)), **more)  # type: ignore[arg-type]


@pytest.fixture(params=["memory", "redis"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "memory":
        rig = Rig(memory=MemoryBroker())
    else:
        broker: PrivateBroker = request.getfixturevalue("server")
        client: redis.Redis = request.getfixturevalue("client")
        client.ping()
        rig = Rig(url=broker.url)
    yield rig
    for given in rig.given:
        given.close()
