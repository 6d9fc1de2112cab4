"""The tables of ``ops.bench.auto``: the best of the others, and ``auto`` choosing its draft."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flowspec.emulation.profiles import load
from ops.bench import auto
from ops.bench.auto import (
    AUTO,
    BASELINE,
    CHOICE,
    DRAFTS,
    OTHERS,
    TEMPERATURES,
    line_of_best,
    line_of_draft,
    measure,
    prompts_in,
    times_at,
)

#: The first strategy with the first draft is the slowest, every next one a millisecond faster.
TIMES = {
    (name, draft): 40.0 - 6 * column - row
    for column, draft in enumerate(DRAFTS)
    for row, name in enumerate(OTHERS)
} | {(BASELINE, "-"): 99.96, (AUTO, "head"): 20.0, (AUTO, "slm"): 9.5, (AUTO, CHOICE): 10.0}


def folder_of(place: Path, *files: str) -> Path:
    """``place`` with four prompts per file."""
    for file in files:
        rows = [json.dumps({"prompt": f"What is {at} of {file}?"}) for at in range(4)]
        (place / f"{file}.jsonl").write_text("\n".join(rows))
    return place


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_a_row_has_every_time_and_the_best_of_the_others_over_auto() -> None:
    row = cells(line_of_draft("wan-25ms, 4", 1.0, "slm", TIMES))
    others = ["34.0", "33.0", "32.0", "31.0", "30.0", "29.0"]
    assert row == ["wan-25ms, 4", "1", "slm", "100.0", *others, "9.50", "3.05"]


def test_either_side_has_its_better_draft() -> None:
    row = cells(line_of_best("wan-25ms", 0.0, TIMES))
    assert row == [
        "wan-25ms",
        "0",
        "chain:window=1, slm: 29.0",
        "slm: 9.50",
        "3.05",
        "10.0, 2.90",
    ]


def test_prompts_are_the_measuring_half_of_the_first_of_every_file(tmp_path: Path) -> None:
    every = prompts_in(folder_of(tmp_path, "a", "b"), 4)
    few = prompts_in(tmp_path, 2)
    assert len(every) == 4
    assert {prompt.set for prompt in few} == {"a", "b"}
    assert len(few) == 2


def test_every_cell_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "OTHERS", ("chain",))
    rows = measure(load("jetson-7b"), prompts_in(folder_of(tmp_path, "a"), 2), 4)
    chosen = [(AUTO, draft) for draft in (*DRAFTS, CHOICE)]
    for temperature in TEMPERATURES:
        times = times_at(rows, temperature)
        assert set(times) == {(BASELINE, "-"), *(("chain", draft) for draft in DRAFTS), *chosen}
        assert times[BASELINE, "-"] == pytest.approx(266, abs=1)


def test_both_tables_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto, "measure", lambda profile, prompts, tokens: [])
    monkeypatch.setattr(auto, "times_at", lambda rows, temperature: TIMES)
    words = ["--prompts", str(folder_of(tmp_path, "a")), "--profiles", "jetson-7b,laptop-cpu"]
    monkeypatch.setattr(sys, "argv", ["auto", *words])
    auto.main()
    tables = [
        [cells(line) for line in table.splitlines()]
        for table in capsys.readouterr().out.split("\n\n")
    ]
    drafts, best = tables
    assert [row[:3] for row in drafts[2:]] == [
        [place, temperature, draft]
        for place in ("jetson-7b, 4", "laptop-cpu, 4")
        for temperature in ("0", "1")
        for draft in DRAFTS
    ]
    assert [len(row) for row in drafts] == [len(OTHERS) + 6] * 10
    assert [len(row) for row in best] == [6] * 6


def test_an_unknown_profile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--prompts", str(folder_of(tmp_path, "a")), "--profiles", "nosuch"]
    monkeypatch.setattr(sys, "argv", ["auto", *words])
    with pytest.raises(SystemExit, match="flowspec: there is no profile 'nosuch'"):
        auto.main()
