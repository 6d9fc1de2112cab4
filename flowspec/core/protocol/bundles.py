"""Messages of several runs that leave for one receiver at one moment travel as one entry.

As entries of their own, an idle stage would begin with the first of them, and the runs of one pass
would be in different passes from then on. Each part of a bundle has its own fence and its own
number, as if it travelled alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.in_order import goes_straight
from flowspec.core.protocol.machine import Send
from flowspec.core.protocol.messages import Answer, Envelope, Segment
from flowspec.core.run.key import RunKey

#: Most rows of a bundle, and of a pass over several runs; a longer segment is alone. Where a pass's
#: time grows with its rows, runs with few rows would wait for all others'.
MOST_ROWS = 128

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bundle:
    """Messages of different runs to one receiver, two or more: segments or answers of no task."""

    sends: tuple[Send, ...]

    @property
    def to(self) -> Address:
        return self.sends[0].to

    @property
    def envelopes(self) -> tuple[Envelope, ...]:
        return tuple(send.envelope for send in self.sends)


def bundled(outputs: Sequence[T], run_of: Callable[[T], RunKey | None]) -> list[T | Bundle]:
    """``outputs``, of one moment, with messages that may travel together in bundles.

    Every run's outputs keep their order. ``run_of``: the run of an output that is no message; None:
    it concerns all.
    """
    found: list[T | Bundle] = []
    waiting = _Waiting()
    for output in outputs:
        if isinstance(output, Send) and goes_straight(output):
            waiting.add(output)
            continue
        run = output.envelope.message.run if isinstance(output, Send) else run_of(output)
        if run is None or run in waiting.runs:
            found += cast(list[T | Bundle], waiting.take())  # all of them came in ``outputs``
        found.append(output)
    return [*found, *cast(list[T | Bundle], waiting.take())]


def sends_of(entry: Send | Bundle) -> tuple[Send, ...]:
    """The messages of an entry."""
    return entry.sends if isinstance(entry, Bundle) else (entry,)


def unbundled(outputs: Sequence[T]) -> Iterator[T]:
    """``outputs``, messages among them, with every bundle's messages in its place."""
    for output in outputs:
        if isinstance(output, Bundle):
            yield from cast(tuple[T, ...], output.sends)
        else:
            yield output


class _Waiting:
    """Messages that wait for others to travel with, by receiver in groups of different runs."""

    def __init__(self) -> None:
        self._groups: dict[Address, list[list[Send]]] = {}
        self.runs: set[RunKey] = set()

    def add(self, send: Send) -> None:
        """Put ``send`` into the first group with room behind all that have messages of its run."""
        groups = self._groups.setdefault(send.to, [])
        run = send.envelope.message.run
        self.runs.add(run)
        behind = max((at + 1 for at, group in enumerate(groups) if _has(group, run)), default=0)
        for group in groups[behind:]:
            if sum(map(_rows, (*group, send))) <= min(map(_most_rows, (*group, send))):
                group.append(send)
                return
        groups.append([send])

    def take(self) -> list[Send | Bundle]:
        """Remove and return all groups; one of a single message is that message."""
        taken = [group for groups in self._groups.values() for group in groups]
        self._groups = {}
        self.runs = set()
        return [Bundle(tuple(group)) if len(group) > 1 else group[0] for group in taken]


def _has(group: Sequence[Send], run: RunKey) -> bool:
    return any(send.envelope.message.run == run for send in group)


def _rows(send: Send) -> int:
    """Rows of a message; one without any, a marker, counts as well."""
    message = send.envelope.message
    return max(1, len(message.ids)) if isinstance(message, Segment | Answer) else 1


def _most_rows(send: Send) -> int:
    """Most rows of an entry that ``send`` is in with others."""
    message = send.envelope.message
    together = message.together if isinstance(message, Segment) else 0
    return together or MOST_ROWS
