"""A pipeline of real workers on the hosts of a network: the draft's host, and one per stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.transport.connections.server import Listen, PrivateBroker
from flowspec.transport.link.inbox import free_port
from ops.hosts.network import Network


@contextlib.contextmanager
def pipeline(
    setup: Setup, network: Network, programs: Mapping[str, Sequence[str]] | None = None
) -> Iterator[Client]:
    """A pipeline with its broker, scheduler and draft worker on host 1, stage N on host N + 1.

    A stage reaches the broker, and other stages reach its inbox, at the hosts' addresses alone.
    ``programs`` as in ``Cluster``.
    """
    here = network.address(1)
    before = {role: network.inside(host) for host, role in enumerate(stage_roles(setup), 2)}
    with (
        PrivateBroker(listen=Listen(here, free_port(here))) as broker,
        Cluster(setup, url=broker.url, programs=programs, before=before) as cluster,
        Client(cluster.url) as client,
    ):
        yield client


def stage_roles(setup: Setup) -> list[str]:
    """The roles of the stages' workers, in their order."""
    return [f"verify-{stage}" for stage in range(1, setup.stages + 1)]
