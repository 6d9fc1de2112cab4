"""The private broker: reachable by its owner only, and ended with its parent."""

from __future__ import annotations

import os
import signal
import stat
import statistics
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from flowspec.errors import BrokerError
from flowspec.transport.connections import server as module
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import PrivateBroker, find_server
from tests.waiting import seconds_of, until


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"


def test_it_is_private_and_leaves_nothing() -> None:
    broker = PrivateBroker()
    url = broker.start()
    directory = broker.directory
    pid = broker.pid
    assert directory is not None
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "conf").stat().st_mode) == 0o600
    assert len(urlsplit(url).password or "") >= 24
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(unix_socket_path=urlsplit(url).path).ping()
    client = connect(url)
    assert client.config_get("port") == {"port": "0"}
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    client.close()
    broker.stop()
    assert not directory.exists()
    until(lambda: not alive(pid))
    broker.stop()


@pytest.mark.live
def test_a_wait_for_nothing_ends_within_a_tick() -> None:
    def waits(ticks: int) -> list[float]:
        took = []
        with PrivateBroker(ticks=ticks) as broker:
            client = connect(broker.url)
            for _ in range(11):
                took.append(seconds_of(lambda: client.xread({"nothing": "0"}, block=30)))
            client.close()
        return took

    # With 10 ticks per second each wait of 30 ms takes 100 ms, from one tick to the next.
    assert 0.025 < min(waits(500)) < statistics.median(waits(10)) / 2


@pytest.mark.live
def test_it_dies_with_its_parent_however_that_ends() -> None:
    code = (
        "import sys, time; from flowspec.transport.connections.server import PrivateBroker; "
        "b = PrivateBroker(); "
        "b.start(); "
        "print(b.pid, b.directory, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, directory = parent.stdout.readline().split()
    assert alive(int(pid))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until(lambda: not alive(int(pid)))
    assert Path(directory).exists()
    with PrivateBroker():
        assert not Path(directory).exists(), (
            "leftovers of a killed parent are removed at the next start"
        )


def test_a_server_that_fails_to_start_shows_its_logs_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CONFIG", module._CONFIG + "no-such-option yes\n")
    with pytest.raises(BrokerError, match="stopped with status") as raised:
        PrivateBroker().start()
    assert "\n" not in str(raised.value)


def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.3)
    fake = tmp_path / "server"
    fake.write_text("#!/bin/sh\nexec sleep 30\n")
    fake.chmod(0o700)
    broker = PrivateBroker(binary=fake)
    with pytest.raises(BrokerError, match="does not answer"):
        broker.start()
    assert broker.directory is None


def version_script(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
    file.chmod(0o700)
    return file


def test_the_order_of_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recent server on the PATH, the packaged one, an older one; else name what to install."""
    old = version_script(tmp_path / "old", "redis-server", "7.0.15")
    new = version_script(tmp_path / "new", "redis-server", "7.4.1")
    packaged = tmp_path / "packaged"
    monkeypatch.setattr(module, "_packaged", lambda: packaged)
    monkeypatch.setenv("PATH", f"{new.parent}:/bin:/usr/bin")
    assert find_server() == new
    monkeypatch.setenv("PATH", f"{old.parent}:/bin:/usr/bin")
    assert find_server() == packaged
    monkeypatch.setattr(module, "_packaged", lambda: None)
    assert find_server() == old
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerError, match=r"-m pip install 'flowspec\[broker\]'"):
        find_server()
