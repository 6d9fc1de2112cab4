"""The program of the long service sees other texts, and none where only workers are killed."""

from __future__ import annotations

import pytest

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.model.weights.directory import default_pair
from ops.bench.endurance import Service, rounds

pytestmark = [pytest.mark.heavy, pytest.mark.live]


def test_kills_and_a_restart_change_no_text() -> None:
    with Cluster(Setup(*default_pair(), 2, jobs=2)) as cluster, Client(cluster.url) as client:
        service = Service(cluster, client)
        *_, last = rounds(service, 0.2, 2)
        assert [cell.strip() for cell in last.split("|")][4] == "0"
        begun = service.begin(2)
        assert service.restart("verify-2") > 0
        assert service.end(begun) == 0
        (case, job), *others = service.begin(2)
        other = next(known for known in service.wanted if known != case[:2])
        assert service.end([((*other, case[2]), job), *others]) == 1
