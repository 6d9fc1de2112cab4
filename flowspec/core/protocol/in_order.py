"""Puts messages that travel on two ways back into the order in which each sender numbered them.

A message of a run may go straight into its receiver's inbox while the one before it goes through
the control broker. The receiver delivers the messages of one run and sender in the order of their
numbers, each once; between senders there is no order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowspec.core.protocol.addresses import Address, Role
from flowspec.core.protocol.machine import Send
from flowspec.core.protocol.messages import Answer, Envelope, Segment
from flowspec.core.run.key import RunKey

#: How long a message waits for those before it, seconds.
PATIENCE_SECONDS = 5.0
#: Most messages held, and most (run, sender) pairs remembered; the oldest are let go first.
MOST_HELD = 1024
MOST_CHANNELS = 4096
#: Senders that number their messages and may use two ways.
_NUMBERED = (Role.DRAFT, Role.VERIFY, Role.MIDDLE)

_Channel = tuple[RunKey, Address]


@dataclass(slots=True)
class _Line:
    """Messages of one run from one sender. ``held``: by number, those ahead of ``due``."""

    due: int = 1
    held: dict[int, Envelope] = field(default_factory=dict)
    since: float = 0.0  # since when ``held`` waits for ``due``


def goes_straight(send: Send) -> bool:
    """Whether ``send`` may go straight: a segment or an answer that concerns no task."""
    carries_rows = isinstance(send.envelope.message, Segment | Answer)
    return carries_rows and not (send.task or send.completes)


class InOrder:
    """The order of one receiver's messages; times are seconds on the caller's clock.

    ``patience``: a message whose predecessor has not come for so long is delivered all the same,
    and its receiver finds the gap.
    """

    def __init__(self, patience: float = PATIENCE_SECONDS) -> None:
        self._patience = patience
        self._channels: dict[_Channel, _Line] = {}
        self._held = 0

    def arrive(self, envelope: Envelope, now: float) -> list[Envelope]:
        """The messages that may be delivered now that ``envelope`` is here, in order."""
        if envelope.sender.role not in _NUMBERED:
            return [envelope]
        state = self._channel(envelope)
        if envelope.seq < state.due:
            return []
        if envelope.seq > state.due:
            return self._hold(state, envelope, now)
        state.due += 1
        return [envelope, *self._release(state, now)] if state.held else [envelope]

    @property
    def deadline(self) -> float | None:
        """When ``overdue`` has something to deliver; None: nothing is held."""
        if not self._held:
            return None
        return self._patience + min(state.since for state in self._channels.values() if state.held)

    def overdue(self, now: float) -> list[Envelope]:
        """The held messages whose predecessors have not come in time, and all behind them."""
        if not self._held:
            return []
        late = [
            state
            for state in self._channels.values()
            if state.held and now - state.since >= self._patience
        ]
        return [envelope for state in late for envelope in self._let_go(state)]

    def forget(self, run: RunKey) -> None:
        """Drop everything of ``run``, which has ended."""
        for channel in [channel for channel in self._channels if channel[0] == run]:
            self._held -= len(self._channels.pop(channel).held)

    def _channel(self, envelope: Envelope) -> _Line:
        channel = (envelope.message.run, envelope.sender)
        state = self._channels.get(channel)
        if state is None:
            if len(self._channels) >= MOST_CHANNELS:
                self._held -= len(self._channels.pop(next(iter(self._channels))).held)
            state = self._channels[channel] = _Line()
        return state

    def _hold(self, state: _Line, envelope: Envelope, now: float) -> list[Envelope]:
        if envelope.seq in state.held:
            return []
        if not state.held:
            state.since = now
        state.held[envelope.seq] = envelope
        self._held += 1
        if self._held <= MOST_HELD:
            return []
        oldest = min((other for other in self._channels.values() if other.held), key=_since)
        return self._let_go(oldest)

    def _release(self, state: _Line, now: float) -> list[Envelope]:
        """The held messages that are due, in order; those left wait for another one from now on."""
        released = []
        while state.due in state.held:
            released.append(state.held.pop(state.due))
            state.due += 1
        self._held -= len(released)
        state.since = now
        return released

    def _let_go(self, state: _Line) -> list[Envelope]:
        """All held messages of a channel, in order, whatever is missing."""
        released = [state.held[seq] for seq in sorted(state.held)]
        self._held -= len(released)
        state.due = released[-1].seq + 1
        state.held = {}
        return released


def _since(state: _Line) -> float:
    return state.since
