"""Simulated links whose transfers occupy both ends, under PipeDec's transfer scheduler."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from flowspec.core.protocol.addresses import GRAPH, Address
from flowspec.core.protocol.messages import Answer, Envelope, Segment, Synced
from flowspec.core.run.key import RunKey
from flowspec.rehearse.devices.transfers import Transfers


@dataclass(frozen=True, slots=True)
class Transfer:
    """A completed transfer; times are virtual seconds."""

    source: Address
    target: Address
    began: float
    ended: float


@dataclass(slots=True, eq=False)
class Letter:
    """A message in transit to ``to``; ``seconds``: its travel time once it departs.

    ``follows``: it is not delivered before these are.
    """

    source: Address
    to: Address
    envelope: Envelope
    seconds: float
    name: str = ""  # of its transfer; empty: not a transfer
    began: float = 0.0  # of its transfer
    arrived: bool = False
    delivered: bool = False
    follows: list[Letter] = field(default_factory=list)

    @property
    def is_transfer(self) -> bool:
        """Whether it occupies both ends: rows or answers that take time between two nodes."""
        rows = isinstance(self.envelope.message, Segment | Answer)
        return rows and self.seconds > 0 and self.source != self.to


class ExclusiveLinks:
    """Decides which letters depart and which are delivered; the caller keeps the clock.

    A receiver gets a sender's messages of one run in the order they were sent, as from a stream:
    a message that overtakes a waiting transfer is held until the transfer arrives. A join, which
    the task graph sends, is also held until the answers to its run that were sent to its receiver
    before it are delivered: it waited for their senders.
    """

    def __init__(self, nodes: Iterable[Address]) -> None:
        self.log: list[Transfer] = []
        self._policy = Transfers(nodes)
        self._transfers: dict[str, Letter] = {}
        self._channels: defaultdict[tuple[RunKey, Address, Address], deque[Letter]] = defaultdict(
            deque
        )
        self._count = 0

    def send(self, letter: Letter, now: float) -> list[Letter]:
        """Send a letter; return the letters that depart now."""
        if isinstance(letter.envelope.message, Synced):
            letter.follows = self._answers_to(letter)
        self._channel(letter).append(letter)
        if not letter.is_transfer:
            return [letter]
        self._count += 1
        letter.name = f"{letter.envelope.message.run.job}/{letter.source}/{letter.to}/{self._count}"
        self._transfers[letter.name] = letter
        return self._begin(self._policy.request(letter.name, letter.source, letter.to), now)

    def arrive(self, letter: Letter, now: float) -> tuple[list[Letter], list[Letter]]:
        """End a letter's travel; return those delivered now, in order, and those that depart."""
        letter.arrived = True
        begun = []
        if letter.name:
            self.log.append(Transfer(letter.source, letter.to, letter.began, now))
            del self._transfers[letter.name]
            begun = self._begin(self._policy.complete(letter.name), now)
        joins = self._channels[letter.envelope.message.run, GRAPH, letter.to]
        return [*_deliver(self._channel(letter)), *_deliver(joins)], begun

    def _answers_to(self, join: Letter) -> list[Letter]:
        """The answers to the join's run that are under way to its receiver."""
        return [
            letter
            for (run, _, to), channel in self._channels.items()
            for letter in channel
            if (run, to) == (join.envelope.message.run, join.to)
            and isinstance(letter.envelope.message, Answer)
        ]

    def _channel(self, letter: Letter) -> deque[Letter]:
        return self._channels[letter.envelope.message.run, letter.envelope.sender, letter.to]

    def _begin(self, names: list[str], now: float) -> list[Letter]:
        letters = [self._transfers[name] for name in names]
        for letter in letters:
            letter.began = now
        return letters


def _deliver(channel: deque[Letter]) -> list[Letter]:
    """Deliver what has arrived, in order, up to the first letter that is held."""
    delivered = []
    while channel and channel[0].arrived and all(one.delivered for one in channel[0].follows):
        letter = channel.popleft()
        letter.delivered = True
        delivered.append(letter)
    return delivered
