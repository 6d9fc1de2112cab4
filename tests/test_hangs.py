"""Which processes are killed because nothing in them runs any more, and which are not."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

import pytest

from flowspec import cluster as module
from flowspec.cluster import _HUNG_LOOKS, _REPLACED_LOOKS, Cluster, Setup
from flowspec.errors import BrokerError
from flowspec.model.weights.directory import default_pair
from flowspec.transport.base import Claim

ROLE = "verify-1"
PID = 77


@dataclass
class Process:
    """A process that only counts how often it was killed."""

    pid: int = PID
    kills: int = 0

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        self.kills += 1


@dataclass
class Broker:
    """What the broker of a pipeline answers. ``holder``: host and process that have the role."""

    holder: tuple[str, int] | None = (socket.gethostname(), PID)
    error: BrokerError | None = None
    record: dict[str, str] = field(default_factory=lambda: {"stages": "1"})

    def __call__(self, url: str, keys: object) -> Broker:
        return self

    def check_writes(self) -> None:
        if self.error is not None:
            raise self.error

    def pipeline(self) -> dict[str, str]:
        return self.record

    def claims(self) -> dict[str, Claim]:
        found = {"scheduler": Claim("t", {}, 1)}
        if self.holder is not None:
            host, pid = self.holder
            found[ROLE] = Claim("t", {"host": host, "pid": pid}, 1)
        return found

    def close(self) -> None:
        return None


@dataclass
class Watched:
    """A supervisor of one process, and its broker."""

    broker: Broker
    process: Process
    cluster: Cluster

    def look(self, times: int) -> None:
        for _ in range(times):
            self.cluster._look_for_hangs()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    broker, process = Broker(), Process()
    monkeypatch.setattr(module, "RedisControl", broker)
    cluster = Cluster(Setup(*default_pair(), 1), url="redis://nobody")
    processes: dict[str, Any] = {ROLE: process}
    cluster._processes = processes
    return Watched(broker, process, cluster)


def test_a_process_that_has_its_role_or_has_not_had_it_yet_stays(watched: Watched) -> None:
    watched.look(100)
    watched.process.pid += 1  # started again, and loading
    watched.broker.holder = None
    watched.look(100)
    assert watched.process.kills == 0


def test_a_process_without_the_role_that_it_had_is_killed_once(watched: Watched) -> None:
    watched.look(1)
    watched.broker.holder = None
    watched.look(_HUNG_LOOKS - 1)
    assert watched.process.kills == 0
    watched.look(100)
    assert watched.process.kills == 1


def test_one_whose_role_another_has_is_given_time_to_end(watched: Watched) -> None:
    watched.look(1)
    watched.broker.holder = ("another", PID)
    watched.look(_REPLACED_LOOKS - 1)
    assert watched.process.kills == 0
    watched.look(1)
    assert watched.process.kills == 1


@pytest.mark.parametrize("away", ["broker", "record"])
def test_nobody_is_killed_while_no_role_can_be_taken(watched: Watched, away: str) -> None:
    """Nor at once when one can be again: workers need a moment to take theirs."""
    watched.look(1)
    watched.broker.holder = None
    record = watched.broker.record
    if away == "broker":
        watched.broker.error = BrokerError("it takes no writes")
    else:
        watched.broker.record = {}
    watched.look(100)
    watched.broker.error, watched.broker.record = None, record
    watched.look(_HUNG_LOOKS - 1)
    watched.broker.holder = (socket.gethostname(), PID)
    watched.look(1)
    assert watched.process.kills == 0
