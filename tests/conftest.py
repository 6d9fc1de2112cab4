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
    "thorough", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("thorough"), max_examples=50
)


def pytest_configure(config: pytest.Config) -> None:
    """Fewer examples of every property without the heavy tests."""
    profile = "quick" if config.option.markexpr == "not heavy" else "thorough"
    hypothesis.settings.load_profile(profile)


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
