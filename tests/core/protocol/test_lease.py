"""The lease by its holder's own clock, and the watch over hung passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.lease import (
    HUNG_SECONDS,
    HUNG_TIMES,
    WRITING_SHARE,
    HangWatch,
    LeaseMachine,
    LeaseState,
    LeaseTerms,
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


def looks(watch: HangWatch, number: int | None, until: float, longest: float) -> bool:
    """Whether a look at any of many moments finds that it hangs."""
    moments = range(int(until))
    return any(watch.look(number, longest, float(at)) for at in moments)


@given(st.floats(0.01, 20.0))
def test_a_pass_hangs_after_thirty_seconds_and_ten_times_the_longest(longest: float) -> None:
    most = max(HUNG_SECONDS, HUNG_TIMES * longest)
    assert not looks(HangWatch(), 1, most, longest)
    assert looks(HangWatch(), 1, most + 3, longest)


def test_before_any_pass_has_ended_the_first_may_take_long() -> None:
    assert not looks(HangWatch(), 0, HUNG_SECONDS * HUNG_TIMES, 0.0)
    assert looks(HangWatch(), 0, HUNG_SECONDS * HUNG_TIMES + 3, 0.0)


def test_neither_further_passes_nor_an_idle_worker_nor_a_pause_hang() -> None:
    watch = HangWatch()
    assert not any(watch.look(at, 0.1, float(at)) for at in range(100))
    assert not any(watch.look(None, 0.1, 100.0 + at) for at in range(100))
    assert not any(watch.look(7, 0.1, 1000.0 * at) for at in range(15))
