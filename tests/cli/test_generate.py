"""``flowspec generate``: what happens to its job and its recording; the pipeline is a fake."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.cli import generate
from flowspec.cli.show import Screen
from flowspec.cluster import Setup
from flowspec.core.run.sampling import Sampling
from flowspec.results import Chunk, Result

RESULT = Result("1-0", (1,), (2,), "text", "flowspec", "length", {})


class Job:
    """A job whose text has come; counts how often it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    def stream(self) -> Iterator[Chunk]:
        yield Chunk("text", (2,), (4,))

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


def request_of(setup: Setup, record: Path | None = None) -> generate.Request:
    """A request for eight tokens of a running pipeline."""
    return generate.Request(
        setup,
        Sampling(),
        "flowspec",
        8,
        raw=False,
        as_json=False,
        with_stats=False,
        record=record,
        url="unix:///x",
    )


def answer(job: Job, record: Path | None = None) -> bool:
    """Answer one prompt by ``job``; whether that succeeded."""
    request = request_of(Setup("target", "draft", 2), record)
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


# ---- several at once ---------------------------------------------------------------------------


class Piece:
    """A job that ends after ``reads`` reads."""

    def __init__(self, name: str, reads: int, error: str = "") -> None:
        self.name = name
        self.reads = reads
        self.error = error
        self.cancelled = False

    @property
    def ended(self) -> bool:
        return self.reads <= 0

    def so_far(self) -> Result:
        return replace(RESULT, text=self.name)

    def result(self) -> Result:
        return self.so_far()

    def cancel(self) -> None:
        self.cancelled = True


class Pool:
    """A client of ``jobs``; notes which are read together."""

    def __init__(self, jobs: Sequence[Piece], stop_at: int = 99) -> None:
        self.jobs = list(jobs)
        self.left = list(jobs)
        self.rounds: list[str] = []
        self.stop_at = stop_at

    def submit_spec(self, spec: object) -> Piece:
        return self.left.pop(0)

    def read(self, jobs: Sequence[Piece]) -> None:
        if len(self.rounds) == self.stop_at:
            raise KeyboardInterrupt
        self.rounds.append("".join(job.name for job in jobs))
        for job in jobs:
            job.reads -= 1


def together(pool: Pool, most: int) -> bool:
    request = request_of(Setup("target", "draft", 2, jobs=most))
    client: object = pool
    answering = generate._Together(client, request, Screen(as_json=False), lambda: None)  # type: ignore[arg-type]
    return answering.answer([request.spec("hi")] * len(pool.jobs))


def test_prompts_run_together_and_their_answers_keep_their_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pool = Pool([Piece("a", 4), Piece("b", 1), Piece("c", 2), Piece("d", 1), Piece("e", 1)])
    assert together(pool, 2)
    assert pool.rounds == ["ab", "ac", "ac", "ad", "e"]
    assert capsys.readouterr().out.split() == list("abcde")


def test_a_prompt_that_fails_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert not together(Pool([Piece("a", 1), Piece("b", 1, "too long"), Piece("c", 2)]), 3)
    shown = capsys.readouterr()
    assert shown.out.split() == ["a", "c"]
    assert "flowspec: too long" in shown.err


def test_ctrl_c_cancels_what_runs_and_prints_what_was_committed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pool = Pool([Piece("a", 9), Piece("b", 1), Piece("c", 9), Piece("d", 9)], stop_at=2)
    with pytest.raises(KeyboardInterrupt):
        together(pool, 2)
    assert capsys.readouterr().out.split() == ["a", "b", "c"]
    assert [job.cancelled for job in pool.jobs] == [True, True, True, False]


def test_jobs_whose_text_cannot_be_shown_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool([Piece("a", 1), Piece("b", 9)])
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        together(pool, 2)
    assert [job.cancelled for job in pool.jobs] == [False, True]
