"""The tables of ``ops.bench.auto``: ``auto`` against the best of the others, tuned."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.errors import ConfigError
from flowspec.rehearse.compare.grid import Cell
from flowspec.rehearse.compare.report import ReportRow
from flowspec.rehearse.devices.profiles import load
from ops.bench import auto, auto_tuning
from ops.bench.auto import Matchup, Piece, prompts_in, take
from ops.bench.auto_table import AUTO, BASELINE, BEST_COLUMNS, COLUMNS, Place, tables
from ops.bench.auto_tuning import Found
from ops.compare.tuning import Effort, Tuned, Tuner

#: Seconds per token of two prompts by strategy.
SECONDS = {
    BASELINE: (0.09, 0.11),
    AUTO: (0.02, 0.04),
    "chain": (0.05, 0.07),
    "specpipe": (0.04, 0.06),
    "chain:window=3": (0.03, 0.05),
    "specpipe:width=8": (0.06, 0.03),
}
OTHERS = ("chain", "speculative")
EFFORT = Effort(configurations=3, few=1, finalists=1)


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
        tokens=11 * len(seconds),
        tbt={"mean": sum(seconds) / len(seconds)},
        tokens_per_second=None,
        ttft_seconds=1.0,
        tokens_per_step=1.0,
        tokens_per_round=1.0,
        hit_rate=0.875,
        stage_busy=(1.0,),
        rows={"useful": 80, "wasted": 60, "void": 20},
        draft_passes_per_token=1.5,
        draft_seconds_per_token=1.0,
        repeated_4grams=0.0,
        speeds=speeds,
    )


PLACE = Place(
    "wan-50ms",
    4,
    1.0,
    "slm",
    {name: row_of(name, times) for name, times in SECONDS.items()},
    ("chain", "specpipe"),
    ("chain:window=3", "specpipe:width=8"),
    0.02,
)
FOUND = Found(
    "wan-50ms",
    4,
    1.0,
    "slm",
    "chain",
    "chain:window=3",
    9,
    8,
    {"chain": 0.06, "chain:window=3": 0.04},
)


def folder_of(place: Path, *files: str) -> Path:
    """``place`` with four prompts per file."""
    for file in files:
        rows = [json.dumps({"prompt": f"What is {at} of {file}?"}) for at in range(4)]
        (place / f"{file}.jsonl").write_text("\n".join(rows))
    return place


def request_of(folder: Path) -> Matchup:
    return Matchup(
        [load("jetson-7b"), load("a100-70b")],
        prompts_in(folder, 2, "tuning"),
        prompts_in(folder, 2, "measuring"),
        4,
        others=OTHERS,
        effort=EFFORT,
        least=1,
    )


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_a_row_has_the_best_before_and_after_tuning_and_pairs_it_with_auto() -> None:
    lines = [cells(line) for line in tables([PLACE], [FOUND], EFFORT, 11) if line.startswith("|")]
    assert lines[0] == [*COLUMNS]
    assert lines[2] == [
        *("wan-50ms, 4", "1", "slm", "100.0"),
        *("specpipe: 50.0", "chain:window=3: 40.0", "30.0", "1.33"),
        "1.38",  # the median of 1.5 and 1.25; no interval of two prompts
        *("0.88", "2.0", "1.50", "20.0", "1.50"),
    ]


def test_the_second_table_takes_the_better_draft_for_either_side() -> None:
    faster = {AUTO: row_of(AUTO, (0.01, 0.03)), "chain:window=3": row_of("chain:window=3", (1, 1))}
    head = replace(PLACE, draft="head", rows={**PLACE.rows, **faster}, tuned=("chain:window=3",))
    lines = [
        cells(line) for line in tables([head, PLACE], [FOUND], EFFORT, 11) if line.startswith("|")
    ]
    assert lines[4] == [*BEST_COLUMNS]
    assert lines[6:] == [
        ["wan-50ms", "1", "slm, chain:window=3: 40.0", "head: 20.0", "2.00", "2.33"]
    ]


def test_the_page_says_on_how_many_prompts_and_where_the_options_are() -> None:
    text = "\n".join(tables([PLACE], [FOUND], EFFORT, 11))
    assert "of 2 texts of up to 11 tokens" in text
    assert "the best of 9 configurations" in text
    assert "on 1 of 8 other prompts" in text
    assert "9 configurations per system and place, each on 1 of the tuning" in text
    assert "chosen on the tuning prompts" in text
    assert "a bound only up to how it cuts segments" in text
    assert "x.json" not in text
    assert "`x.json`" in "\n".join(tables([PLACE], [FOUND], EFFORT, 11, "x.json"))


def test_prompts_are_a_half_of_the_last_of_every_file(tmp_path: Path) -> None:
    folder_of(tmp_path, "a", "b")
    measuring = prompts_in(tmp_path, 4, "measuring")
    assert len(measuring) == 4
    assert {prompt.set for prompt in measuring} == {"a", "b"}
    assert len(prompts_in(tmp_path, 2, "measuring")) == 2
    for tuning in (1, 2, 3, 4):
        assert not set(measuring) & set(prompts_in(tmp_path, tuning, "tuning"))


@pytest.mark.heavy
def test_every_profile_is_tuned_and_measured_and_known_options_are_not_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(folder_of(tmp_path, "a"))
    first = take(request, (1.0, "slm"))
    assert [(one.profile, one.strategy) for one in first.found] == [
        (profile.name, other) for profile in request.profiles for other in OTHERS
    ]
    for place, profile in zip(first.places, request.profiles, strict=True):
        assert (place.profile, place.stages) == (profile.name, profile.stages[0])
        assert set(place.untuned) == set(OTHERS)
        assert place.rows.keys() == {BASELINE, AUTO, *place.untuned, *place.tuned}
        assert {row.source for row in place.rows.values()} == {"-", "slm"}  # no middle model
        assert 0 < place.bound <= place.auto.tbt["mean"]
    assert first.places[0].rows[BASELINE].tbt["mean"] == pytest.approx(0.266, abs=0.001)
    monkeypatch.setattr(auto_tuning, "tune", None)
    assert take(replace(request, known=first.found), (1.0, "slm")) == first


def test_too_few_prompts_are_said_before_any_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_tuning, "tune", None)
    request = request_of(folder_of(tmp_path, "a"))
    with pytest.raises(ConfigError, match=r"of 1 measuring prompts .* expected 24 or more"):
        take(replace(request, least=24), (1.0, "slm"))


def test_a_profile_s_options_are_kept_though_a_later_one_s_search_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Tuner):
        def run(self, cells: Mapping[Cell, str]) -> list[Tuned]:
            if self.grid.plan.profile.name == "a100-70b":
                raise KeyboardInterrupt
            return super().run(cells)

    monkeypatch.setattr(auto_tuning, "Tuner", Failing)
    file = tmp_path / "tuned.json"
    request = replace(request_of(folder_of(tmp_path, "a")), least=0, tuned=file)
    with pytest.raises(KeyboardInterrupt):
        take(request, (0.0, "slm"))
    kept = auto_tuning.load(file, request.conditions, EFFORT)
    assert [(one.profile, one.strategy) for one in kept] == [("jetson-7b", its) for its in OTHERS]


def test_two_processes_keep_their_options_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    request = replace(
        request_of(folder_of(tmp_path, "a")),
        profiles=[load("jetson-7b")],
        others=("speculative",),
        least=0,
        tuned=file,
    )
    where = [(1.0, "slm"), (0.0, "slm")]
    taken = auto.taken(request, where, jobs=2)
    assert [(one.temperature, one.draft) for its in taken for one in its.found] == where
    kept = auto_tuning.load(file, request.conditions, EFFORT)
    assert sorted(one.place for one in kept) == sorted(its.found[0].place for its in taken)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only-tune"], "--only-tune needs --tuned"),
        (["--tuned", "{}/none/x.json"], "there is no folder .*/none"),
        (["--tuned", "{}"], "is a folder"),
    ],
)
def test_a_file_that_could_not_be_written_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    given = ["--prompts", str(folder_of(tmp_path, "a")), "--profiles", "wan-50ms"]
    monkeypatch.setattr(auto, "take", None)
    monkeypatch.setattr(sys, "argv", ["auto", *given, *(one.format(tmp_path) for one in words)])
    with pytest.raises(SystemExit, match=f"flowspec: .*{said}"):
        auto.main()


def test_options_are_kept_in_a_file_and_the_tables_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Sequence[Found], tuple[float, str]]] = []

    def taken(request: Matchup, where: tuple[float, str]) -> Piece:
        asked.append((request.known, where))
        found = replace(FOUND, temperature=where[0], draft=where[1])
        if found not in request.known and request.tuned is not None:
            auto_tuning.add(request.tuned, request.conditions, request.effort, [found])
        place = replace(PLACE, temperature=where[0], draft=where[1])
        return Piece([found], [place] if request.least else [])

    monkeypatch.setattr(auto, "take", taken)
    file = tmp_path / "tuned.json"
    words = ["--prompts", str(folder_of(tmp_path, "a")), "--profiles", "wan-50ms"]
    words += ["--tuned", str(file), "--temperatures", "0,1", "--drafts", "slm"]
    monkeypatch.setattr(sys, "argv", ["auto", *words, "--only-tune"])
    auto.main()
    assert file.exists()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "argv", ["auto", *words])
    auto.main()
    assert asked[:2] == [((), (0.0, "slm")), ((), (1.0, "slm"))]
    kept = [replace(FOUND, temperature=temperature) for temperature in (0.0, 1.0)]
    assert asked[2:] == [(kept, (0.0, "slm")), (kept, (1.0, "slm"))]
    lines = capsys.readouterr().out.splitlines()
    assert [cells(line)[1] for line in lines if line.startswith("| wan-50ms, 4")] == ["0", "1"]


def test_an_unknown_profile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--prompts", str(folder_of(tmp_path, "a")), "--profiles", "nosuch"]
    monkeypatch.setattr(sys, "argv", ["auto", *words])
    with pytest.raises(SystemExit, match="flowspec: there is no profile 'nosuch'"):
        auto.main()
