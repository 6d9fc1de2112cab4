"""``flowspec serve``, ``flowspec chat`` and ``python -m workers.gateway`` as a user starts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from flowspec.client import Client
from tests.e2e.conftest import Clusters, heed_interrupts, left_in, surroundings
from tests.marks import heavy

SECONDS = 60.0


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves, and the address in the one line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(environment),
        preexec_fn=heed_interrupts,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r" at (http://\S+)/v1", line)
        assert found is not None, process.communicate(timeout=SECONDS)
        yield process, found[1]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ask(address: str, **headers: str) -> httpx2.Response:
    request = {
        "model": "target",
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 8,
    }
    url = f"{address}/v1/chat/completions"
    return httpx2.post(url, json=request, headers=headers, timeout=SECONDS)


@pytest.mark.parametrize("number", [heavy(signal.SIGINT), signal.SIGTERM])
def test_serve_answers_and_ends_with_everything_it_started(
    place: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "keys").write_text("sk-of-the-test\n")
    flags = ("--port", "0", "--stages", "2", "--api-key-file", str(tmp_path / "keys"))
    with started(("flowspec", "serve", *flags), surroundings(place)) as (process, address):
        assert httpx2.get(f"{address}/ready", timeout=SECONDS).status_code == 200
        assert ask(address).status_code == 401
        answer = ask(address, authorization="Bearer sk-of-the-test")
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (0, "", "")
    assert left_in(place) == []


def test_a_lost_worker_is_said_answered_with_503_and_started_again(place: Path) -> None:
    flags = ("--port", "0", "--stages", "2")
    with started(("flowspec", "serve", *flags), surroundings(place)) as (process, address):

        def ready() -> bool:
            return httpx2.get(f"{address}/ready", timeout=SECONDS).status_code == 200

        os.kill(worker_of(place, "verify-2"), signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while ready():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        while not ready():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert ask(address).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    (line,) = err.splitlines()
    assert line.startswith("note: verify-2 stopped with status -9")
    assert left_in(place) == []


def test_a_gateway_joins_a_pipeline_that_runs(clusters: Clusters) -> None:
    environment = {**os.environ, "FLOWSPEC_REDIS_URL": clusters(2).url}
    command = ("workers.gateway", "--port", "0", "--model-name", "mine")
    with started(command, environment) as (process, address):
        listed = httpx2.get(f"{address}/v1/models", timeout=SECONDS).json()
        assert listed["data"][0]["id"] == "mine"
        assert listed["data"][0]["max_model_len"] == 1024
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_gateway_without_broker_says_so_in_one_line() -> None:
    environment = {**os.environ, "FLOWSPEC_REDIS_URL": "redis://localhost:1/0"}
    done = subprocess.run(
        [sys.executable, "-m", "workers.gateway", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("flowspec gateway: cannot reach the broker at redis://localhost:1/0")


def test_a_conversation_in_the_terminal(clusters: Clusters) -> None:
    url = clusters(2).url
    done = subprocess.run(
        [sys.executable, "-m", "flowspec", "chat", "--max-new-tokens", "12"],
        input="Tom has 5 apples. How many?\nAnd now?\n",
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "FLOWSPEC_REDIS_URL": url},
        check=True,
    )
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


def worker_of(place: Path, role: str) -> int:
    """The process that serves ``role`` in ``place``; its output is the log of that name."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            output = (folder / "fd" / "1").readlink()
        except OSError:
            continue
        if output.name == role and output.is_relative_to(place):
            return int(folder.name)
    raise AssertionError(f"no process serves {role}")
