"""Which of the waiting segments make up a stage's next pass.

A pass takes the first waiting segment of every run, in the order of their arrival. What came in one
entry is there at one moment, so runs that share a pass at the first stage share the later ones,
too, unless one of them has an earlier segment waiting. Keeping the others back with it would fill
the pipeline with passes of few runs: a slower stage behind could not join them either. One segment
of each run: what a run's passes hold then does not depend on other runs, and a recording of it
replays alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol.bundles import MOST_ROWS
from flowspec.core.protocol.messages import Segment
from flowspec.core.run.key import RunKey


class WaitingSegments:
    """The segments that wait at a stage, in the order of their arrival."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def __bool__(self) -> bool:
        return bool(self._segments)

    def add(self, segment: Segment) -> None:
        """Append ``segment``."""
        self._segments.append(segment)

    def firsts(self) -> list[Segment]:
        """The first segment of every run that waits."""
        found: dict[RunKey, Segment] = {}
        for segment in self._segments:
            found.setdefault(segment.run, segment)
        return list(found.values())

    def take(self) -> list[Segment]:
        """Remove and return the segments of the next pass.

        The first one, whatever its size, and of the other runs' firsts those before one that does
        not fit: up to ``MOST_ROWS`` rows, and what each segment allows (``Segment.together``).
        """
        taken: list[Segment] = []
        rows = 0
        most = MOST_ROWS
        for segment in self.firsts():
            rows += len(segment.ids)
            most = min(most, segment.together or MOST_ROWS)
            if taken and rows > most:
                break  # what comes later does not overtake it
            taken.append(segment)
        self.remove(taken)
        return taken

    def remove(self, segments: Sequence[Segment]) -> None:
        """Remove ``segments``."""
        gone = {(segment.run, segment.segment) for segment in segments}
        self._segments = [one for one in self._segments if (one.run, one.segment) not in gone]

    def drop(self, run: RunKey) -> None:
        """Remove the segments of ``run``."""
        self._segments = [one for one in self._segments if one.run != run]

    def rows(self, run: RunKey) -> int:
        """Rows of ``run`` that wait."""
        return sum(len(one.ids) for one in self._segments if one.run == run)
