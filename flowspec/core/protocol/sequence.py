"""Sequence numbers: per (job, epoch, sender), last + 1 is taken, older is a duplicate, a hole is a
gap.
"""

from __future__ import annotations

from flowspec.errors import GapError


class SeqReader:
    """The receiving side for one job and epoch."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def accept(self, sender: str, seq: int) -> bool:
        """True: new. False: a duplicate, ignore it. Raises GapError when something is missing."""
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
    """The sending side for one job and epoch."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def next(self, receiver: str) -> int:
        """The next number for ``receiver``, from 1."""
        self._last[receiver] = self._last.get(receiver, 0) + 1
        return self._last[receiver]
