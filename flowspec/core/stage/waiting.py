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

    def take(self, *, prompts: bool = True) -> list[Segment]:
        """Remove and return the segments of the next pass.

        The first one, whatever its size, and of the other runs' firsts those before one that does
        not fit. Chunks of prompts wait for the others unless ``prompts``.
        """
        firsts = self.firsts()
        decoding = [segment for segment in firsts if not is_of_prompt(segment)]
        taken: list[Segment] = []
        for segment in firsts if prompts or not decoding else decoding:
            if taken and not _fit([*taken, segment]):
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


def is_of_prompt(segment: Segment) -> bool:
    """Whether ``segment`` is a chunk of its run's prompt: it comes before the first round."""
    return segment.round == 0


def _fit(segments: Sequence[Segment]) -> bool:
    """Whether ``segments`` may share a pass: ``MOST_ROWS`` rows, and what each allows.

    Beside a chunk of a prompt the pass is a large one anyway, so that more rows cost little.
    """
    most = MOST_ROWS
    if not any(map(is_of_prompt, segments)):
        most = min(segment.together or MOST_ROWS for segment in segments)
    return sum(len(segment.ids) for segment in segments) <= most
