"""`flowspec acl` writes what a broker and its users need, each file for its owner alone."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from pathlib import Path

import pytest

from flowspec.cli.acl import write_acl
from flowspec.errors import ConfigError
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import PrivateBroker, find_server
from flowspec.transport.link.inbox import free_port


def test_every_role_gets_a_url_that_the_brokers_file_knows(tmp_path: Path) -> None:
    table, *files = write_acl(tmp_path / "acl", 2, 1, "redis://broker:7000/0")
    names = ["scheduler", "draft", "verify-1", "verify-2", "middle-1", "client", "admin"]
    assert [file.name for file in files] == [f"p0-{name}.env" for name in names]
    assert {file.stat().st_mode & 0o777 for file in (table, *files)} == {0o600}
    lines = table.read_text().splitlines()
    assert lines[0] == "user default off resetpass ~* &* +@all"
    with PrivateBroker(users=[line.removeprefix("user ") for line in lines[1:]]) as broker:
        place = broker.url.rpartition("@")[2]
        for file in files:
            name, _, url = file.read_text().strip().partition("=")
            assert name == "FLOWSPEC_REDIS_URL"
            assert url.endswith("@broker:7000/0")
            login = url.removeprefix("redis://").partition("@")[0]
            assert login.partition(":")[2] not in table.read_text()
            with connect(f"unix://{login}@{place}") as client:
                assert client.ping()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://user:word@broker", "names a user"),
        ("unix:///tmp/s", "must name a host"),
        ("http://broker", "not understood"),
    ],
)
def test_a_url_that_fits_no_user_is_refused(tmp_path: Path, url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        write_acl(tmp_path / "acl", 2, 0, url)


def test_passwords_in_use_are_not_replaced(tmp_path: Path) -> None:
    write_acl(tmp_path / "acl", 2, 0, "redis://broker")
    with pytest.raises(ConfigError, match="is there already"):
        write_acl(tmp_path / "acl", 2, 0, "redis://broker")


def test_a_broker_with_these_users_answers_other_machines(tmp_path: Path) -> None:
    """In protected mode a server refuses who comes from elsewhere, as 127.0.0.2 does."""
    table, *_ = write_acl(tmp_path / "acl", 1, 0, "redis://broker:6379/0")
    port = free_port("127.0.0.1")
    command = (str(find_server()), "--port", str(port), "--aclfile", str(table), "--save", "")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            for address in ("127.0.0.1", "127.0.0.2"):
                assert b"WRONGPASS" in _said(port, address)
        finally:
            server.kill()


def _said(port: int, address: str) -> bytes:
    for _ in range(1000):
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(
                ("127.0.0.1", port), 10.0, source_address=(address, 0)
            ) as connection,
        ):
            connection.sendall(b"AUTH p0-client wrong\r\n")
            return connection.recv(1000)
        time.sleep(0.01)
    raise TimeoutError("the server did not start")
