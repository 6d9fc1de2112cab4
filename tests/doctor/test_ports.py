"""Reaching a broker: each way to fail is told from the others."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from flowspec.doctor.finding import Severity
from flowspec.doctor.ports import (
    Opened,
    Started,
    check_open_files,
    check_opened,
    check_started,
    connect_to,
    open_files,
)
from flowspec.errors import ClusterError
from flowspec.transport.connections.server import PrivateBroker


@pytest.mark.parametrize(
    ("failure", "found", "remedy"),
    [
        ("name", "names no known host", "correct the URL"),
        ("refused", "nothing listens there", "start the server"),
        ("silent", "does not answer within 3 s", "firewalls"),
        ("missing", "does not exist", "start the server"),
        ("forbidden", "may not be used by this user", "unixsocketperm"),
        ("Network is unreachable", "Network is unreachable", "check the network"),
    ],
)
def test_each_failure_has_its_remedy(failure: str, found: str, remedy: str) -> None:
    finding = check_opened(Opened("h, port 1", failure, 3.0))
    assert finding.level is Severity.ERROR
    assert found in finding.found
    assert "h, port 1" in finding.found
    assert remedy in finding.remedy


def test_an_open_socket(server: PrivateBroker) -> None:
    opened = connect_to(server.url)
    assert opened.failure == ""
    assert check_opened(opened).level is Severity.OK
    assert "password" not in opened.address and ":" not in opened.address


def test_a_port_is_refused_once_its_listener_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert connect_to(f"redis://:secret@127.0.0.1:{port}/0").failure == ""
    opened = connect_to(f"redis://:secret@127.0.0.1:{port}/0")
    assert opened.failure == "refused"
    assert "secret" not in opened.address


def test_a_listener_that_does_not_take_connections_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(str(path))
        full.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(path))
            assert connect_to(f"unix://{path}", seconds=0.2).failure != ""


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    assert connect_to("redis://no-such-host.invalid:6379/0").failure == "name"
    assert connect_to(f"unix://:secret@{tmp_path}/none").failure == "missing"


def test_a_private_broker_that_starts_or_not() -> None:
    assert check_started(Started(Path("/bin/v"), None, 0.1)).level is Severity.OK
    found = check_started(
        Started(None, ClusterError("no server found; install one with `pip`, or so"), 0.0)
    )
    assert found.level is Severity.ERROR
    assert found.found == "no private broker can be started: no server found"
    assert found.remedy == "install one with `pip`, or so"
    found = check_started(Started(None, ClusterError("it stopped with status 1"), 0.0))
    assert "FLOWSPEC_REDIS_URL" in found.remedy


def test_few_open_files() -> None:
    (found,) = check_open_files(64)
    assert found.level is Severity.WARNING
    assert "ulimit -n" in found.remedy
    assert not list(check_open_files(1024))
    assert open_files() > 0
