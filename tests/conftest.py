from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import redis

from flowspec import observe
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import PrivateBroker

# Several processes run tests, each with one torch thread; torch reads this when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
observe.configure()
# A slow example, or a slow draw of it, on a busy machine is not a failure.
_PATIENT = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
#: Explores: what it finds becomes an explicit example.
hypothesis.settings.register_profile("thorough", _PATIENT)
#: The same examples in every run.
hypothesis.settings.register_profile(
    "gate", _PATIENT, max_examples=30, derandomize=True, database=None
)
hypothesis.settings.load_profile("gate")

#: How often a live test is repeated before its failure counts.
RERUNS = 2
#: The files that take longest: begun in their turn, they leave one process alone at the end.
LONGEST = ("tests/e2e/test_equality.py", "tests/proof/test_prove.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first. Live tests may be unlucky; no other test is repeated."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    for item in items:
        if item.get_closest_marker("live"):
            item.add_marker(pytest.mark.flaky(reruns=RERUNS))


def pytest_collection_finish() -> None:
    """What was imported stays: a collection of garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests have noted; name every test that was repeated, with its first failure."""
    noted = [
        f"{report.nodeid}: {note}"
        for report in terminalreporter.stats.get("passed", [])
        for name, note in report.user_properties
        if name == "equality"
    ]
    if noted:
        terminalreporter.section("equality with plain decoding")
        terminalreporter.write("\n".join([*noted, ""]))
    repeated: dict[str, pytest.TestReport] = {}
    for report in terminalreporter.stats.get("rerun", []):
        repeated.setdefault(report.nodeid, report)
    if repeated:
        terminalreporter.section(f"{len(repeated)} live tests were repeated")
    for nodeid, report in repeated.items():
        terminalreporter.write_sep("-", nodeid)
        terminalreporter.write_line(report.longreprtext)


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
