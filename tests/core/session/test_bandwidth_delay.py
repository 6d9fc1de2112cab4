"""The bandwidth-delay product against modelled pipelines."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.session.bandwidth_delay import (
    MOST_GROWTH,
    SAMPLES,
    TRIP_SAMPLES,
    BandwidthDelay,
)
from flowspec.core.session.round_trip import RoundTrip


@dataclass(frozen=True)
class InFlight:
    """A segment in flight; ``alone``: it was sent into an empty pipeline."""

    sent_at: float
    answered_at: float
    alone: bool


class Pipe:
    """A modelled pipeline; times are in seconds.

    A segment takes all of ``passes`` and ``link``. The slowest pass sets the period, or ``toll``:
    the time per segment of a bottleneck that is not a pass.
    """

    def __init__(self, link: float, passes: list[float], toll: float = 0.0) -> None:
        self.product = BandwidthDelay()
        self.now = 0.0
        self._trip = link + sum(passes)
        self._slowest = max(passes)
        self._period = max(self._slowest, toll)
        self._in_flight: deque[InFlight] = deque()
        self._last = 0.0

    def fill(self, slots: int) -> None:
        while len(self._in_flight) < slots:
            at = max(self.now + self._trip, self._last + self._period)
            self._in_flight.append(InFlight(self.now, at, not self._in_flight))
            self._last = at

    def land(self, late: float = 0.0) -> None:
        segment = self._in_flight.popleft()
        self.now = max(self.now, segment.answered_at) + late
        trip = RoundTrip(0, self.now - segment.sent_at, segment.alone)
        self.product.note(trip, self._slowest, len(self._in_flight), self.now)

    def run(self, least: int, answers: int) -> list[int]:
        """Keep the estimate in flight, at least ``least``; the estimate after each answer."""
        estimates = []
        for _ in range(answers):
            self.fill(max(least, self.product.segments))
            self.land()
            estimates.append(self.product.segments)
        return estimates

    def miss(self) -> None:
        self.product.emptied()
        self._in_flight.clear()
        self._last = 0.0


@pytest.mark.parametrize(
    ("link", "stages", "wanted"), [(0.0, 4, 5), (10.0, 1, 12), (2.0, 3, 6), (60.0, 4, 65)]
)
@pytest.mark.parametrize("least", [1, 4])
def test_the_estimate_grows_to_what_hides_the_round_trip(
    link: float, stages: int, wanted: int, least: int
) -> None:
    """With passes of 1 s: the round trip in seconds plus one.

    It does not depend on the number in flight at first, and stays there while no guess misses.
    """
    pipe = Pipe(link, [1.0] * stages)
    assert pipe.product.segments == 0
    estimates = pipe.run(least, 400)
    assert estimates[-1] == max(estimates) == wanted


def test_the_estimate_grows_at_most_fourfold_at_a_time() -> None:
    """The pipeline could hold 65; each answer finds as many in flight as the estimate allowed."""
    pipe = Pipe(60.0, [1.0] * 4)
    pipe.fill(4)
    for segments in (16, 64, 65):
        pipe.land()
        assert pipe.product.segments == segments
        pipe.fill(segments)


@pytest.mark.parametrize("in_flight", [5, 8])
@pytest.mark.parametrize("after", [0.0, 1e-9, 0.01])
def test_a_late_answer_and_those_at_once_behind_it_leave_the_estimate_as_it_is(
    in_flight: int, after: float
) -> None:
    """Four passes of 1 s: five in flight hide the round trip, whenever answers arrive."""
    pipe = Pipe(0.0, [1.0] * 4)
    for at in range(40):
        pipe.fill(in_flight)
        pipe.land(late=2.0 if at % 5 == 4 else after if at else 0.0)
        assert pipe.product.segments <= 5
    assert pipe.product.segments == 5


@pytest.mark.parametrize(("link", "misses", "wanted"), [(2.0, 1, 7), (40.0, TRIP_SAMPLES, 45)])
def test_the_estimate_follows_a_round_trip_that_changed_as_guesses_miss(
    link: float, misses: int, wanted: int
) -> None:
    """A shorter round trip counts at once, a longer one after repeated samples."""
    before = Pipe(20.0, [1.0] * 4)
    assert before.run(4, 200)[-1] == 25
    pipe = Pipe(link, [1.0] * 4)
    pipe.product = before.product
    pipe.now = before.now
    for _ in range(misses):
        assert pipe.product.segments == 25
        pipe.miss()
        pipe.run(4, 1)
    assert pipe.run(4, 8)[-1] == wanted


def test_the_estimate_stays_near_what_a_link_lets_through() -> None:
    """Passes of 1 ms, but one segment per second through the link.

    The stages' own pace is no measure here; the bound is twice what hides the round trip of 10 s.
    """
    assert max(Pipe(10.0, [0.001] * 4, toll=1.0).run(4, 400)) in range(10, 23)


def test_the_estimate_is_not_known_where_nothing_takes_time() -> None:
    product = BandwidthDelay()
    for _ in range(4):
        product.note(RoundTrip(0, 0.0, True), 0.0, 0, 0.0)
        assert product.segments == 0


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 100.0),
            st.booleans(),
            st.just(0.0) | st.floats(1e-6, 10.0),
            st.integers(0, 40),
            st.floats(0.0, 10.0),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_the_estimate_is_bounded_by_what_was_in_flight(
    answers: list[tuple[float, bool, float, int, float, bool]],
) -> None:
    """No sample raises it beyond the bound; it is known once a pass was timed."""
    product = BandwidthDelay()
    depths: list[int] = []
    timed = False
    now = 0.0
    for trip, alone, slowest, others, gap, emptied in answers:
        now += gap
        product.note(RoundTrip(1, trip, alone), slowest, others, now)
        if emptied:
            product.emptied()
        depths.append(others + 1)
        timed = timed or slowest > 0
        assert product.segments <= MOST_GROWTH * max(depths[-SAMPLES:])
        assert (product.segments >= 1) == timed


def test_a_gap_behind_an_emptied_pipeline_says_nothing() -> None:
    """The next answer comes an hour after the last one."""
    busy = BandwidthDelay()
    rested = BandwidthDelay()
    for product in (busy, rested):
        product.note(RoundTrip(1, 4.0, True), 1.0, 3, 4.0)
    rested.emptied()
    for product in (busy, rested):
        product.note(RoundTrip(1, 4.0, True), 1.0, 3, 3600.0)
    assert (busy.segments, rested.segments) == (2, 5), "the gap bounds the first alone"


@pytest.mark.parametrize("seconds", [1e-300, 5e-324])
def test_a_pass_of_next_to_no_time_is_no_error(seconds: float) -> None:
    """A stage's timing arrives over the wire, which allows any finite number."""
    product = BandwidthDelay()
    product.note(RoundTrip(1, 1.0, True), seconds, 0, 1.0)
    product.note(RoundTrip(1, 1e9, True), seconds, 0, 1.0)
    assert 1 <= product.segments <= MOST_GROWTH
