"""What is in flight, what came back, and how many segments hide the way."""

from __future__ import annotations

import pytest

from flowspec.core.flights import Flights
from flowspec.core.messages import Result
from flowspec.errors import StateError


def answer(segment: int, *ids: int) -> Result:
    return Result("j", 1, segment, ids, tuple(100 + node for node in ids))


def test_answers_are_kept_for_what_was_sent_and_lives() -> None:
    flights = Flights(1)
    flights.launch(0, [1, 2, 3], 0.0)
    assert flights.land(answer(0, 1, 2, 3, 9), 1.0)
    assert flights.answers == {1: 101, 2: 102, 3: 103}
    flights.keep({2, 3}, emptied=False)
    assert flights.answers == {2: 102, 3: 103}
    assert flights.sent == {2, 3}
    assert not flights.land(answer(7, 2), 1.0), "the prompt's, or one that was void"


def test_a_flight_a_prune_has_emptied_frees_its_slot_unless_it_counts() -> None:
    flights = Flights(1)
    flights.launch(0, [1, 2], 0.0)
    flights.launch(1, [3], 0.0)
    flights.keep({1, 2}, emptied=True)
    assert (len(flights), flights.loaded) == (2, [0])
    flights.keep({1, 2}, emptied=False)
    assert (len(flights), flights.loaded) == (1, [0])
    flights.clear()
    assert len(flights) == 0


def test_a_live_row_that_does_not_come_back_is_an_error() -> None:
    flights = Flights(1)
    flights.launch(0, [1, 2], 0.0)
    with pytest.raises(StateError, match="came back without rows that are still live"):
        flights.land(answer(0, 1), 1.0)


@pytest.mark.parametrize(("link", "stages", "wanted"), [(0.0, 4, 5), (10.0, 1, 12), (2.0, 3, 6)])
def test_covering_is_the_shortest_trip_over_the_shortest_gap(link: float, stages: int, wanted: int) -> None:
    """Segments leave one a second, each takes ``stages`` passes of a second, and ``link`` on the way."""
    flights = Flights(1)
    assert flights.covering == 0
    trip = stages + link
    landed = 0
    for tick in range(40):
        while landed < tick and landed + trip <= tick:
            flights.land(answer(landed), float(landed + trip))
            landed += 1
        flights.launch(tick, [], float(tick))
    assert flights.covering == wanted
