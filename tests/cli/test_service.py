"""``flowspec status`` without a terminal width, and a second ``flowspec up``."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import Mock

import pytest

from flowspec.cli import service
from flowspec.cli.places import lock_file, state_file
from flowspec.errors import BrokerError
from tests.cli.conftest import Command

HOST = "a-machine-with-a-very-long-name.in-a-rack.of-a-site.of-a-firm.example.org"


class Pipeline:
    """A client of a two-stage pipeline on machines with long names."""

    def __init__(self, url: str | None) -> None:
        self.url = url

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        return None

    def pipeline(self) -> dict[str, str]:
        return {"target": f"/models/{HOST}", "draft": "d", "stages": "2", "most_rows": "900"}

    def lost(self) -> list[str]:
        return []

    def workers(self) -> dict[str, dict[str, Any]]:
        facts = {"state": "ready", "host": HOST, "pid": 4194304, "passes": 10**9, "refused": 0}
        placed = {"precision": "nf4", "device": "cpu", "kernels": ["bitsandbytes", "cc-w8a16"]}
        stages = {f"verify-{stage}": facts | placed for stage in (1, 2)}
        stages["verify-1"] |= {"refused": 3, "needs_bytes": 3 << 30, "free_bytes": 22 << 30}
        stages["verify-2"]["kv"] = {"store": "paged", "blocks": 90, "free": 71, "shared": 4}
        return dict.fromkeys(("scheduler", "draft"), facts) | stages

    def spares(self) -> list[dict[str, Any]]:
        raise BrokerError("no permission")  # by an older ACL file

    def load(self) -> tuple[int, int]:
        return 1, 2


@pytest.mark.parametrize("columns", [None, "40"])
def test_piped_output_is_not_wrapped(
    command: Command, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    monkeypatch.setattr(service, "Client", Pipeline)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    status, out, _ = command("status", "--redis-url", "unix:///x")
    assert status == 0
    first, head, *rows = out.splitlines()
    assert first == (
        f"/models/{HOST} on 2 stages; 1 running, 2 waiting; "
        "each stage has room for 900 KV rows, one a token"
    )
    names = ["worker", "state", "host", "process", "passes", "refused"]
    assert head.split() == [*names, "KV", "blocks", "needs", "runs", "on"]
    counts = ["ready", HOST, "4194304", "1000000000"]
    runs_on = ["nf4", "on", "cpu", "by", "bitsandbytes+cc-w8a16"]
    assert [row.split() for row in rows] == [
        *([role, *counts, "0", "-", "-", "-"] for role in ("scheduler", "draft")),
        ["verify-1", *counts, "3", "-", *["3.0", "of", "22.0", "GiB"], *runs_on],
        ["verify-2", *counts, "0", "19", "of", "90,", "4", "shared", "-", *runs_on],
    ]
    assert max(map(len, out.splitlines())) < 200


def test_columns_that_say_nothing_are_left_out() -> None:
    workers = {"scheduler": {"state": "ready", "refused": 0}, "verify-1": {"state": "joining"}}
    roles = ("scheduler", "draft", "verify-1", "verify-2")
    shown = service._workers(roles, workers, ["draft"], [], "")
    assert [column.header for column in shown.columns] == ["worker", "state"]
    assert [*shown.columns[1].cells] == ["ready", "lost", "joining", "not started"]


def test_versions_are_shown_while_they_differ() -> None:
    roles = ("draft", "verify-1")
    workers = {"draft": {"version": "0.1.0"}, "verify-1": {"version": "0.2.0"}}
    shown = service._workers(roles, workers, [], [], "")
    assert [*shown.columns[-1].cells] == ["0.1.0", "0.2.0"]
    workers["draft"] = workers["verify-1"]
    shown = service._workers(roles, workers, [], [], "")
    assert [column.header for column in shown.columns] == ["worker", "state"]


def test_spares_stand_below_the_workers() -> None:
    spare = {"roles": ["verify-1", "verify-2"], "host": "box", "pid": 7}
    shown = service._workers(("scheduler",), {"scheduler": {"passes": 3}}, [], [spare], "")
    rows = zip(*(column.cells for column in shown.columns), strict=True)
    assert [*rows] == [
        ("scheduler", "not started", "-", "-", "3"),
        ("spare of verify-1, verify-2", "waits", "box", "7", "-"),
    ]


def test_a_second_up_says_that_one_is_starting_and_touches_nothing(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept = (state_file(), state_file().with_suffix(".log"))
    state_file().parent.mkdir()
    for file in kept:
        file.write_text("the first one's")
    with lock_file().open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, out, err = command("up", "--stages", "2")
    assert (status, out) == (1, "")
    assert err == ("flowspec: a pipeline is being started already; wait until it serves\n")
    assert [file.read_text() for file in kept] == ["the first one's"] * 2


def test_data_are_kept_by_a_broker_of_ones_own_alone(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    status, _, err = command("up", "--persist", str(tmp_path), "--redis-url", "unix:///none")
    assert status != 0
    assert "--persist is for a broker of the pipeline's own" in err


def test_up_passes_on_what_its_supervisor_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "up.log"
    log.write_text("note: loading stages\nverify-1 serves\n", encoding="utf-8")
    steps = iter([None, None, object()])

    def running() -> object:
        with log.open("a", encoding="utf-8") as lines:
            lines.write("note: one more\n")
        return next(steps)

    monkeypatch.setattr(service, "running", running)
    process = Mock(poll=lambda: None)
    service._wait_until_up(process, log)
    assert capsys.readouterr().err == "note: loading stages\n" + "note: one more\n" * 3
