"""What is in flight, what came back, and how many segments hide the way."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from flowspec.core.job.in_flight import TRIPS, InFlightWindow
from flowspec.core.job.round_trip import RoundTrip
from flowspec.core.protocol.messages import Answer
from flowspec.errors import StateError


def answer(segment: int, *ids: int) -> Answer:
    return Answer("j", 1, segment, ids, tuple(100 + node for node in ids))


def test_answers_are_kept_for_what_was_sent_and_lives() -> None:
    flights = InFlightWindow(1)
    flights.launch(0, [1, 2, 3], 0.0)
    assert flights.land(answer(0, 1, 2, 3, 9), 1.0)
    assert flights.answers == {1: 101, 2: 102, 3: 103}
    flights.keep({2, 3}, emptied=False)
    assert flights.answers == {2: 102, 3: 103}
    assert flights.sent == {2, 3}
    assert not flights.land(answer(7, 2), 1.0), "the prompt's, or one that was void"


def test_a_trip_is_of_what_was_sent_and_knows_whether_it_met_another() -> None:
    flights = InFlightWindow(1)
    flights.launch(0, [1, 2, 3], 1.0)
    flights.launch(1, [4], 2.0)
    flights.keep({1, 4}, emptied=False)
    first = flights.land(answer(0, 1), 5.0)
    second = flights.land(answer(1, 4), 7.0)
    assert first is not None and second is not None
    assert (first.trip(5.0), second.trip(7.0)) == (
        RoundTrip(3, 4.0, True),
        RoundTrip(1, 5.0, False),
    )


def test_a_flight_a_prune_has_emptied_frees_its_slot_unless_it_counts() -> None:
    flights = InFlightWindow(1)
    flights.launch(0, [1, 2], 0.0)
    flights.launch(1, [3], 0.0)
    flights.keep({1, 2}, emptied=True)
    assert (len(flights), flights.loaded) == (2, [0])
    flights.keep({1, 2}, emptied=False)
    assert (len(flights), flights.loaded) == (1, [0])
    flights.clear()
    assert len(flights) == 0


def test_a_live_row_that_does_not_come_back_is_an_error() -> None:
    flights = InFlightWindow(1)
    flights.launch(0, [1, 2], 0.0)
    with pytest.raises(StateError, match="came back without rows that are still live"):
        flights.land(answer(0, 1), 1.0)


class Pipe:
    """A pipeline on paper: a segment is computed for ``passes`` in turn, of which the slowest sets
    the pace, and is ``link`` seconds on the way besides. ``toll``: seconds something else than a
    pass holds each up.
    """

    def __init__(self, link: float, passes: list[float], toll: float = 0.0) -> None:
        self.flights = InFlightWindow(1)
        self.now = 0.0
        self._way = link + sum(passes)
        self._slowest = max(passes)
        self._period = max(self._slowest, toll)
        self._landings: deque[tuple[int, float]] = deque()
        self._last = 0.0
        self._count = 0

    def fill(self, capacity: int) -> None:
        while len(self.flights) < capacity:
            at = max(self.now + self._way, self._last + self._period)
            self.flights.launch(self._count, [], self.now)
            self._landings.append((self._count, at))
            self._last = at
            self._count = self._count + 1

    def land(self, late: float = 0.0) -> None:
        segment, at = self._landings.popleft()
        self.now = max(self.now, at) + late
        self.flights.land(replace(answer(segment), seconds=self._slowest), self.now)

    def run(self, least: int, answers: int) -> list[int]:
        """As many in flight as ``covering`` says, and ``least``; the number after each answer."""
        depths = []
        for _ in range(answers):
            self.fill(max(least, self.flights.covering))
            self.land()
            depths.append(self.flights.covering)
        return depths

    def miss(self) -> None:
        self.flights.clear()
        self._landings.clear()
        self._last = 0.0


@pytest.mark.parametrize(
    ("link", "stages", "wanted"), [(0.0, 4, 5), (10.0, 1, 12), (2.0, 3, 6), (60.0, 4, 65)]
)
@pytest.mark.parametrize("least", [1, 4])
def test_covering_grows_to_what_hides_the_way(
    link: float, stages: int, wanted: int, least: int
) -> None:
    """Passes of a second: the way in seconds and one more, however few were in flight at first, and
    no more however long none is missed.
    """
    pipe = Pipe(link, [1.0] * stages)
    assert pipe.flights.covering == 0
    depths = pipe.run(least, 400)
    assert depths[-1] == max(depths) == wanted


def test_covering_grows_at_most_fourfold_at_a_time() -> None:
    """The pipeline would hold 65; an answer finds as many in flight as could be sent since the one
    before.
    """
    pipe = Pipe(60.0, [1.0] * 4)
    pipe.fill(4)
    for covering in (16, 64, 65):
        pipe.land()
        assert pipe.flights.covering == covering
        pipe.fill(covering)


@pytest.mark.parametrize("in_flight", [5, 8])
@pytest.mark.parametrize("after", [0.0, 1e-9, 0.01])
def test_a_late_answer_and_those_at_once_behind_it_leave_covering_as_it_is(
    in_flight: int, after: float
) -> None:
    """Four passes of a second: five in flight hide the way, whenever answers happen to arrive."""
    pipe = Pipe(0.0, [1.0] * 4)
    for at in range(40):
        pipe.fill(in_flight)
        pipe.land(late=2.0 if at % 5 == 4 else after if at else 0.0)
        assert pipe.flights.covering <= 5
    assert pipe.flights.covering == 5


@pytest.mark.parametrize(("link", "misses", "wanted"), [(2.0, 1, 7), (40.0, TRIPS, 45)])
def test_covering_follows_a_way_that_changed_as_guesses_miss(
    link: float, misses: int, wanted: int
) -> None:
    """A shorter way is believed at once, a longer one only when it is no accident."""
    before = Pipe(20.0, [1.0] * 4)
    assert before.run(4, 200)[-1] == 25
    pipe = Pipe(link, [1.0] * 4)
    pipe.flights = before.flights
    pipe.now = before.now
    pipe._count = before._count
    for _ in range(misses):
        assert pipe.flights.covering == 25
        pipe.miss()
        pipe.run(4, 1)
    assert pipe.run(4, 8)[-1] == wanted


def test_covering_stays_near_what_a_link_lets_through() -> None:
    """Passes of a millisecond, but a segment a second: the stages' own pace says nothing, so there
    is no more than twice what hides the way of ten seconds.
    """
    assert max(Pipe(10.0, [0.001] * 4, toll=1.0).run(4, 400)) in range(10, 23)


def test_covering_is_not_known_where_nothing_takes_time() -> None:
    flights = InFlightWindow(1)
    for segment in range(4):
        flights.launch(segment, [], 0.0)
        flights.land(answer(segment), 0.0)
        assert flights.covering == 0
