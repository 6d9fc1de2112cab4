"""A lease is taken once, renewed and released; its loss is reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pytest

from flowspec.broker.base import LEASE_MS, MOST_LEASE_MS, Control
from flowspec.drivers import lease as module
from flowspec.drivers.lease import Lease
from flowspec.errors import BrokerFull, BrokerUnreachable, ClaimError
from tests.broker.conftest import Rig


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


class Watched:
    """A control's claims: records lifetimes, and interferes with calls."""

    def __init__(self, control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lifetimes: list[int] = []
        self.before: Callable[[], None] = lambda: None
        self._claim = control.claim
        monkeypatch.setattr(control, "claim", self.claim)

    def claim(
        self, role: str, token: str, info: Mapping[str, object], lifetime_ms: int = LEASE_MS
    ) -> bool:
        self.lifetimes.append(lifetime_ms)
        self.before()
        return self._claim(role, token, info, lifetime_ms)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(module, "load_per_core", lambda: 0.0)


def test_it_is_exclusive_renewed_with_fresh_facts_and_given_back(rig: Rig) -> None:
    control = rig.control()
    facts = {"state": "loading"}
    lease = Lease(control, "verify-1", lambda: dict(facts))
    lease.take()
    with pytest.raises(ClaimError, match=r"verify-1 is taken by .*stop that worker first"):
        Lease(control, "verify-1", dict).take()
    facts["state"] = "ready"
    wait_for(lambda: control.claims()["verify-1"][1]["state"] == "ready")
    assert lease.lost == ""
    lease.release()
    assert control.claims() == {}


def test_one_that_was_taken_over_is_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    control = rig.control()
    lease = Lease(control, "draft", dict)
    lease.take()
    monkeypatch.setattr(lease, "token", "another-process")
    wait_for(lambda: lease.lost == "draft was taken over by another worker")
    lease.release()


def test_a_broker_that_is_gone_ends_it_and_releasing_does_not_fail(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    lease = Lease(control, "draft", dict)
    lease.take()

    def gone(*_: object) -> bool:
        raise BrokerUnreachable("cannot reach the broker")

    monkeypatch.setattr(control, "claim", gone)
    monkeypatch.setattr(control, "release", gone)
    wait_for(lambda: lease.lost == "cannot reach the broker")
    lease.release()


def test_a_late_renewal_of_a_lease_that_nobody_else_holds_is_a_renewal(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease expired while the worker was starved, and no other worker took it."""
    monkeypatch.setattr(module, "LEASE_MS", 30)
    monkeypatch.setattr(module, "MOST_LEASE_MS", 30)
    control = rig.control()
    watched = Watched(control, monkeypatch)
    lease = Lease(control, "draft", dict)
    absent: list[bool] = []

    def starve() -> None:
        time.sleep(0.1)
        absent.append(control.claims() == {})

    lease.take()
    watched.before = starve
    wait_for(lambda: len(watched.lifetimes) >= 4)
    assert any(absent), "the lease ran out"
    assert lease.lost == ""
    lease.release()


def test_a_late_renewal_of_a_lease_that_was_taken_meanwhile_stops_the_worker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the broker was slow, another worker may have taken the role."""
    control = rig.control()
    other = rig.control()
    lease = Lease(control, "draft", dict)
    watched = Watched(control, monkeypatch)
    lease.take()

    def starve() -> None:
        control.release("draft", lease.token)
        assert other.claim("draft", "another-process", {})

    watched.before = starve
    wait_for(lambda: lease.lost == "draft was taken over by another worker")
    assert control.claims()["draft"][0] == "another-process"
    lease.release()
    assert control.claims()["draft"][0] == "another-process"


def test_a_worker_whose_renewals_come_late_asks_for_a_longer_lease(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    watched = Watched(control, monkeypatch)
    monkeypatch.setattr(module, "LEASE_MS", 300)
    lease = Lease(control, "draft", dict)
    lease.take()
    assert watched.lifetimes == [300]
    wait_for(lambda: len(watched.lifetimes) >= 3)
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.5)
    wait_for(lambda: watched.lifetimes[-1] >= module.MARGIN * 500)
    assert lease.lost == ""
    lease.release()


def test_a_worker_on_a_busy_machine_asks_for_a_longer_lease_up_to_a_limit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    watched = Watched(control, monkeypatch)
    for load, lifetime in ((0.5, LEASE_MS), (2.0, 2 * LEASE_MS), (1000.0, MOST_LEASE_MS)):
        monkeypatch.setattr(module, "load_per_core", lambda load=load: load)
        lease = Lease(control, "draft", dict)
        lease.take()
        lease.release()
        assert watched.lifetimes[-1] == lifetime, load


def test_a_full_broker_does_not_end_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker's contents can still be read and finished."""
    control = rig.control()
    watched = Watched(control, monkeypatch)
    lease = Lease(control, "draft", dict)
    lease.take()
    full = True

    def refuse() -> None:
        if full:
            raise BrokerFull("the broker is out of memory")

    watched.before = refuse
    renewed = len(watched.lifetimes)
    wait_for(lambda: len(watched.lifetimes) >= renewed + 3)
    assert lease.lost == ""
    full = False
    renewed = len(watched.lifetimes)
    wait_for(lambda: len(watched.lifetimes) >= renewed + 2)
    assert lease.lost == ""
    lease.release()


def test_a_lease_whose_renewal_fails_unforeseen_is_lost_and_says_so(rig: Rig) -> None:
    facts: list[dict[str, object]] = [{}]
    lease = Lease(rig.control(), "draft", lambda: facts[0])
    lease.take()
    facts.clear()
    wait_for(lambda: lease.lost != "")
    assert "renewing the lease on draft failed" in lease.lost
    lease.release()
