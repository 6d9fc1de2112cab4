"""Jobs by hand: the redis-cli commands of the documents, and the errors for malformed jobs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flowspec.client import Client
from flowspec.model.reference import Reference
from flowspec.transport.connections.connection import connect
from tests.e2e.conftest import Clusters, redis_cli

pytestmark = pytest.mark.live

JOBS = Path(__file__).parent.parent.parent / "docs/jobs.md"


def by_hand(url: str, *words: str) -> str:
    """What ``redis-cli`` prints for a command, without the line's end."""
    parts = urlsplit(url)
    done = subprocess.run(
        [redis_cli(), "-s", parts.path, *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "REDISCLI_AUTH": parts.password or ""},
    )
    assert done.stderr == ""
    return done.stdout.rstrip("\n")


def readme_commands() -> list[list[str]]:
    lines = [line.strip().removeprefix("$ ") for line in JOBS.read_text().splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("redis-cli ")]


@pytest.mark.gate
def test_the_two_commands_of_the_readme(clusters: Clusters, reference: Reference) -> None:
    url = clusters(2).url
    submit, read = readme_commands()
    assert submit[:3] == ["XADD", "flowspec:jobs", "*"]
    job = by_hand(url, *submit)
    with Client(url) as client:
        result = client.job(job).result()
    assert result.token_ids == reference.generate(result.prompt_token_ids, len(result.token_ids))
    answer = by_hand(url, *(word.replace("JOB", job) for word in read))
    assert {"tokens", "end", "finish_reason", "length"} <= set(answer.splitlines())


def output(url: str, job: str) -> list[dict[str, str]]:
    client = connect(url)
    entries: list[dict[str, str]] = []
    while not entries or entries[-1]["kind"] != "end":
        found = client.xread({f"flowspec:{{p0}}:out:{job}": "0"}, block=2000)
        entries = [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in found[0][1]]
    client.close()
    return entries


def test_a_malformed_job_is_told_so_in_its_output(clusters: Clusters) -> None:
    url = clusters(2).url
    for words, says in (
        (("prompt", ""), "the prompt is empty"),
        (("promt", "typo"), "unknown job field 'promt'"),
        (("prompt", "x", "max_new_tokens", "0"), "max_new_tokens is 0"),
        (("prompt", "x", "temperature", "nan"), "temperature is nan"),
        (
            ("prompt", "x", "strategy", "magic"),
            "unknown strategy 'magic'; there are: autoregressive",
        ),
        (("prompt", "word " * 4000), "the model's context is 1024"),
        (("prompt_ids", "[1, 99999]"), "vocabulary ends at 4095"),
    ):
        job = by_hand(url, "XADD", "flowspec:jobs", "*", *words)
        entries = output(url, job)
        assert [entry["kind"] for entry in entries] == ["error", "end"]
        assert says in entries[0]["text"]
    client = connect(url)
    job = client.execute_command("XADD", "flowspec:jobs", "*", "prompt", b"\xff\xfe").decode()
    client.close()
    assert "not UTF-8" in output(url, job)[0]["text"]


def test_jobs_can_be_cancelled_by_hand(clusters: Clusters) -> None:
    url = clusters(2).url
    words = ("prompt", "Tell me all.", "max_new_tokens", "900")
    job = by_hand(url, "XADD", "flowspec:jobs", "*", *words)
    by_hand(url, "XADD", "flowspec:jobs", "*", "cancel", job)
    assert output(url, job)[-1]["finish_reason"] == "cancelled"


def test_output_entries_are_as_documented(clusters: Clusters) -> None:
    url = clusters(2).url
    job = by_hand(url, "XADD", "flowspec:jobs", "*", "prompt", "Why?", "max_new_tokens", "10")
    entries = output(url, job)
    tokens = [entry for entry in entries if entry["kind"] == "tokens"]
    offset = 0
    for entry in tokens:
        assert int(entry["offset"]) == offset
        offset += len(json.loads(entry["ids"]))
    assert offset == 10
    assert tokens[-1]["finish_reason"] == "length"
    assert "finish_reason" not in tokens[0]
    assert entries[-1].keys() == {"kind", "finish_reason", "stats"}
