"""Which of the waiting segments make up a stage's next pass.

Segments that came in one entry left one pass, or the draft worker, together: they are a *group*. A
pass takes whole groups in the order of their arrival, so that runs which share a pass at the first
stage share it up to the last. It has one segment of each run: what a run's passes hold then does
not depend on other runs, and a recording of it replays alone.
"""

from __future__ import annotations

from flowspec.core.protocol.bundles import MOST_ROWS
from flowspec.core.protocol.messages import Segment
from flowspec.core.run.key import RunKey


class WaitingSegments:
    """The segments that wait at a stage, in groups."""

    def __init__(self) -> None:
        self._groups: list[list[Segment]] = []
        self._bundle = 0  # that the last group came in

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, segment: Segment, bundle: int = 0) -> None:
        """Append ``segment``; ``bundle``: as in ``Envelope``.

        A part that was held up, and comes behind other entries, is a group of its own.
        """
        joins = bool(bundle) and bundle == self._bundle and bool(self._groups)
        if joins and all(other.run != segment.run for other in self._groups[-1]):
            self._groups[-1].append(segment)
        else:
            self._groups.append([segment])
        self._bundle = bundle

    def take(self) -> list[Segment]:
        """Remove and return the segments of the next pass.

        The first group, whatever its size, and those behind it that fit, up to ``MOST_ROWS`` rows.
        A group stays if a segment of one of its runs is taken or stays before it.
        """
        taken: list[Segment] = []
        left: list[list[Segment]] = []
        seen: set[RunKey] = set()
        rows = 0
        is_full = False
        for group in self._groups:
            runs = {segment.run for segment in group}
            size = sum(len(segment.ids) for segment in group)
            is_free = not is_full and seen.isdisjoint(runs)
            if is_free and taken and rows + size > MOST_ROWS:
                is_full = True  # what comes later does not overtake it
            if is_free and not is_full:
                taken += group
                rows += size
            else:
                left.append(group)
            seen |= runs
        self._groups = left
        return taken

    def drop(self, run: RunKey) -> None:
        """Remove the segments of ``run``."""
        kept = ([one for one in group if one.run != run] for group in self._groups)
        self._groups = [group for group in kept if group]

    def rows(self, run: RunKey) -> int:
        """Rows of ``run`` that wait."""
        return sum(
            len(segment.ids) for group in self._groups for segment in group if segment.run == run
        )
