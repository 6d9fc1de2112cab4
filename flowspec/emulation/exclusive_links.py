"""Links of a simulation whose transfers occupy both their ends, by PipeDec's transfer scheduler."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from flowspec.core.protocol.messages import Answer, Envelope, Segment
from flowspec.emulation.transfers import Transfers


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer that took place; times are virtual seconds."""

    source: str
    target: str
    began: float
    ended: float


@dataclass(slots=True, eq=False)
class Letter:
    """A message on its way to ``to``; ``seconds``: how long it travels once it begins to."""

    source: str
    to: str
    envelope: Envelope
    seconds: float
    name: str = ""  # of its transfer; empty if it is none
    began: float = 0.0  # of its transfer
    arrived: bool = False

    @property
    def is_transfer(self) -> bool:
        """Whether it occupies its ends: rows or answers that take time between two
        different nodes.
        """
        rows = isinstance(self.envelope.message, Segment | Answer)
        return rows and self.seconds > 0 and self.source != self.to


class ExclusiveLinks:
    """Says which letters begin to travel and which are delivered; its caller has the clock.

    A receiver gets a sender's messages of one job in the order they were sent, as from a stream:
    one that overtook a waiting transfer is held until that has arrived.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self.log: list[Transfer] = []
        self._policy = Transfers(nodes)
        self._transfers: dict[str, Letter] = {}
        self._channels: defaultdict[tuple[str, str, str], deque[Letter]] = defaultdict(deque)
        self._count = 0

    def send(self, letter: Letter, now: float) -> list[Letter]:
        """Take a letter; the letters that begin to travel now."""
        self._channel(letter).append(letter)
        if not letter.is_transfer:
            return [letter]
        self._count += 1
        letter.name = f"{letter.envelope.message.job}/{letter.source}/{letter.to}/{self._count}"
        self._transfers[letter.name] = letter
        return self._begin(self._policy.request(letter.name, letter.source, letter.to), now)

    def arrive(self, letter: Letter, now: float) -> tuple[list[Letter], list[Letter]]:
        """A letter has travelled; those delivered now, in order, and those that begin to travel."""
        letter.arrived = True
        begun = []
        if letter.name:
            self.log.append(Transfer(letter.source, letter.to, letter.began, now))
            del self._transfers[letter.name]
            begun = self._begin(self._policy.complete(letter.name), now)
        channel = self._channel(letter)
        delivered = []
        while channel and channel[0].arrived:
            delivered.append(channel.popleft())
        return delivered, begun

    def _channel(self, letter: Letter) -> deque[Letter]:
        return self._channels[letter.envelope.message.job, letter.envelope.sender, letter.to]

    def _begin(self, names: list[str], now: float) -> list[Letter]:
        letters = [self._transfers[name] for name in names]
        for letter in letters:
            letter.began = now
        return letters
