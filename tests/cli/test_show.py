"""What is shown beside a job's text, and at its end."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from rich.console import Console

from flowspec.cli import notes, show
from flowspec.cli.show import Screen, StatusLine, summary, table
from flowspec.client import Client
from flowspec.core.session.stats import Tally
from flowspec.results import Chunk, Result, Stats
from tests.waiting import until


def shown(decisions: list[dict[str, Any]], tally: Tally | None = None) -> dict[str, str]:
    """The table's lines by name."""
    counted = tally or Tally(0.0, 0.0)
    stats = {**counted.stats(range(61), {}, 1), "decisions": decisions}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(Result("j", (), (), "", "auto", "length", stats)))
    lines = [line.split("  ", 1) for line in captured.get().splitlines()]
    return {name.strip(): value.strip() for name, value in lines}


def test_it_says_which_draft_was_used_for_how_many_tokens() -> None:
    sizes: dict[str, Any] = {"segments": 2, "rows": 8}
    took_turns = [
        sizes,
        *(
            {"tokens": at, "drafter": name}
            for at, name in ((0, "head"), (24, "small"), (48, "head"))
        ),
    ]
    assert shown(took_turns)["tokens by draft"] == "head 36  small 24"
    assert "tokens by draft" not in shown([sizes])


def test_one_line_says_how_a_job_ended_and_how_fast_it_was() -> None:
    def said(tokens: int, reason: str, asked: int | None = None, **stats: Any) -> str:
        ids = tuple(range(tokens))
        found = Result("j", (), ids, "", "auto", reason, Stats(**stats), max_new_tokens=asked)
        return summary(found)

    fast = {"tokens_per_second": 51.64, "hit_rate": 0.916, "draft_passes": 9}
    assert said(38, "eos", **fast) == "38 tokens; 51.6 tokens/s, hit rate 0.92"
    assert said(64, "length", 64, **fast).startswith("64 tokens, as many as asked for; 51.6")
    assert said(64, "length", **fast).startswith("64 tokens; 51.6")
    plain = fast | {"hit_rate": 0.0, "draft_passes": 0}
    assert said(38, "eos", **plain) == "38 tokens; 51.6 tokens/s"
    cut = said(1016, "length", 5000, tokens_per_second=30.0)
    assert cut == "1016 tokens of the 5000 asked for: the context is full; 30.0 tokens/s"
    assert said(1, "cancelled") == "1 token until it was cancelled"


def test_the_time_to_the_first_token_says_how_much_of_it_was_queued() -> None:
    tally = Tally(submitted_at=1.0, started_at=3.5, queued_seconds=2.5)
    tally.count(1, 0, now=4.0)
    assert shown([], tally)["time to first token"] == "3.000 s, of which queued 2.500 s"


class Pipeline:
    """A client of a pipeline that has lost a stage."""

    def __init__(self) -> None:
        self.looks = 0

    def pipeline(self) -> dict[str, str]:
        return {"stages": "1"}

    def workers(self) -> dict[str, dict[str, Any]]:
        return {"scheduler": {}, "draft": {}}

    def lost(self) -> list[str]:
        self.looks += 1
        return ["verify-1"]


WHY = (
    "verify-1 was lost: jobs wait until it is started again, "
    "by `python -m workers.verify --stage 1`"
)
CHUNK = Chunk("Hi", (1,), (2,))


def test_each_pause_is_explained_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(show, "AGAIN_SECONDS", 0.01)
    found = Pipeline()
    with Screen(as_json=False).streaming(cast(Client, found)) as shown:
        until(lambda: found.looks >= 3)
        shown(CHUNK)
        until(lambda: found.looks >= 6)
    captured = capsys.readouterr()
    assert captured.out == "Hi"
    assert captured.err == f"note: {WHY}\n" * 2
    until(lambda: not any(thread.name == "pauses" for thread in threading.enumerate()))


def test_a_text_that_stops_where_no_worker_is_missing_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its worker may have died just now. Before its first token nothing is wrong."""
    monkeypatch.setattr(show, "PAUSE_SECONDS", 0.01)
    looks: list[object] = []
    monkeypatch.setattr(notes, "why_waiting_at", lambda client: looks.append(client) or "")

    def looked() -> None:
        before = len(looks)
        until(lambda: len(looks) >= before + 3)

    with Screen(as_json=False).streaming(cast(Client, Pipeline())) as shown:
        looked()
        assert capsys.readouterr().err == ""
        shown(CHUNK)
        looked()
        assert capsys.readouterr().err == f"note: {notes.SILENT}\n"
        shown(CHUNK)
        looked()
    assert capsys.readouterr().err == ""


def test_what_is_over_at_a_second_look_is_not_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(show, "AGAIN_SECONDS", 0.01)
    looks: list[str] = []

    def why_waiting_at(client: object) -> str:
        looks.append(WHY if len(looks) % 3 == 1 else "")  # missing at the first of two looks alone
        return looks[-1]

    monkeypatch.setattr(notes, "why_waiting_at", why_waiting_at)
    with Screen(as_json=False).streaming(cast(Client, Pipeline())):
        until(lambda: len(looks) >= 12)
    assert capsys.readouterr().err == ""


def test_where_a_supervisor_speaks_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "PAUSE_SECONDS", 0.0)
    found = Pipeline()
    with Screen(as_json=False).streaming(cast(Client, found), supervised=True) as shown:
        shown(CHUNK)
    assert found.looks == 0


def test_the_status_line_explains_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "PAUSE_SECONDS", 0.0)
    screen = Console(width=200)
    with screen.capture() as captured:
        screen.print(StatusLine(cast(Client, Pipeline()), explains=True))
    assert captured.get().strip().endswith(f"0 tokens; {WHY}")


def test_the_status_line_tells_of_a_text_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(notes, "why_waiting_at", lambda client: "")
    screen = Console(width=200)
    with screen.capture() as captured:
        for tokens in (0, 1):
            line = StatusLine(cast(Client, Pipeline()), explains=True)
            if tokens:
                line.count(CHUNK)
            screen.print(line)
    before, after = captured.get().splitlines()
    assert before.strip().endswith("0 tokens")
    assert after.strip().endswith(f"1 tokens; {notes.SILENT}")
