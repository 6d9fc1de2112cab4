"""The server's socket: an address that cannot be used is one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowspec.errors import ConfigError
from flowspec.gateway.server import address_of, check_installed, is_local, listen
from flowspec.gateway.settings import Settings

ROOT = Path(__file__).parent.parent.parent


def test_a_port_in_use_is_said_in_one_line() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert address_of(first) == f"http://127.0.0.1:{port}"
        assert is_local(first)
        with pytest.raises(ConfigError) as refused:
            listen("127.0.0.1", port)
    said = str(refused.value)
    assert said.startswith(f"port {port} of 127.0.0.1 is in use; choose another with --port")


def test_a_host_without_address_is_said_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"--host is no\.such\.host\.invalid, which has no address"
    ):
        listen("no.such.host.invalid", 0)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_said(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port is {port}; expected 0 to 65535"):
        listen("127.0.0.1", port)


def test_an_address_of_another_machine_is_said() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 0: Cannot assign"):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize("field", ["most_open", "default_tokens", "most_connections"])
def test_bounds_of_nothing_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="is 0; expected 1 or more"):
        Settings("redis://", **{field: 0})


def test_all_addresses_are_not_local() -> None:
    with listen("0.0.0.0", 0) as listening:
        assert not is_local(listening)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed()
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"needs the package uvicorn; .*flowspec\[gateway\]"):
        check_installed()


@pytest.mark.parametrize("origin", ["chat.example.org", "", "ftp://a"])
def test_an_origin_that_is_no_address_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin is"):
        Settings("redis://", origins=(origin,))


HEAVY = ("torch", "transformers")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("flowspec.gateway.app", (*HEAVY, "flowspec.model", "flowspec.roles")),
        ("flowspec.cli.serve", HEAVY),
        ("workers.gateway", HEAVY),
    ],
)
def test_nothing_of_the_gateway_imports_torch(module: str, absent: tuple[str, ...]) -> None:
    script = f"import sys, {module}\nprint(*(name for name in {absent} if name in sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert loaded.stdout.split() == []
