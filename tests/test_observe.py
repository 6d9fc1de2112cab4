"""Logs go to stderr as it is when a logger is made; wrong settings are one clear line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flowspec import observe
from flowspec.errors import ConfigError


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FLOWSPEC_LOG", raising=False)
    monkeypatch.delenv("FLOWSPEC_LOG_FORMAT", raising=False)
    yield
    monkeypatch.undo()
    observe.configure()


def test_an_event_is_one_line_of_json_with_its_context(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOWSPEC_LOG_FORMAT", "json")
    observe.configure()
    observe.logger(role="draft").warning("lease renewed late", seconds=2.5)
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "lease renewed late",
        "level": "warning",
        "role": "draft",
        "seconds": 2.5,
    }


@pytest.mark.parametrize(("level", "shown"), [("", 1), ("info", 2), ("error", 0)])
def test_the_level_is_settable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, shown: int
) -> None:
    if level:
        monkeypatch.setenv("FLOWSPEC_LOG", level)
    observe.configure()
    observe.logger().info("told")
    observe.logger().warning("warned")
    assert len(capsys.readouterr().err.splitlines()) == shown


def test_a_logger_writes_to_the_stderr_of_its_making(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose stderr was replaced and closed since ``configure`` can still log."""
    closed = io.StringIO()
    monkeypatch.setattr(sys, "stderr", closed)
    observe.configure()
    closed.close()
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    observe.logger().warning("still here")
    assert "still here" in later.getvalue()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("FLOWSPEC_LOG", "loud", "FLOWSPEC_LOG is 'loud'; expected one of debug, info"),
        ("FLOWSPEC_LOG_FORMAT", "xml", "FLOWSPEC_LOG_FORMAT is 'xml'; expected text or json"),
    ],
)
def test_a_wrong_setting_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        observe.configure()


def test_a_library_leaves_its_users_stdout_alone() -> None:
    program = "from flowspec.observe import logger; logger(job='7').warning('broker away')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert "broker away" in done.stderr and "job=7" in done.stderr.replace("'", "")


def test_a_wrong_setting_ends_no_program_that_uses_the_client() -> None:
    program = "from flowspec.observe import logger; logger(job='7').warning('broker away')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "FLOWSPEC_LOG": "loud"},
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "broker away" in done.stderr
    assert "FLOWSPEC_LOG is 'loud'; expected one of debug, info" in done.stderr
