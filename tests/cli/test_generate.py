"""``flowspec generate``: what happens to its job and its recording; the pipeline is a fake."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowspec.cli import generate
from flowspec.cli.show import Screen
from flowspec.client import Chunk, Result
from flowspec.cluster import Setup
from flowspec.core.run.sampling import Sampling

RESULT = Result("1-0", (1,), (2,), "text", "flowspec", "length", {})


class Job:
    """A job whose text has come; counts how often it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    def stream(self) -> Iterator[Chunk]:
        yield Chunk("text", (2,))

    def so_far(self) -> Result:
        return RESULT

    def cancel(self) -> None:
        self.cancelled += 1

    def recording(self) -> list[str]:
        return ["a line"]


class Client:
    """A client whose only job is ``job``."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def submit_spec(self, spec: object) -> Job:
        return self.job


class Full(io.StringIO):
    """Standard output on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def answer(job: Job, record: Path | None = None) -> bool:
    """Answer one prompt by ``job``; whether that succeeded."""
    setup = Setup("target", "draft", 2)
    request = generate.Request(
        setup, Sampling(), "flowspec", 8, raw=False, as_json=False, record=record, url="unix:///x"
    )
    screen = Screen(as_json=False)
    client: object = Client(job)
    return generate._answer(client, request.spec("hi"), request, screen, lambda: None)  # type: ignore[arg-type]


def test_a_job_whose_text_cannot_be_shown_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        answer(job)
    assert job.cancelled == 1


def test_a_recording_replaces_the_file_that_a_link_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "merge", list)
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "run.jsonl"
    file.write_text("old")
    link = tmp_path / "link"
    link.symlink_to("folder/run.jsonl")
    job = Job()
    assert answer(job, link)
    assert link.is_symlink() and file.read_text() == "a line\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["folder", "link", "run.jsonl"]
    assert job.cancelled == 0
