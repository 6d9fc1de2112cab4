"""Sequence numbers per (run, sender, receiver), which detect duplicates and lost messages."""

from __future__ import annotations

from flowspec.core.protocol.addresses import Address
from flowspec.errors import GapError, StateError

#: Most senders of a run: a pipeline has fewer workers.
MOST_SENDERS = 1024


class SeqReader:
    """The receiving side of one run."""

    def __init__(self) -> None:
        self._last: dict[Address, int] = {}

    def accept(self, sender: Address, seq: int) -> bool:
        """Whether the message is new; False: a duplicate. GapError if one before it is missing.

        StateError for one sender too many.
        """
        last = self._last.get(sender, 0)
        if seq <= last:
            return False
        if seq != last + 1:
            raise GapError(
                f"a message was lost: {seq} from {sender} arrived where {last + 1} was due"
            )
        if seq == 1 and len(self._last) >= MOST_SENDERS:
            raise StateError(
                f"a message from {sender}, and there are {MOST_SENDERS} senders already"
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
