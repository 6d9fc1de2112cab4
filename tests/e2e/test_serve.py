"""``flowspec serve``, ``flowspec chat`` and ``python -m workers.gateway`` as a user starts them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx2
import pytest

from flowspec.client import Client
from flowspec.start import forks
from tests.commands import Command, run, start
from tests.e2e.conftest import Clusters, left_in, surroundings
from tests.marks import heavy
from tests.waiting import SECONDS, until

pytestmark = pytest.mark.live


@contextmanager
def started(*words: str, environment: Mapping[str, str]) -> Iterator[tuple[Command, str]]:
    """A process that serves, and the address in the one line that it prints."""
    with start(*words, environment=environment) as command:
        found = re.search(r" at (http://\S+)/v1", command.line())
        assert found is not None, command.out
        yield command, found[1]


def serve(place: Path, *flags: str) -> AbstractContextManager[tuple[Command, str]]:
    """A private pipeline and its gateway."""
    return started(
        *("flowspec", "serve", "--port", "0", "--stages", "2", *flags),
        environment=surroundings(place),
    )


def wait_for_another(place: Path, role: str, before: int, address: str) -> None:
    """Wait until ``role`` has another process than ``before`` and the gateway can answer."""
    until(lambda: worker_of(place, role) not in (None, before))
    until(lambda: httpx2.get(f"{address}/ready", timeout=SECONDS).status_code == 200)
    assert ask(address).status_code == 200


def ask(address: str, **headers: str) -> httpx2.Response:
    request = {
        "model": "target",
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 8,
    }
    url = f"{address}/v1/chat/completions"
    return httpx2.post(url, json=request, headers=headers, timeout=SECONDS)


@pytest.mark.gate
@pytest.mark.parametrize("number", [heavy(signal.SIGINT), signal.SIGTERM])
def test_serve_answers_and_ends_with_everything_it_started(
    place: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "keys").write_text("sk-of-the-test\n")
    with serve(place, "--api-key-file", str(tmp_path / "keys")) as (serving, address):
        assert httpx2.get(f"{address}/ready", timeout=SECONDS).status_code == 200
        assert ask(address).status_code == 401
        answer = ask(address, authorization="Bearer sk-of-the-test")
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        found = run("flowspec", "status", "--json", environment=surroundings(place))
        assert json.loads(found.stdout)["workers"]["verify-2"]["state"] == "ready"
        serving.process.send_signal(number)
        done = serving.ended()
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")
    assert left_in(place) == []
    found = run("flowspec", "status", environment=surroundings(place))
    assert "start a pipeline" in found.stderr


def test_a_lost_worker_is_said_and_started_again(place: Path) -> None:
    with serve(place) as (serving, address):
        lost = worker_of(place, "verify-2")
        assert lost is not None
        os.kill(lost, signal.SIGKILL)
        wait_for_another(place, "verify-2", lost, address)
        serving.process.send_signal(signal.SIGTERM)
        done = serving.ended()
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("note: verify-2 stopped with status -9")
    assert left_in(place) == []


@pytest.mark.gate
@pytest.mark.skipif(not forks.can_fork(), reason="no fork server here")
def test_a_killed_fork_server_is_survived(place: Path) -> None:
    """All workers end with it, so for an instant none runs."""
    with serve(place) as (serving, address):
        before = worker_of(place, "verify-2")
        assert before is not None
        started_by = {child: children_of(child) for child in children_of(serving.process.pid)}
        (server,) = (child for child, workers in started_by.items() if before in workers)
        os.kill(server, signal.SIGKILL)
        wait_for_another(place, "verify-2", before, address)
        serving.process.send_signal(signal.SIGTERM)
        done = serving.ended()
    assert done.returncode == 0
    assert all(line.startswith("note: ") for line in done.stderr.splitlines()), done.stderr
    assert left_in(place) == []


def test_a_gateway_joins_a_pipeline_that_runs(clusters: Clusters) -> None:
    environment = {**os.environ, "FLOWSPEC_REDIS_URL": clusters(2).url}
    words = ("workers.gateway", "--port", "0", "--model-name", "mine")
    with started(*words, environment=environment) as (serving, address):
        listed = httpx2.get(f"{address}/v1/models", timeout=SECONDS).json()
        assert listed["data"][0]["id"] == "mine"
        assert listed["data"][0]["max_model_len"] == 1024
        serving.process.send_signal(signal.SIGTERM)
        done = serving.ended()
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")


def is_closed(address: str) -> bool:
    """Whether no new connection is taken at ``address``."""
    try:
        httpx2.get(f"{address}/health", timeout=SECONDS)
    except httpx2.TransportError:
        return True
    return False


@pytest.mark.gate
@pytest.mark.parametrize("twice", [False, True])
def test_a_gateway_that_is_asked_to_stop_lets_answers_end(
    clusters: Clusters, *, twice: bool
) -> None:
    """Unless it is asked twice: then they end with its error."""
    url = clusters(2).url
    environment = {**os.environ, "FLOWSPEC_REDIS_URL": url}
    body = {"prompt": [5, 6, 7], "max_tokens": 900, "stream": True, "strategy": "autoregressive"}
    with (
        started("workers.gateway", "--port", "0", environment=environment) as (serving, address),
        httpx2.stream("POST", f"{address}/v1/completions", json=body, timeout=SECONDS) as answer,
    ):
        pieces = answer.iter_lines()
        assert next(pieces).startswith("data: ")
        serving.process.send_signal(signal.SIGTERM)
        until(lambda: is_closed(address))
        if twice:
            serving.process.send_signal(signal.SIGTERM)
        said = [*pieces]
        done = serving.ended()
    assert done.returncode == 0
    assert "data: [DONE]" in said
    assert ("the gateway is stopping" in "".join(said)) == twice


def test_a_gateway_without_broker_says_so_in_one_line() -> None:
    environment = {**os.environ, "FLOWSPEC_REDIS_URL": "redis://localhost:1/0"}
    done = run("workers.gateway", "--port", "0", environment=environment)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("flowspec gateway: cannot reach the broker at redis://localhost:1/0")
    assert line.endswith("; name it by --redis-url or FLOWSPEC_REDIS_URL")


@pytest.mark.gate
def test_a_conversation_in_the_terminal(clusters: Clusters) -> None:
    url = clusters(2).url
    done = run(
        *("flowspec", "chat", "--max-new-tokens", "12"),
        environment={**os.environ, "FLOWSPEC_REDIS_URL": url},
        said="Tom has 5 apples. How many?\nAnd now?\n",
    )
    assert done.returncode == 0, done
    figures = done.stderr.splitlines()
    assert len(figures) == 2
    assert re.fullmatch(r"\[\d+ tokens, .* tokens/s, \d+% guessed\]", figures[0])
    assert re.fullmatch(
        r"\[\d+ tokens, .* tokens/s, \d+% guessed, \d+ tokens of the prompt known\]", figures[1]
    )
    with Client(url) as client:
        turns = [{"role": "user", "content": "Tom has 5 apples. How many?"}]
        first = client.submit(messages=turns, max_new_tokens=12).result().text
        turns.append({"role": "assistant", "content": first.strip()})
        turns.append({"role": "user", "content": "And now?"})
        second = client.submit(messages=turns, max_new_tokens=12).result().text
    assert done.stdout == f"{first}\n{second}\n"


def children_of(parent: int) -> list[int]:
    """The processes that ``parent`` has started and that run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            facts = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(facts[1]) == parent and facts[0] != "Z":
            found.append(int(folder.name))
    return found


def worker_of(place: Path, role: str) -> int | None:
    """The process of ``role`` in ``place``, if one runs; its output is the log of that name."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            output = (folder / "fd" / "1").readlink()
        except OSError:
            continue
        if output.name == role and output.is_relative_to(place):
            return int(folder.name)
    return None
