"""The lease by its holder's own clock, and the watch over loops that hang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.lease import (
    FIRST_SECONDS,
    HUNG_SECONDS,
    HUNG_TIMES,
    WRITING_SHARE,
    Doing,
    HangWatch,
    LeaseMachine,
    LeaseState,
    LeaseTerms,
    most_of_pass,
)

TERMS = LeaseTerms(1_000, 5_000, 3_000)
SECONDS = st.floats(0.0, 20.0)


def held(at: float = 0.0) -> LeaseMachine:
    lease = LeaseMachine(TERMS)
    lease.ask(at)
    lease.granted(4)
    return lease


def test_nobody_writes_before_the_lease_is_granted() -> None:
    lease = LeaseMachine(TERMS)
    assert not lease.may_write(0.0)
    lease.ask(0.0)
    assert not lease.may_write(0.0)
    lease.granted(4)
    assert lease.may_write(0.0)
    assert (lease.state, lease.generation) == (LeaseState.HELD, 4)


@given(asked=SECONDS, lasts=SECONDS, after=SECONDS)
def test_a_holder_stops_writing_before_the_broker_may_free_the_role(
    asked: float, lasts: float, after: float
) -> None:
    """The broker counts from when it gets the request, ``lasts`` after it is sent."""
    lease = LeaseMachine(TERMS)
    lifetime = lease.ask(asked) / 1000
    lease.granted(1)
    now = asked + after
    if now >= asked + lasts + lifetime:
        assert not lease.may_write(now)
    assert lease.may_write(now) == (now < asked + lifetime * WRITING_SHARE)


def test_a_request_that_is_not_answered_makes_it_no_younger() -> None:
    lease = held()
    lease.ask(0.7)
    assert not lease.may_write(0.9)
    lease.granted(4)
    assert lease.may_write(0.9)


def test_a_late_renewal_under_the_same_generation_is_a_renewal() -> None:
    lease = held()
    lease.ask(60.0)
    lease.granted(4)
    assert lease.may_write(60.1)


@pytest.mark.parametrize("refused", [True, False])
def test_a_role_that_another_has_had_is_lost_for_good(*, refused: bool) -> None:
    lease = held()
    lease.ask(0.5)
    if refused:
        lease.refused()
    else:
        lease.granted(6)
    assert lease.state is LeaseState.LOST
    lease.ask(1.0)
    lease.granted(4)
    assert not lease.may_write(1.0)


def test_lifetimes() -> None:
    lease = LeaseMachine(TERMS)
    assert lease.ask(0.0) == TERMS.shortest_ms
    assert lease.ask(0.0, loading=True) == TERMS.loading_ms
    assert lease.ask(0.0, load=2.5) == 2_500
    assert lease.ask(0.0, load=99.0) == TERMS.longest_ms
    assert lease.ask(0.0, loading=True, load=99.0) == TERMS.longest_ms
    lease.granted(1)
    assert lease.ask(0.5) == 2_000, "it comes late, and may do so again"


def looks(watch: HangWatch, doing: Doing, until: float) -> bool:
    """Whether a look at any of many moments finds that it hangs."""
    return any(watch.look(doing, float(at)) for at in range(int(until)))


@given(st.floats(0.01, 100.0))
def test_a_loop_hangs_that_is_at_one_thing_for_longer_than_it_may_take(most: float) -> None:
    assert not looks(HangWatch(), Doing(1, most), most)
    assert looks(HangWatch(), Doing(1, most), most + 3)


@given(st.floats(0.01, 20.0), st.integers(0, 5000), st.floats(0.001, 2.0))
def test_a_pass_may_take_ten_times_the_longest_or_at_first_ten_lone_rows_for_each(
    longest: float, rows: int, row: float
) -> None:
    assert most_of_pass(longest, rows, row) == max(HUNG_SECONDS, HUNG_TIMES * longest)
    first = min(FIRST_SECONDS, max(HUNG_SECONDS, 10 * row * rows))
    assert most_of_pass(0.0, rows, row) == pytest.approx(first)
    assert most_of_pass(0.0, rows) == min(FIRST_SECONDS, max(HUNG_SECONDS, rows))


def test_a_first_pass_of_a_small_model_may_take_no_longer_than_anything_else() -> None:
    assert most_of_pass(0.0, 128, 0.03) == HUNG_SECONDS


def test_neither_further_steps_nor_a_loop_before_its_first_nor_a_pause_hang() -> None:
    watch = HangWatch(2.0)
    assert not any(watch.look(Doing(at + 1, 5.0), float(at)) for at in range(100))
    assert not any(watch.look(Doing(0, 5.0), 100.0 + at) for at in range(100))
    assert not any(watch.look(Doing(7, 20.0), 1000.0 * at) for at in range(9))
