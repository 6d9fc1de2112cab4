"""What every worker process does before its loop starts."""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest

import flowspec.start.boot as boot
from flowspec.core.protocol.addresses import stage_address
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import BrokerFull, ClaimError, ClusterError
from flowspec.roles.lease import LOADING, Lease
from flowspec.transport.base import Claim, Control
from flowspec.transport.connections import redis_client
from flowspec.transport.connections.connection import connect, retrying
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.wire.codec import VERSION
from tests.commands import run
from tests.transport.memory import MemoryBroker, MemoryLink
from tests.waiting import SECONDS, until


class Looks:
    """A worker's control that counts the looks at the leases."""

    def __init__(self, control: RedisControl) -> None:
        self.count = 0
        self.pipeline = control.pipeline
        self._claims = control.claims

    def claims(self) -> dict[str, Claim]:
        self.count += 1
        return self._claims()


def process_at(url: str) -> boot.Process:
    """A process of a worker, which leaves the signals to the tests."""
    with patch("signal.signal"):
        return boot.Process(url)


def test_a_worker_without_a_pipeline_waits_a_bounded_time_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with PrivateBroker() as broker:
        monkeypatch.setattr(boot, "RECORD_SECONDS", 0.3)
        monkeypatch.setattr(boot, "_PATIENT_SECONDS", 0.1)
        process = process_at(broker.url)
        control = process.control()
        with pytest.raises(
            ClusterError, match=r"pipeline p0 has no record after 0.3 s; start its scheduler"
        ):
            process.pipeline_record(control)
        control.close()
    said = "note: waits for the pipeline's record, which `python -m workers.scheduler` writes\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("role", ["verify", "draft", "scheduler"])
def test_a_place_that_a_worker_cannot_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    def main() -> None:
        (tmp_path / "config.json").read_text(encoding="utf-8")

    (tmp_path / "config.json").mkdir()
    with pytest.raises(SystemExit, match="1"):
        boot.run(main, role)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flowspec {role}: {tmp_path / 'config.json'} cannot be used: Is a dir")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_too_little_memory_is_one_line(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    with pytest.raises(SystemExit, match="1"):
        boot.run(Mock(side_effect=error), "verify")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flowspec verify: there is too little memory, or a limit on it")
    assert (str(error)[:40] in line) and line.endswith("or a machine with more")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a prompt about being out of memory"),
        ImportError(
            "libtorch.so: failed to map segment from shared object: Operation not permitted"
        ),
    ],
)
def test_a_fault_that_is_none_of_memory_is_shown_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)):
        boot.run(Mock(side_effect=error), "verify")


@pytest.fixture
def broker() -> Iterator[PrivateBroker]:
    with PrivateBroker() as running:
        yield running


def test_a_record_that_stands_there_counts_once_its_scheduler_has_come(
    broker: PrivateBroker,
) -> None:
    """It may be of an earlier pipeline, and the next one's scheduler may start with the worker."""
    earlier, later = {"stages": "2"}, {"stages": "3"}
    scheduler, worker = (process_at(broker.url) for _ in range(2))
    with closing(scheduler.control()) as control, closing(worker.control()) as asking:
        control.set_pipeline(earlier)
        looks = Looks(asking)
        with ThreadPoolExecutor(1) as beside:
            found = beside.submit(worker.pipeline_record, cast(Control, looks))
            until(lambda: looks.count > 1)
            with scheduler.leased("scheduler", dict) as lease:
                assert scheduler.state == LOADING
                seen = looks.count
                until(lambda: looks.count > seen + 1)
                assert not found.done()
                control.set_pipeline(later, lease.holder.generation)
                assert found.result(SECONDS) == later
        scheduler.state = "ready"
        with scheduler.leased("scheduler", dict):
            assert worker.pipeline_record(asking) == later


def test_the_status_of_a_pipeline_whose_scheduler_loads(broker: PrivateBroker) -> None:
    with process_at(broker.url).leased("scheduler", dict):
        status = run("flowspec", "status", "--redis-url", broker.url)
    assert (status.returncode, status.stdout) == (1, "")
    assert status.stderr.startswith("flowspec: the scheduler reads its models, which takes a while")


def test_a_record_whose_scheduler_stays_away_counts_after_a_while(
    broker: PrivateBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot, "_OLDER_SECONDS", 0.1)
    worker = process_at(broker.url)
    with closing(worker.control()) as control:
        control.set_pipeline({"stages": "2"})
        assert worker.pipeline_record(control) == {"stages": "2"}


@pytest.mark.live
def test_a_lease_is_renewed_over_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal must not wait for the worker's own calls."""
    claims: list[tuple[RedisControl, str]] = []
    claim = RedisControl.claim

    def watched(control: RedisControl, role: str, *rest: Any) -> int:
        claims.append((control, role))
        return claim(control, role, *rest)

    monkeypatch.setattr(RedisControl, "claim", watched)
    with PrivateBroker() as broker:
        process = process_at(broker.url)
        process.state = "ready"
        own = process.control()
        with process.leased("draft", dict) as held, process.leased("scheduler", dict):
            until(lambda: len(claims) >= 6)
            assert not process.stop(held)()
            assert set(own.claims()) == {"draft", "scheduler"}
        by_role = {role: {control for control, at in claims if at == role} for _, role in claims}
        assert len({own}.union(*by_role.values())) == 3
        assert own.claims() == {}
        own.close()


@pytest.mark.parametrize("stays_full", [False, True])
def test_a_worker_outlives_a_full_broker_and_ends_if_it_stays_full(
    stays_full: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(boot, "JOIN_SECONDS", 1.0 if stays_full else 60.0)
    impatient = functools.partial(retrying, seconds=0.1)
    monkeypatch.setattr(redis_client, "retrying", impatient)
    served: list[str] = []
    with PrivateBroker() as broker:
        client = connect(broker.url)
        process = process_at(broker.url)
        process.state = "ready"

        @contextmanager
        def begin() -> Iterator[Callable[[Lease], None]]:
            yield serve

        def serve(lease: Lease) -> None:
            process.stop(lease)
            served.append(lease.token)
            if len(served) == 1:
                client.config_set("maxmemory", 1)
                if not stays_full:
                    threading.Timer(0.5, client.config_set, ["maxmemory", 0]).start()
                raise BrokerFull("the broker is out of memory")

        def work() -> None:
            process.serve("draft", boot.Facts(), begin, writes_record=True)

        if stays_full:
            with pytest.raises(BrokerFull, match="raise maxmemory"):
                work()
        else:
            work()
        assert len(served) == 1 + (not stays_full)
        client.close()
    assert "the broker is out of memory; joins again" in capsys.readouterr().err


def test_a_collection_while_a_worker_serves_passes_over_what_it_loaded() -> None:
    loaded = [object()]
    try:
        boot.make_worker(
            {}, StageMachine(1, 1), MemoryLink(MemoryBroker(), stage_address(1)), Mock(), Mock()
        )
        assert all(loaded is not held for held in gc.get_objects())
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
    assert any(loaded is held for held in gc.get_objects())


def test_a_worker_waits_for_the_lease_of_one_that_has_crashed_here(
    broker: PrivateBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(process_at(broker.url).control()) as control:
        dead = subprocess.Popen(["true"])
        dead.wait()
        host = socket.gethostname()
        assert control.claim("scheduler", f"{host}:{dead.pid}:crashed", {}, 700)
        with process_at(broker.url).leased("scheduler", dict):
            assert "waits for its lease" in capsys.readouterr().err
        for holder in (f"{host}:{os.getppid()}:runs", f"elsewhere:{dead.pid}:runs", "anything"):
            assert control.claim("scheduler", holder, {})
            with (
                pytest.raises(ClaimError, match="stop that worker first"),
                process_at(broker.url).leased("scheduler", dict),
            ):
                pass
            control.release("scheduler", holder)


def test_a_worker_of_a_pipeline_with_other_messages_says_so(broker: PrivateBroker) -> None:
    with closing(process_at(broker.url).control()) as control:
        control.set_pipeline({"stages": "2", boot.WIRE: str(VERSION + 1)})
        assert control.claim("scheduler", "a token", {})
        with pytest.raises(ClusterError, match=rf"of version {VERSION + 1}, .* {VERSION}; install"):
            process_at(broker.url).pipeline_record(control)
        control.set_pipeline({"stages": "2"})  # as schedulers wrote them that named none
        with (
            patch.object(boot, "VERSION", VERSION + 1),
            pytest.raises(ClusterError, match=r"of version 9, .*; install"),
        ):
            process_at(broker.url).pipeline_record(control)


@pytest.mark.parametrize("crashed", [False, True])
def test_a_record_of_a_scheduler_that_is_gone_is_not_the_next_ones(
    broker: PrivateBroker, monkeypatch: pytest.MonkeyPatch, crashed: bool
) -> None:
    """It is another pipeline's, of other messages or with a lease that still runs."""
    monkeypatch.setattr(boot, "_OLDER_SECONDS", SECONDS if crashed else 0.0)
    worker, scheduler = process_at(broker.url), process_at(broker.url)
    later = {"stages": "3", boot.WIRE: str(VERSION)}
    with closing(scheduler.control()) as control, closing(worker.control()) as asking:
        control.set_pipeline({"stages": "2", boot.WIRE: str(VERSION + (not crashed))})
        if crashed:
            dead = subprocess.Popen(["true"])
            dead.wait()
            facts = {"state": "ready"}
            token = f"{socket.gethostname()}:{dead.pid}:crashed"
            assert control.claim("scheduler", token, facts, 60_000)
        looks = Looks(asking)
        with ThreadPoolExecutor(1) as beside:
            found = beside.submit(worker.pipeline_record, cast(Control, looks))
            until(lambda: looks.count > 2)
            assert not found.done()
            if crashed:
                control.release("scheduler", token)
            with scheduler.leased("scheduler", dict) as lease:
                control.set_pipeline(later, lease.holder.generation)
                assert found.result(SECONDS) == later


def test_an_older_record_stands_a_while_after_its_schedulers_lease_has_run_out(
    broker: PrivateBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next scheduler waits for that lease, too, and writes a record of its own."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    lease = Claim(f"{socket.gethostname()}:{dead.pid}:crashed", {"state": "ready"}, 1)
    record = {"stages": "2", boot.WIRE: str(VERSION)}
    looks: list[int] = []  # a second apart

    def claims() -> dict[str, Claim]:
        looks.append(len(looks))
        return {"scheduler": lease} if len(looks) <= 40 else {}

    monkeypatch.setattr(
        boot, "time", Mock(monotonic=lambda: float(len(looks)), sleep=lambda seconds: None)
    )
    control = Mock(claims=claims, pipeline=lambda: record)
    assert process_at(broker.url).pipeline_record(control) == record
    assert len(looks) > 40 + boot._OLDER_SECONDS


@pytest.mark.parametrize("role", ["scheduler", "draft", "middle", "verify", "gateway"])
def test_a_worker_that_is_still_imported_ends_quietly_at_ctrl_c(role: str, tmp_path: Path) -> None:
    imported = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "structlog.py").write_text(imported, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", f"workers.{role}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
