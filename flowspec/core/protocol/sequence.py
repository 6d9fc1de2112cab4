"""Sequence numbers per (run, sender, receiver), which detect duplicates and lost messages."""

from __future__ import annotations

from flowspec.core.protocol.addresses import Address
from flowspec.errors import GapError


class SeqReader:
    """The receiving side of one run."""

    def __init__(self) -> None:
        self._last: dict[Address, int] = {}

    def accept(self, sender: Address, seq: int) -> bool:
        """Whether the message is new; False: a duplicate. GapError if one before it is missing."""
        last = self._last.get(sender, 0)
        if seq <= last:
            return False
        if seq != last + 1:
            raise GapError(
                f"message {seq} from {sender} arrived where {last + 1} was due: one was lost"
            )
        self._last[sender] = seq
        return True


class SeqWriter:
    """The sending side of one run."""

    def __init__(self) -> None:
        self._last: dict[Address, int] = {}

    def next(self, receiver: Address) -> int:
        """The next number for ``receiver``, from 1."""
        self._last[receiver] = self._last.get(receiver, 0) + 1
        return self._last[receiver]
