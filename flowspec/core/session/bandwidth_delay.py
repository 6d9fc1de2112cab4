"""The number of segments that must be in flight so that the pipeline is never idle, as measured."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from flowspec.core.session.round_trip import RoundTrip

#: Most recent passes, gaps and depths that count.
SAMPLES = 32
#: Most recent round trips that count: a slower route is noticed after as many misses.
TRIP_SAMPLES = 8
#: Bound of the estimate relative to the segments in flight, against outliers.
MOST_GROWTH = 4
#: Bound of the estimate relative to the number that the rate of answers calls for.
RATE_SLACK = 2


class BandwidthDelay:
    """The bandwidth-delay product of a run's pipeline: ``segments``, 0 until it is known."""

    def __init__(self) -> None:
        self.segments = 0
        # Round trips of segments sent with nothing in flight, and shorter ones.
        self._trips: deque[float] = deque(maxlen=TRIP_SAMPLES)
        self._passes: deque[float] = deque(maxlen=SAMPLES)  # the slowest of each segment
        self._gaps: deque[float] = deque(maxlen=SAMPLES)  # between answers, others in flight
        # Segments in flight when an answer arrived, its own included.
        self._depths: deque[int] = deque(maxlen=SAMPLES)
        self._answered_at: float | None = None  # the last answer, if others were in flight

    def note(self, trip: RoundTrip, slowest: float, others: int, now: float) -> None:
        """Learn from a segment's round trip.

        ``slowest``: seconds of its slowest pass. ``others``: segments still in flight.
        """
        if trip.alone or trip.seconds < min(self._trips, default=math.inf):
            self._trips.append(trip.seconds)
        if slowest > 0:
            self._passes.append(slowest)
        if self._answered_at is not None:
            self._gaps.append(now - self._answered_at)
        self._answered_at = now if others else None
        self._depths.append(others + 1)
        self.segments = self._estimate()

    def emptied(self) -> None:
        """Nothing is in flight any more: the time to the next answer is no gap."""
        self._answered_at = None

    def _estimate(self) -> int:
        """The shortest round trip over the median of the slowest passes, plus the one in progress.

        A round trip behind other segments of the run includes queueing, so it counts only if it is
        shorter. The stages time the passes, which gives the pipeline's rate even while it is not
        full. Gaps between answers give the rate only once it is full, and a late answer shortens
        the next gap; so only their median counts, and only as a bound, for pipelines whose rate is
        set by links or other jobs.
        """
        if not self._passes:
            return 0
        most = MOST_GROWTH * max(self._depths)
        trip = min(self._trips)
        gap = median(self._gaps) if self._gaps else 0.0
        # Bounded before it is rounded: a pass or a gap close to 0 s makes it infinite.
        enough = math.ceil(min(trip / median(self._passes), most)) + 1
        paced = math.ceil(min(RATE_SLACK * trip / gap, most)) + 1 if gap else enough
        return min(enough, paced, most)
