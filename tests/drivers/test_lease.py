"""A lease is taken once, renewed, given back; its loss is said."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from flowspec.drivers import lease as module
from flowspec.drivers.lease import Lease
from flowspec.errors import BrokerUnreachable, ClaimError
from tests.broker.conftest import Rig


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)
    assert condition()  # type: ignore[operator]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.05)


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

    def gone(role: str, token: str, info: Mapping[str, object] | None = None) -> bool:
        raise BrokerUnreachable("cannot reach the broker")

    monkeypatch.setattr(control, "claim", gone)
    monkeypatch.setattr(control, "release", gone)
    wait_for(lambda: lease.lost == "cannot reach the broker")
    lease.release()


def test_a_renewal_that_took_too_long_stops_the_worker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease may have run out while the broker was slow: by then somebody else may
    own the role.
    """
    monkeypatch.setattr(module, "FENCE_SECONDS", 0.1)
    control = rig.control()
    lease = Lease(control, "draft", dict)
    real = control.claim
    lease.take()

    def slow(role: str, token: str, info: Mapping[str, object]) -> bool:
        time.sleep(0.3)
        return real(role, token, info)

    monkeypatch.setattr(control, "claim", slow)
    wait_for(lambda: "could not be renewed in time" in lease.lost)
    lease.release()


def test_a_lease_whose_renewal_fails_unforeseen_is_lost_and_says_so(rig: Rig) -> None:
    facts: list[dict[str, object]] = [{}]
    lease = Lease(rig.control(), "draft", lambda: facts[0])
    lease.take()
    facts.clear()
    wait_for(lambda: lease.lost != "")
    assert "renewing the lease on draft failed" in lease.lost
    lease.release()
