from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import redis

from flowspec import observe
from flowspec.broker.connection import connect
from flowspec.broker.server import PrivateBroker

observe.configure()
# A slow example, or a slow draw of it, on a busy machine is not a failure.
hypothesis.settings.register_profile(
    "flowspec", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("flowspec")


@pytest.fixture(scope="session")
def server() -> Iterator[PrivateBroker]:
    """One private broker for the whole run."""
    with PrivateBroker() as broker:
        yield broker


@pytest.fixture
def client(server: PrivateBroker) -> Iterator[redis.Redis]:
    """A plain client of an empty broker."""
    client = connect(server.url)
    client.flushall()
    yield client
    client.close()
