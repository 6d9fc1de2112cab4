"""Processes are started again with back-off, and not without end."""

from __future__ import annotations

from flowspec.restarts import BACK_OFF, MOST, WITHIN_SECONDS, Restarts


def test_the_first_restart_is_at_once_and_later_ones_wait_longer() -> None:
    restarts = Restarts()
    assert not restarts.waits
    for delay in BACK_OFF:
        assert restarts.stopped(10.0)
        assert restarts.waits
        assert restarts.is_due(10.0 + delay)
        assert delay == 0 or not restarts.is_due(10.0 + delay - 0.1)
        restarts.started()
        assert not restarts.is_due(1e9)


def test_a_process_that_stops_too_often_is_given_up() -> None:
    restarts = Restarts()
    assert [restarts.stopped(float(at)) for at in range(MOST + 1)] == [True] * MOST + [False]


def test_stops_of_long_ago_do_not_count() -> None:
    restarts = Restarts()
    assert all(restarts.stopped(at * WITHIN_SECONDS / (MOST - 1)) for at in range(50))
