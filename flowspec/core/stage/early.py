"""Messages that have come before their run was opened, or of a run that never will be.

They are bounded in number, rows and age, whoever sends them. What is dropped is found missing as a
gap if the run's ``Open`` arrives after all.
"""

from __future__ import annotations

from flowspec.core.protocol.messages import Envelope, Prune, Segment
from flowspec.core.run.ended import EndedRuns
from flowspec.core.run.key import RunKey

#: Most messages kept, and most rows that they name.
EARLY_MESSAGES = 1024
EARLY_ROWS = 1 << 16
#: How long the messages of a run are kept, seconds: ways differ by less.
EARLY_SECONDS = 60.0


class EarlyMessages:
    """The early messages of one stage, by run; times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._kept: dict[RunKey, list[Envelope]] = {}
        self._since: dict[RunKey, float] = {}  # when a run's first message came, oldest first
        self._messages = 0
        self._rows = 0

    def __len__(self) -> int:
        return self._messages

    def keep(self, envelope: Envelope, now: float) -> None:
        """Keep ``envelope``; if too much is kept then, drop what the oldest runs have sent."""
        run = envelope.message.run
        self._kept.setdefault(run, []).append(envelope)
        self._since.setdefault(run, now)
        self._messages += 1
        self._rows += _rows(envelope)
        while self._messages > EARLY_MESSAGES or self._rows > EARLY_ROWS:
            self.take(next(iter(self._since)))

    def take(self, run: RunKey) -> list[Envelope]:
        """Remove and return the messages of ``run``, in the order of their arrival."""
        taken = self._kept.pop(run, [])
        self._since.pop(run, None)
        self._messages -= len(taken)
        self._rows -= sum(map(_rows, taken))
        return taken

    def drop_old(self, now: float) -> None:
        """Drop the messages of runs whose first one came ``EARLY_SECONDS`` ago."""
        while self._since and now - next(iter(self._since.values())) >= EARLY_SECONDS:
            self.take(next(iter(self._since)))

    def drop(self, ended: EndedRuns) -> None:
        """Drop the messages of the runs in ``ended``."""
        for run in [run for run in self._kept if run in ended]:
            self.take(run)


def _rows(envelope: Envelope) -> int:
    """Rows that a message names; a route's hops count as well, so that none is long for nothing."""
    match envelope.message:
        case Segment(ids=ids, route=route):
            return len(ids) + len(route)
        case Prune(accepted=accepted, retained=retained):
            return len(accepted) + len(retained)
        case _:
            return 1
