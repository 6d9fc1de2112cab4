"""The states of a run at the draft worker: all transitions, and which messages each state takes.

    state     ENCODED  TOKENIZED  FIRST_TOKEN  COMPLETE  REPORTED  FAILED  UNCOMMITTED  REVOKED
    ENCODING  PREFILL  ENDED      -            -         -         ENDED   -            ENDED
    PREFILL   -        -          DECODE       CLOSING   -         ENDED   ENDED        ENDED
    DECODE    -        -          -            CLOSING   -         ENDED   ENDED        ENDED
    CLOSING   -        -          -            -         ENDED     -       ENDED        ENDED
    ENDED     -        -          -            -         -         -       -            -

ENCODING: the prompt's text is being tokenized. PREFILL: the stages compute the prompt. DECODE: a
tree is grown and verified. CLOSING: the text is complete and its last commit sent; the stages'
reports are awaited. ENDED: the run is forgotten.

A run in CLOSING does not fail by what a stage reports, for the text is complete; only the broker's
refusal of the last commit ends it with an error. A message that the state does not take advances
its sender's sequence number and has no other effect:

    state       takes
    ENCODING    -
    PREFILL     Answer, Fault, Synced, PrefixLost
    DECODE      Answer, Fault, Synced
    CLOSING     StageReport
    ENDED       -

``Submit`` and ``Revoke`` concern runs as a whole; the machine handles them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from flowspec.core.protocol.messages import (
    Answer,
    Fault,
    Message,
    PrefixLost,
    StageReport,
    Synced,
)
from flowspec.errors import StateError


class State(enum.Enum):
    """The state of a run; see the module's docstring."""

    ENCODING = "encoding"
    PREFILL = "prefill"
    DECODE = "decode"
    CLOSING = "closing"
    ENDED = "ended"


class Event(enum.Enum):
    """The cause of a transition."""

    ENCODED = "encoded"  #: the prompt's ids are known
    TOKENIZED = "tokenized"  #: they are known, and all that was asked for
    FIRST_TOKEN = "first token"  #: the target has chosen the token after the prompt
    COMPLETE = "complete"  #: the commit of the last token is sent
    REPORTED = "reported"  #: all stages have reported, or the wait for them has ended
    FAILED = "failed"  #: the run cannot go on
    UNCOMMITTED = "uncommitted"  #: the broker refused a commit
    REVOKED = "revoked"  #: a newer run of the job replaces it


TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    State.ENCODING: {
        Event.ENCODED: State.PREFILL,
        Event.TOKENIZED: State.ENDED,
        Event.FAILED: State.ENDED,
        Event.REVOKED: State.ENDED,
    },
    State.PREFILL: {
        Event.FIRST_TOKEN: State.DECODE,
        Event.COMPLETE: State.CLOSING,
        Event.FAILED: State.ENDED,
        Event.UNCOMMITTED: State.ENDED,
        Event.REVOKED: State.ENDED,
    },
    State.DECODE: {
        Event.COMPLETE: State.CLOSING,
        Event.FAILED: State.ENDED,
        Event.UNCOMMITTED: State.ENDED,
        Event.REVOKED: State.ENDED,
    },
    State.CLOSING: {
        Event.REPORTED: State.ENDED,
        Event.UNCOMMITTED: State.ENDED,
        Event.REVOKED: State.ENDED,
    },
    State.ENDED: {},
}

TAKES: Mapping[State, frozenset[type[Message]]] = {
    State.ENCODING: frozenset(),
    State.PREFILL: frozenset({Answer, Fault, Synced, PrefixLost}),
    State.DECODE: frozenset({Answer, Fault, Synced}),
    State.CLOSING: frozenset({StageReport}),
    State.ENDED: frozenset(),
}


class Lifecycle:
    """One run's state, changed only by the transitions of the table."""

    def __init__(self) -> None:
        self.state = State.ENCODING

    @property
    def is_decoding(self) -> bool:
        """Whether the target has returned its first token and the text is not complete."""
        return self.state is State.DECODE

    def fire(self, event: Event) -> None:
        """Apply ``event``; StateError if the table has no transition for it."""
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise StateError(f"a run in state {self.state.value} cannot have {event.value}")
        self.state = after

    def can(self, event: Event) -> bool:
        """Whether the table has a transition for ``event``."""
        return event in TRANSITIONS[self.state]

    def takes(self, message: Message) -> bool:
        """Whether ``message`` has an effect in this state."""
        return type(message) in TAKES[self.state]
