"""``flowspec generate``: what happens to its job and its recording; the pipeline is a fake."""

from __future__ import annotations

import errno
import io
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowspec.cli import generate
from flowspec.cli.show import Screen
from flowspec.cluster import Setup
from flowspec.core.run.sampling import Sampling
from flowspec.errors import BrokerError, JobFailed
from flowspec.results import Chunk, Result
from tests.waiting import SECONDS

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

    def pipeline(self) -> dict[str, str]:
        raise BrokerError("away")


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
    """A job that ends when its ``gate`` opens, or it is cancelled."""

    def __init__(self, name: str, error: str = "") -> None:
        self.name = name
        self.error = error
        self.gate = threading.Event()
        self.ended = False
        self.cancelled = False

    def so_far(self) -> Result:
        return replace(RESULT, text=self.name)

    def result(self) -> Result:
        assert self.gate.wait(SECONDS)
        self.ended = True
        if self.error:
            raise JobFailed(self.error)
        return self.so_far()

    def cancel(self) -> None:
        self.cancelled = True
        self.gate.set()


class Pool:
    """A client of ``jobs``, which end in ``order``, one by one; then Ctrl-C, if any are left.

    ``rounds``: which were running whenever one was to end.
    """

    def __init__(self, jobs: Sequence[Piece], order: str) -> None:
        self.jobs = {job.name: job for job in jobs}
        self.left = list(jobs)
        self.running: list[str] = []
        self.rounds: list[str] = []
        self.order = iter(order)

    def submit_spec(self, spec: object) -> Piece:
        job = self.left.pop(0)
        self.running.append(job.name)
        return job

    def wait(self, waits: set[Future[Result]], **options: Any) -> tuple[set[Any], set[Any]]:
        self.rounds.append("".join(self.running))
        name = next(self.order, "")
        if not name:
            raise KeyboardInterrupt
        self.running.remove(name)
        self.jobs[name].gate.set()
        return futures.wait(waits, SECONDS, **options)


Together = Callable[[Pool, int], bool]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Together:
    def answer(pool: Pool, most: int) -> bool:
        monkeypatch.setattr(generate, "wait", pool.wait)
        request = request_of(Setup("target", "draft", 2, jobs=most))
        client: object = pool
        answering = generate._Together(
            client,  # type: ignore[arg-type]
            request,
            Screen(as_json=False),
            lambda: None,
        )
        return answering.answer([request.spec("hi")] * len(pool.jobs))

    return answer


def test_prompts_run_together_and_their_answers_keep_their_order(
    together: Together, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = Pool([Piece(name) for name in "abcde"], "bcade")
    assert together(pool, 2)
    assert pool.rounds == ["ab", "ac", "ad", "de", "e"]
    assert capsys.readouterr().out.split() == list("abcde")


def test_a_prompt_that_fails_leaves_the_others(
    together: Together, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not together(Pool([Piece("a"), Piece("b", "too long"), Piece("c")], "abc"), 3)
    shown = capsys.readouterr()
    assert shown.out.split() == ["a", "c"]
    assert "flowspec: too long" in shown.err


def test_ctrl_c_cancels_what_runs_and_prints_what_was_committed(
    together: Together, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = Pool([Piece(name) for name in "abcd"], "b")
    with pytest.raises(KeyboardInterrupt):
        together(pool, 2)
    assert capsys.readouterr().out.split() == ["a", "b", "c"]
    assert [job.cancelled for job in pool.jobs.values()] == [True, True, True, False]


def test_jobs_whose_text_cannot_be_shown_are_cancelled(
    together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool([Piece("a"), Piece("b")], "a")
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        together(pool, 2)
    assert [job.cancelled for job in pool.jobs.values()] == [False, True]
