"""Forked workers: the same processes as new interpreters start, and killed with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowspec.errors import ClusterError
from flowspec.start import forks
from flowspec.start.fork_server import role_of
from flowspec.start.forks import ForkServer, StartedProcess, can_fork, spawn
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here"),
    pytest.mark.live,
]
SECONDS = 30.0
Start = Callable[..., StartedProcess]

TELLING = """
import os, sys
print(sys.argv[1:], __name__, os.environ.get("FLOWSPEC_TOLD"), os.getsid(0) == os.getpid())
print("to stderr", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
WAITING = """
import pathlib, os, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""
ENDING = """
import sys
sys.stdout.reconfigure(line_buffering=False, write_through=False)
print("not written yet")
if sys.argv[1:]:
    sys.exit(sys.argv[1])
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "telling_module.py").write_text(TELLING)
    (folder / "waiting_module.py").write_text(WAITING)
    (folder / "ending_module.py").write_text(ENDING)
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def server(environment: dict[str, str]) -> Iterator[ForkServer]:
    server = ForkServer(environment)
    yield server
    server.close()


@pytest.fixture(params=["forked", "spawned"])
def start(request: pytest.FixtureRequest) -> Start:
    if request.param == "spawned":
        return spawn
    found: ForkServer = request.getfixturevalue("server")
    return found.start


def written(path: Path) -> int:
    """The pid in ``path``, once a module has written it."""
    return int(until(lambda: path.exists() and path.read_text(encoding="utf-8")))


def runs(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not reaped yet does not."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            != "Z"
        )
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_has_its_arguments_environment_log_and_status(
    start: Start, environment: dict[str, str], tmp_path: Path, status: int
) -> None:
    log = tmp_path / "log"
    told = {**environment, "FLOWSPEC_TOLD": "this"}
    process = start("telling_module", [str(status), "--flag"], told, log)
    assert process.wait(SECONDS) == status == process.poll()
    assert log.read_text() == f"['{status}', '--flag'] __main__ this True\nto stderr\n"


@pytest.mark.parametrize(("said", "status"), [([], 0), (["why it ended"], 1)])
def test_all_that_was_printed_is_in_the_log(
    start: Start, environment: dict[str, str], tmp_path: Path, said: list[str], status: int
) -> None:
    log = tmp_path / "log"
    assert start("ending_module", said, environment, log).wait(SECONDS) == status
    assert sorted(log.read_text().splitlines()) == ["not written yet", *said]


def test_a_signal_ends_it_with_its_number(
    start: Start, environment: dict[str, str], tmp_path: Path
) -> None:
    for end, number in (("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)):
        told = tmp_path / end
        process = start("waiting_module", [str(told)], environment, tmp_path / "log")
        assert written(told) == process.pid
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        getattr(process, end)()
        assert process.wait(SECONDS) == -number
        getattr(process, end)()  # of a process that has ended: nothing happens


def test_a_forked_process_is_named_after_its_role(
    server: ForkServer, environment: dict[str, str], tmp_path: Path
) -> None:
    told = tmp_path / "told"
    process = server.start(
        "waiting_module", [str(told), "--stage", "3"], environment, tmp_path / "log"
    )
    name = Path(f"/proc/{written(told)}/comm").read_text(encoding="utf-8")
    process.kill()
    assert name == "waiting_module-"[:15] + "\n"
    assert role_of("workers.verify", ["--stage", "12", "--kv", "paged"]) == "verify-12"
    assert role_of("workers.middle", ["--model", "1"]) == "middle-1"
    assert role_of("workers.draft", []) == "draft"


def test_several_that_end_at_once_have_each_its_status(
    server: ForkServer, environment: dict[str, str], tmp_path: Path
) -> None:
    started = [
        server.start("telling_module", [str(status)], environment, tmp_path / str(status))
        for status in range(6)
    ]
    assert [process.wait(SECONDS) for process in reversed(started)] == [5, 4, 3, 2, 1, 0]


def test_a_module_that_is_not_there_is_told_in_its_log(
    start: Start, environment: dict[str, str], tmp_path: Path
) -> None:
    process = start("no_such_module", [], environment, tmp_path / "log")
    assert process.wait(SECONDS) == 1
    assert "no_such_module" in (tmp_path / "log").read_text().splitlines()[-1]


def test_children_are_killed_with_the_process_that_started_them(
    environment: dict[str, str], tmp_path: Path
) -> None:
    told = tmp_path / "pid"
    program = f"""
import os, pathlib, time
from flowspec.start.forks import start
start("waiting_module", [{str(told)!r}], dict(os.environ), pathlib.Path({str(tmp_path / "log")!r}))
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment)
    child = written(told)
    assert runs(child)
    parent.kill()
    parent.wait()
    until(lambda: not runs(child))


def test_a_lost_server_is_a_lost_child_and_starts_nothing(
    environment: dict[str, str], tmp_path: Path
) -> None:
    server = ForkServer(environment)
    told = tmp_path / "pid"
    process = server.start("waiting_module", [str(told)], environment, tmp_path / "log")
    written(told)
    server._process.kill()
    assert process.wait(SECONDS) == -signal.SIGKILL
    until(lambda: not runs(process.pid))
    process.kill()
    with pytest.raises(ClusterError, match="the workers has stopped; it printed: nothing"):
        server.start("telling_module", ["0"], environment, tmp_path / "log")
    server.close()


def test_an_interrupted_start_leaves_nothing_behind(
    server: ForkServer,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer to it comes with the next start, and belongs to nobody."""
    told, other = tmp_path / "pid", tmp_path / "other"

    def interrupted(seconds: float) -> dict[str, int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(server, "_receive", interrupted)
        server.start("waiting_module", [str(told)], environment, tmp_path / "log")
    lost = written(told)
    process = server.start("waiting_module", [str(other)], environment, tmp_path / "log")
    assert written(other) == process.pid != lost
    until(lambda: not runs(lost))
    process.kill()
    assert process.wait(SECONDS) == -signal.SIGKILL


def test_a_process_too_many_is_one_line_and_harms_no_other(
    environment: dict[str, str], tmp_path: Path
) -> None:
    program = "import os, flowspec.start.fork_server as server\n" + "\n".join(
        (
            "def refuse(): raise BlockingIOError(11, 'no more processes')",
            "os.fork = refuse",
            "server.SHARED = ()",
            "server.main()",
        )
    )
    (tmp_path / "refusing_server.py").write_text(program)
    refusing = {**environment, "PYTHONPATH": str(tmp_path)}
    server = ForkServer(refusing, "refusing_server")
    for _ in range(2):
        with pytest.raises(ClusterError, match=r"cannot be started: .*no more processes"):
            server.start("telling_module", ["0"], refusing, tmp_path / "log")
    server.close()


def test_an_import_that_fails_is_told_in_one_line(
    environment: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken here')")
    broken = {**environment, "PYTHONPATH": str(tmp_path)}
    server = ForkServer(broken)
    with pytest.raises(ClusterError, match=r"has stopped; it printed: .*torch is broken here"):
        server.start("telling_module", ["0"], broken, tmp_path / "log")
    server.close()
    assert capfd.readouterr() == ("", "")


def test_pipelines_share_a_server_unless_their_imports_may_differ(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(forks, "_servers", {})
    first = forks._server(environment)
    assert forks._server({**environment, "FLOWSPEC_REDIS_URL": "other"}) is first
    other = forks._server({**environment, "OMP_NUM_THREADS": "7"})
    assert other is not first
    first._process.kill()
    with pytest.raises(ClusterError):
        first.start("telling_module", ["0"], environment, tmp_path / "log")
    assert forks._server(environment) is not first
    assert first._process.returncode is not None, "the lost one is not left behind"
    forks._close_all()


def test_a_machine_with_a_cuda_device_forks_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(forks, "_DEVICES", (tmp_path / "none", tmp_path))
    assert not can_fork()
