"""The table at the end of a job."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from flowspec.cli.show import table
from flowspec.core.job.stats import Tally
from flowspec.results import Result


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


def test_the_time_to_the_first_token_says_how_much_of_it_was_queued() -> None:
    tally = Tally(submitted_at=1.0, started_at=3.5, queued_seconds=2.5)
    tally.count(1, 0, now=4.0)
    assert shown([], tally)["time to first token"] == "3.000 s, of which queued 2.500 s"
