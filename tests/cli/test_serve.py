"""``flowspec serve``: what is wrong is said before anything is started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Command


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held.getsockname()[1]


def test_a_port_in_use_is_one_line(command: Command, busy_port: int) -> None:
    status, out, err = command("serve", "--port", str(busy_port))
    assert (status, out) == (1, "")
    assert err == (
        f"flowspec: port {busy_port} of 127.0.0.1 is in use; choose another with --port, or stop "
        "what uses it\n"
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--port", "70000"), "--port is 70000; expected 0 to 65535"),
        (("--jobs", "0"), "--jobs is 0; expected 1 or more"),
        (("--keep-rows", "-1"), "--keep-rows is -1; expected 0 or more"),
        (("--most-rows", "-1"), "--most-rows is -1; expected 0 or more"),
        (
            ("--most-rows", "1536"),
            "--most-rows is 1536; expected 0 (no limit), or more than the 1536",
        ),
        (("--kv", "packed"), "--kv is 'packed'; expected contiguous or paged"),
        (("--most-answers", "0"), "--most-answers is 0; expected 1 or more"),
        (("--default-tokens", "0"), "--default-tokens is 0; expected 1 or more"),
        (("--strategy", "fastest"), "unknown strategy 'fastest'"),
        (("--cors-origin", "example.org"), "--cors-origin is 'example.org'; expected an address"),
        (("--api-key-file", "/no/such/file"), "--api-key-file /no/such/file cannot be read"),
    ],
)
def test_a_wrong_flag_is_one_line(command: Command, flags: tuple[str, ...], says: str) -> None:
    port = () if "--port" in flags else ("--port", "0")
    status, out, err = command("serve", *port, *flags)
    assert status != 0
    assert out == ""
    (line,) = err.splitlines()
    assert says in line


def test_a_file_without_keys_is_one_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n# none yet\n")
    status, _, err = command("serve", "--port", "0", "--api-key-file", str(tmp_path / "keys"))
    assert status == 1
    assert "has no keys; write one a line" in err
