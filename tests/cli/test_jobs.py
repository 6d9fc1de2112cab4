"""Jobs by hand: one without a prompt, one that breaks off, and one that nobody takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import pytest

from flowspec.cli import jobs, show
from flowspec.core.run.spec import parse
from flowspec.errors import JobError, JobFailed
from flowspec.results import Chunk
from flowspec.transport.connections.server import PrivateBroker
from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"max_new_tokens": "8"},
            "the job has no prompt; give it either 'prompt' or 'prompt_ids': a text, or a list",
        ),
        (
            {"prompt": "x", "prompt_ids": "[1]"},
            "the job has 'prompt' and 'prompt_ids'; leave out one",
        ),
        ({"prompt": ""}, "the prompt is empty; give it at least one character that is not a space"),
    ],
)
def test_fields_sent_by_hand(fields: dict[str, str], said: str) -> None:
    with pytest.raises(JobError) as refused:
        parse(fields)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("name", ["generate", "submit"])
def test_an_empty_prompt(command: Command, name: str) -> None:
    status, out, err = command(name, " \n")
    assert (status, out) == (1, "")
    assert (
        err == "flowspec: the prompt is empty; give it at least one character that is not a space\n"
    )


class Breaking:
    """A client whose only job streams two pieces and breaks off; its broker is gone, too."""

    error: BaseException = JobFailed("verify-1 was lost")

    def __init__(self, url: str | None) -> None:
        self.url = url

    def __enter__(self) -> Breaking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        return None

    def knows(self, job: str) -> bool:
        return True

    def job(self, job: str) -> Breaking:
        return self

    def pipeline(self) -> dict[str, str]:
        return {"stages": "0"}

    def lost(self) -> list[str]:
        return []

    def workers(self) -> dict[str, dict[str, Any]]:
        return {"scheduler": {}, "draft": {}}

    def stream(self) -> Iterator[Chunk]:
        yield Chunk("Tom has ", (1, 2), (3, 5))
        yield Chunk("12", (3,), (2,))
        raise self.error


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (JobFailed("verify-1 was lost"), (1, "flowspec: verify-1 was lost\n")),
        (KeyboardInterrupt(), (130, "")),
    ],
)
def test_a_watched_text_that_breaks_off_stays(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    error: BaseException,
    ended: tuple[int, str],
) -> None:
    monkeypatch.setattr(jobs, "Client", Breaking)
    monkeypatch.setattr(Breaking, "error", error)
    if terminal:
        monkeypatch.setattr(show.Screen, "_live", True)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, out, err = command("watch", "1-0", "--redis-url", "unix:///x")
    assert (status, out) == (ended[0], "Tom has 12\n")
    assert err.endswith(ended[1]) if terminal else err == ended[1]


def test_a_job_that_waits_for_a_scheduler_exists(
    command: Command, monkeypatch: pytest.MonkeyPatch, server: PrivateBroker
) -> None:
    monkeypatch.setattr(jobs, "_KNOWN_SECONDS", 0.1)
    url = ("--redis-url", server.url)
    job = command("submit", "hi", *url)[1].strip()
    for name in ("watch", "cancel"):
        status, out, err = command(name, job, *url)
        assert (status, out) == (1, "")
        assert err == (
            f"flowspec: job {job} waits and no scheduler serves the pipeline; start one, or look "
            "with `flowspec status`\n"
        )
        assert "there is no job 1-0: it never existed" in command(name, "1-0", *url)[2]
