"""Segments on their way through the stages, the answers that came back, and how long the way is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from flowspec.core.job.round_trip import RoundTrip
from flowspec.core.protocol.messages import Answer
from flowspec.errors import StateError

#: Samples of each measure remembered.
SAMPLES = 32
#: Trips remembered: a way that became longer is believed once so many guesses have missed.
TRIPS = 8
#: ``covering`` is at most so many times what was in flight, so that no one measure can send it far.
GROWTH = 4
#: ``covering`` is at most so many times what the answers' own pace calls for.
SLACK = 2

Top = Sequence[tuple[int, float]]


@dataclass(slots=True)
class InFlightSegment:
    """A segment of ``rows`` on its way; ``live`` are those no prune has reached, ``alone``: it met
    no other.
    """

    live: set[int]
    sent_at: float
    alone: bool
    rows: int

    def trip(self, now: float) -> RoundTrip:
        """Its way, if it has come back ``now``."""
        return RoundTrip(self.rows, now - self.sent_at, self.alone)


class InFlightWindow:
    """What was sent of the tree and lives: in flight, or answered and not judged."""

    def __init__(self, root: int) -> None:
        self.sent: set[int] = {root}
        self.answers: dict[int, int] = {}  # node -> the target's token after it
        self.tops: dict[int, Top] = {}
        self._flights: dict[int, InFlightSegment] = {}
        self._trips: deque[float] = deque(maxlen=TRIPS)  # of segments that waited for no other
        self._passes: deque[float] = deque(maxlen=SAMPLES)  # the slowest of each segment
        self._gaps: deque[float] = deque(maxlen=SAMPLES)  # between answers, others on their way
        self._depths: deque[int] = deque(
            maxlen=SAMPLES
        )  # in flight as an answer came, its own included
        #: Segments in flight that hide the way there and back, from what was measured; 0: not
        #: known.
        self.covering = 0
        self._landed_at: float | None = (
            None  # the last answer, if others were on their way behind it
        )

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def loaded(self) -> list[int]:
        """Segments with live rows."""
        return [number for number, flight in self._flights.items() if flight.live]

    def launch(self, number: int, ids: Sequence[int], now: float) -> None:
        """Segment ``number`` leaves."""
        self._flights[number] = InFlightSegment(set(ids), now, not self._flights, len(ids))
        self.sent.update(ids)

    def land(self, result: Answer, now: float) -> InFlightSegment | None:
        """Take an answer in; its segment, if that was counted as in flight."""
        flight = self._flights.pop(result.segment, None)
        if flight is not None:
            if not flight.live <= set(result.ids):
                raise StateError(
                    f"segment {result.segment} came back without rows that are still live"
                )
            self._time(flight, result.seconds, now)
        for at, (node, token) in enumerate(zip(result.ids, result.tokens, strict=True)):
            if node in self.sent:
                self.answers[node] = token
                if result.top:
                    self.tops[node] = result.top[at]
        return flight

    def _time(self, flight: InFlightSegment, slowest: float, now: float) -> None:
        trip = now - flight.sent_at
        if flight.alone or trip < min(self._trips, default=math.inf):
            self._trips.append(trip)
        if slowest > 0:
            self._passes.append(slowest)
        if self._landed_at is not None:
            self._gaps.append(now - self._landed_at)
        self._landed_at = now if self._flights else None
        self._depths.append(len(self._flights) + 1)
        self.covering = self._estimate()

    def _estimate(self) -> int:
        """The bandwidth-delay product in segments, plus the one being computed: the shortest trip
        over the median of the segments' slowest passes.

        Trips behind others of the job hold its own queue, so they count only where they are
        shorter yet. Passes are timed by the stages, so they are the pipeline's pace also while
        it is not full. Gaps between answers are that only once it is, and a late answer makes
        the next gap nothing; so their median counts, and as a limit alone, for a pipeline whose
        links or other jobs set its pace.
        """
        if not self._passes:
            return 0
        way = min(self._trips)
        gap = median(self._gaps) if self._gaps else 0.0
        enough = math.ceil(way / median(self._passes)) + 1
        paced = math.ceil(SLACK * way / gap) + 1 if gap else enough
        return min(enough, paced, GROWTH * max(self._depths))

    def keep(self, nodes: Collection[int], *, emptied: bool) -> None:
        """A prune has left ``nodes``; flights without live rows go, unless ``emptied`` ones still
        count.
        """
        self.sent &= set(nodes)
        self.answers = {node: token for node, token in self.answers.items() if node in nodes}
        self.tops = {node: top for node, top in self.tops.items() if node in nodes}
        for flight in self._flights.values():
            flight.live &= self.sent
        if not emptied:
            self._flights = {
                number: flight for number, flight in self._flights.items() if flight.live
            }

    def clear(self) -> None:
        """Nothing that was sent lives."""
        self._flights.clear()
        self.answers.clear()
        self.tops.clear()
        self.sent.clear()
        self._landed_at = None
