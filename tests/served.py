"""A toy pipeline over a real broker, for tests of clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.holders import Holder
from flowspec.rehearse.emulated_link import EmulatedLink
from flowspec.roles.lease import Lease
from flowspec.transport.wire.keys import Keys
from tests.clients import RedisControlAndClient
from tests.toy_cluster import ToyCluster

STAGES = 2


@contextmanager
def toy_pipeline(url: str, *, jobs: int = 8, **options: Any) -> Iterator[ToyCluster]:
    """A pipeline of two stages on the toy model at ``url``."""

    def link(address: Address, holder: Holder) -> EmulatedLink:
        return EmulatedLink(url, Keys(), address, STAGES, holder=holder)

    cluster = ToyCluster(
        lambda: RedisControlAndClient(url, Keys()), link, STAGES, jobs=jobs, **options
    )
    lease = Lease(RedisControlAndClient(url, Keys()), "scheduler", lambda: {"state": "ready"})
    lease.take()
    cluster.leases["scheduler"] = lease
    try:
        yield cluster
    finally:
        cluster.stop()
