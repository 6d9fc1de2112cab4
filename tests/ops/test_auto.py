"""The table of ``ops.bench.auto``: ``auto`` against the best of the others, tuned."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.emulation.profile import Profile
from flowspec.emulation.profiles import load
from flowspec.errors import ConfigError
from flowspec.testbed.report import ReportRow
from flowspec.testbed.tuning import Effort
from ops.bench import auto
from ops.bench.auto import (
    AUTO,
    BASELINE,
    COLUMNS,
    DRAFTS,
    TEMPERATURES,
    Inputs,
    Place,
    line_of,
    measure,
    prompts_in,
)

#: Seconds per token of two prompts by strategy.
SECONDS = {
    BASELINE: (0.09, 0.11),
    AUTO: (0.02, 0.04),
    "chain": (0.05, 0.07),
    "specpipe": (0.04, 0.06),
    "chain:window=3": (0.03, 0.05),
    "specpipe:width=8": (0.06, 0.03),
}
UNTUNED = ("chain", "specpipe")
TUNED = ("chain:window=3", "specpipe:width=8")


def row_of(strategy: str, seconds: tuple[float, ...]) -> ReportRow:
    speeds = {at: 1 / one for at, one in enumerate(seconds)}
    return ReportRow(
        strategy=strategy,
        source="-" if strategy == BASELINE else "slm",
        stages=4,
        temperature=1.0,
        swept="",
        latency_ms=0.3,
        mbit=1000.0,
        prompts=len(seconds),
        tokens=2 * len(seconds),
        tbt={"mean": sum(seconds) / len(seconds)},
        tokens_per_second=None,
        ttft_seconds=1.0,
        tokens_per_step=1.0,
        tokens_per_round=1.0,
        hit_rate=1.0,
        stage_busy=(1.0,),
        rows={},
        draft_passes_per_token=1.0,
        draft_seconds_per_token=1.0,
        repeated_4grams=0.0,
        speeds=speeds,
    )


PLACE = Place(
    1.0, "slm", {name: row_of(name, times) for name, times in SECONDS.items()}, UNTUNED, TUNED, {}
)


def folder_of(place: Path, *files: str) -> Path:
    """``place`` with four prompts per file."""
    for file in files:
        rows = [json.dumps({"prompt": f"What is {at} of {file}?"}) for at in range(4)]
        (place / f"{file}.jsonl").write_text("\n".join(rows))
    return place


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_a_row_has_the_best_before_and_after_tuning_and_pairs_it_with_auto() -> None:
    row = cells(line_of("wan-25ms, 4", PLACE))
    assert row == [
        *("wan-25ms, 4", "1", "slm", "100.0"),
        *("specpipe: 50.0", "chain:window=3: 40.0", "30.0", "1.33"),
        "1.38",  # the median of 1.5 and 1.25; no interval of two prompts
    ]
    assert len(row) == len(COLUMNS)


def test_a_bound_is_a_further_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "BOUNDS", {"bound": lambda grid, cell, source: 12.5})
    assert cells(line_of("wan-25ms, 4", replace(PLACE, bounds={"bound": 12.5})))[-1] == "12.5"


def test_prompts_are_a_half_of_the_first_of_every_file(tmp_path: Path) -> None:
    folder_of(tmp_path, "a", "b")
    measuring = prompts_in(tmp_path, 4, "measuring")
    assert len(measuring) == 4
    assert {prompt.set for prompt in measuring} == {"a", "b"}
    assert len(prompts_in(tmp_path, 2, "measuring")) == 2
    assert not set(measuring) & set(prompts_in(tmp_path, 4, "tuning"))


def test_every_temperature_and_draft_is_tuned_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "OTHERS", ("chain", "speculative"))
    monkeypatch.setattr(auto, "EFFORT", Effort(configurations=3, few=1, finalists=1))
    seen = []

    def bound(grid: object, cell: object, source: str) -> float:
        seen.append(source)
        return 1.0

    monkeypatch.setattr(auto, "BOUNDS", {"bound": bound})
    folder_of(tmp_path, "a")
    inputs = Inputs(prompts_in(tmp_path, 2, "tuning"), prompts_in(tmp_path, 2, "measuring"), 4)
    places = list(measure(load("jetson-7b"), inputs, least=1))
    assert [(place.temperature, place.draft) for place in places] == [
        (temperature, draft) for temperature in TEMPERATURES for draft in DRAFTS
    ]
    assert seen == list(DRAFTS) * len(TEMPERATURES)
    for place in places:
        assert set(place.untuned) == {"chain", "speculative"}
        assert place.rows.keys() == {BASELINE, AUTO, *place.untuned, *place.tuned}
        assert place.rows[BASELINE].tbt["mean"] == pytest.approx(0.266, abs=0.001)


def test_too_few_prompts_are_said(tmp_path: Path) -> None:
    folder_of(tmp_path, "a")
    inputs = Inputs([], prompts_in(tmp_path, 4, "measuring"), 4)
    with pytest.raises(ConfigError, match=r"of 2 measuring prompts .* expected 24 or more"):
        next(measure(load("jetson-7b"), inputs))


def test_the_table_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(profile: Profile, inputs: Inputs, least: int) -> Iterator[Place]:
        assert (len(inputs.tuning), len(inputs.measuring), inputs.tokens, least) == (1, 2, 8, 2)
        yield PLACE

    monkeypatch.setattr(auto, "measure", measured)
    flags: Mapping[str, str] = {
        "--prompts": str(folder_of(tmp_path, "a")),
        "--profiles": "jetson-7b,laptop-cpu",
        "--per-file": "4",
        "--tuning-per-file": "2",
        "--least": "2",
        "--tokens": "8",
    }
    words = [word for pair in flags.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["auto", *words])
    auto.main()
    table = [cells(line) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in table[2:]] == ["jetson-7b, 4", "laptop-cpu, 4"]
    assert {len(row) for row in table} == {len(COLUMNS)}


def test_an_unknown_profile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--prompts", str(folder_of(tmp_path, "a")), "--profiles", "nosuch"]
    monkeypatch.setattr(sys, "argv", ["auto", *words])
    with pytest.raises(SystemExit, match="flowspec: there is no profile 'nosuch'"):
        auto.main()
