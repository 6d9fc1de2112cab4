"""A lease is taken once, renewed and released; its loss is reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from flowspec.core.protocol.lease import MARGIN, TERMS, Doing, LeaseTerms
from flowspec.errors import BrokerFull, BrokerUnreachable, ClaimError, LeaseLost
from flowspec.roles import lease as module
from flowspec.roles.lease import WAS_SPARE, Facts, Lease
from flowspec.transport.base import Control
from tests.transport.conftest import Rig
from tests.waiting import SECONDS, seconds_of, until


class Watched:
    """A control's claims: records lifetimes, and interferes with calls."""

    def __init__(self, control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lifetimes: list[int] = []
        self.before: Callable[[], None] = lambda: None
        self._claim = control.claim
        monkeypatch.setattr(control, "claim", self.claim)

    def claim(
        self,
        role: str,
        token: str,
        info: Mapping[str, object],
        lifetime_ms: int = TERMS.shortest_ms,
    ) -> int:
        self.lifetimes.append(lifetime_ms)
        self.before()
        return self._claim(role, token, info, lifetime_ms)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_per_core", lambda: 0.0)


QUICK = LeaseTerms(renew_seconds=0.05)


def lease_of(
    control: Control,
    role: str = "draft",
    facts: Facts = dict,
    terms: LeaseTerms = QUICK,
    **more: Any,
) -> Lease:
    return Lease(control, role, facts, terms=terms, **more)


def test_it_is_exclusive_renewed_with_fresh_facts_and_given_back(rig: Rig) -> None:
    control = rig.control()
    facts = {"state": "loading"}
    lease = lease_of(control, "verify-1", lambda: dict(facts))
    lease.take()
    with pytest.raises(ClaimError, match=r"verify-1 is taken by .*stop that worker first"):
        lease_of(control, "verify-1").take()
    facts["state"] = "ready"
    until(lambda: control.claims()["verify-1"].facts["state"] == "ready")
    assert lease.lost == ""
    lease.release()
    assert control.claims() == {}


def test_a_role_that_its_spare_has_taken_is_not_to_be_stopped(rig: Rig) -> None:
    lease = lease_of(rig.control(), "verify-1", lambda: {WAS_SPARE: True})
    lease.take()
    with pytest.raises(ClaimError, match=r"verify-1 is taken by .*, which was its spare; start th"):
        lease_of(rig.control(), "verify-1").take()
    lease.release()


def test_one_that_was_taken_over_is_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    control = rig.control()
    lease = lease_of(control)
    lease.take()
    monkeypatch.setattr(lease, "token", "another-process")
    until(lambda: lease.lost == "draft was taken over by another worker")
    lease.release()


def test_a_broker_that_is_gone_ends_it_and_releasing_does_not_fail(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    lease = lease_of(control)
    lease.take()

    def gone(*_: object, **__: object) -> bool:
        raise BrokerUnreachable("cannot reach the broker")

    monkeypatch.setattr(control, "claim", gone)
    monkeypatch.setattr(control, "release", gone)
    until(lambda: lease.lost == "cannot reach the broker")
    lease.release()


def test_a_late_renewal_of_a_lease_that_nobody_else_holds_is_a_renewal(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease expired while the worker was starved, and no other worker took it."""
    control = rig.control()
    watched = Watched(control, monkeypatch)
    lease = lease_of(control, terms=LeaseTerms(30, 30, 30, renew_seconds=0.05))
    absent: list[bool] = []

    def starve() -> None:
        time.sleep(0.1)
        absent.append(control.claims() == {})

    lease.take()
    watched.before = starve
    until(lambda: len(watched.lifetimes) >= 4)
    assert any(absent), "the lease ran out"
    assert lease.lost == ""
    lease.release()


def test_a_late_renewal_of_a_lease_that_was_taken_meanwhile_stops_the_worker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the broker was slow, another worker may have taken the role."""
    control = rig.control()
    other = rig.control()
    lease = lease_of(control)
    watched = Watched(control, monkeypatch)
    lease.take()

    def starve() -> None:
        control.release("draft", lease.token)
        assert other.claim("draft", "another-process", {})

    watched.before = starve
    until(lambda: lease.lost == "draft was taken over by another worker")
    assert control.claims()["draft"].token == "another-process"
    lease.release()
    assert control.claims()["draft"].token == "another-process"


def test_a_worker_whose_renewals_come_late_asks_for_a_longer_lease(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    watched = Watched(control, monkeypatch)
    lease = lease_of(control, terms=LeaseTerms(300, renew_seconds=0.5))
    lease.take()
    assert watched.lifetimes == [300]
    until(lambda: watched.lifetimes[-1] >= MARGIN * 500)
    assert lease.lost == ""
    lease.release()


def test_a_worker_on_a_busy_machine_asks_for_a_longer_lease_up_to_a_limit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    watched = Watched(control, monkeypatch)
    for load, lifetime in ((0.5, 5_000), (2.0, 10_000), (1000.0, 30_000)):
        monkeypatch.setattr(module, "load_per_core", lambda load=load: load)
        lease = lease_of(control)
        lease.take()
        lease.release()
        assert watched.lifetimes[-1] == lifetime, load


def test_a_full_broker_does_not_end_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker's contents can still be read and finished."""
    control = rig.control()
    watched = Watched(control, monkeypatch)
    lease = lease_of(control)
    lease.take()
    full = True

    def refuse() -> None:
        if full:
            raise BrokerFull("the broker is out of memory")

    watched.before = refuse
    renewed = len(watched.lifetimes)
    until(lambda: len(watched.lifetimes) >= renewed + 3)
    assert lease.lost == ""
    full = False
    renewed = len(watched.lifetimes)
    until(lambda: len(watched.lifetimes) >= renewed + 2)
    assert lease.lost == ""
    lease.release()


def test_a_lease_whose_renewal_fails_unforeseen_is_lost_and_says_so(rig: Rig) -> None:
    facts: list[dict[str, object]] = [{}]
    lease = lease_of(rig.control(), "draft", lambda: facts[0])
    lease.take()
    facts.clear()
    until(lambda: lease.lost != "")
    assert "renewing the lease on draft failed" in lease.lost
    lease.release()


def test_a_holder_knows_its_generation(rig: Rig) -> None:
    known = [0]
    for _ in range(2):
        control = rig.control()
        lease = lease_of(control, "verify-2")
        lease.take()
        known.append(control.claims()["verify-2"].generation)
        assert str(lease.holder) == f"verify-2:{known[-1]}"
        lease.release()
    assert known[0] < known[1] < known[2]


def test_a_write_waits_for_a_late_renewal_and_goes_on_with_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the worker's own clock: the renewal's answer does not come."""
    control = rig.control()
    watched = Watched(control, monkeypatch)
    lease = lease_of(control, terms=LeaseTerms(400, 400, 400, renew_seconds=0.05))
    lease.take()
    lease.check()
    hung, answered = threading.Event(), threading.Event()

    def hang() -> None:
        hung.set()
        answered.wait(SECONDS)

    watched.before = hang
    assert hung.wait(SECONDS)
    time.sleep(0.4)
    threading.Timer(0.3, answered.set).start()
    assert seconds_of(lease.check) > 0.2
    lease.release()


def test_a_worker_that_was_replaced_meanwhile_writes_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    other = rig.control()
    lease = lease_of(control)
    watched = Watched(control, monkeypatch)
    lease.take()

    def taken_over() -> None:
        control.release("draft", lease.token)
        other.claim("draft", "another-process", {})

    watched.before = taken_over
    until(lambda: lease.lost != "")
    with pytest.raises(LeaseLost, match="draft was taken over by another worker"):
        lease.check()
    lease.release()


def test_a_role_that_another_has_held_meanwhile_is_lost_although_it_is_free_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    other = rig.control()
    lease = lease_of(control)
    watched = Watched(control, monkeypatch)
    lease.take()

    def held_meanwhile() -> None:
        watched.before = lambda: None
        control.release("draft", lease.token)
        other.claim("draft", "another-process", {})
        other.release("draft", "another-process")

    watched.before = held_meanwhile
    until(lambda: lease.lost == "draft was taken over by another worker")
    lease.release()


def test_a_worker_that_loads_asks_for_a_long_lease(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    watched = Watched(control, monkeypatch)
    state = {"state": "loading"}
    lease = lease_of(control, facts=lambda: dict(state))
    lease.take()
    state["state"] = "ready"
    until(lambda: watched.lifetimes[-1] == TERMS.shortest_ms)
    assert watched.lifetimes[0] == TERMS.loading_ms
    lease.release()


def test_a_worker_whose_loop_hangs_gives_its_role_up(rig: Rig) -> None:
    control = rig.control()
    told: list[str] = []
    lease = lease_of(control, "verify-1", on_hung=told.append)
    lease.doing = lambda: Doing(7, 0.2)
    lease.take()
    until(lambda: bool(told))
    assert told == [lease.lost]
    assert lease.lost.startswith("the loop of verify-1 has hung for")
    assert control.claims() == {}
    lease.release()


def test_a_worker_whose_loading_hangs_gives_its_role_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that computes does not hang, however long it loads."""
    control = rig.control()
    monkeypatch.setattr(module, "_LOADING_SECONDS", 0.3)
    monkeypatch.setattr(module, "_STEP_SECONDS", 0.01)
    told: list[str] = []
    lease = lease_of(control, "verify-1", lambda: {"state": "loading"}, on_hung=told.append)
    lease.take()
    began = time.process_time()
    while time.process_time() < began + 0.6:
        assert not told
    until(lambda: bool(told))
    assert told == [lease.lost]
    assert lease.lost.startswith("the loading of verify-1 has hung for")
    assert control.claims() == {}
    lease.release()
