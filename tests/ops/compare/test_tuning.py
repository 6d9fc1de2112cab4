"""Tuning: what it finds is no slower than the default on the prompts it used, and reproducible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest

from flowspec.errors import ConfigError
from flowspec.rehearse.compare.grid import BenchPlan, Grid
from flowspec.rehearse.compare.prompts import Prompt
from flowspec.rehearse.compare.report import ReportRow
from flowspec.rehearse.devices.profiles import load
from ops.compare import tuning
from ops.compare.search import Space
from ops.compare.tuning import Effort, Tuned, Tuner
from ops.compare.tuning_report import paired, tuning_header, tuning_markdown

pytestmark = pytest.mark.heavy
PLAN = BenchPlan(
    load("jetson-7b"),
    ("static_tree", "pipespec:window=4", "auto"),
    ("ngram", "slm:ngram"),
    (0.0, 1.0),
    (2,),
    8,
)
TUNING = [Prompt("a", "Who wrote the first program?"), Prompt("b", "Count to ten: one, two")]
MEASURING = [Prompt("a", "Why is the sky blue?"), Prompt("b", "Name three rivers.")]
EFFORT = Effort(configurations=6, few=1, finalists=2)


@pytest.fixture(scope="module")
def tuner() -> Tuner:
    return Tuner(Grid(PLAN, TUNING), EFFORT)


@pytest.fixture(scope="module")
def tuned(tuner: Tuner) -> list[Tuned]:
    cells = tuner.grid.cells()
    return tuner.run({cell: cells[cell] for cell in cells if cell.strategy in PLAN.strategies[:2]})


@pytest.fixture(scope="module")
def rows(tuned: list[Tuned]) -> list[ReportRow]:
    grid = Grid(PLAN, MEASURING)
    cells = grid.cells()
    return grid.run({**cells, **{one.measured: cells[one.cell] for one in tuned}})


def test_what_is_found_is_the_fastest_finalist_and_the_default_is_one(tuned: list[Tuned]) -> None:
    assert len(tuned) == 2 * 2 * 2
    for one in tuned:
        assert one.cell.strategy in one.finalists
        assert one.finalists[one.strategy] == min(one.finalists.values())
        assert len(one.finalists) <= EFFORT.finalists + 1
        assert one.configurations <= EFFORT.configurations
        assert one.measured.strategy == one.strategy
    assert any(one.strategy != one.cell.strategy for one in tuned)


def test_a_search_begins_as_warm_as_the_measurement(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs: dict[str, float] = {}

    def search(space: Space, cost: Callable[[str], float], most: int) -> dict[str, float]:
        costs[space.text(space.starts[0])] = cost(space.text(space.starts[0]))
        return costs

    monkeypatch.setattr(tuning, "search", search)
    cell = next(cell for cell in tuner.grid.cells() if cell.strategy == "auto")
    (one,) = Tuner(tuner.grid, replace(EFFORT, few=len(TUNING))).run({cell: "ngram"})
    assert costs == one.finalists
    assert len(costs) == 1


def test_the_same_prompts_give_the_same_options(tuner: Tuner, tuned: list[Tuned]) -> None:
    again = Tuner(Grid(PLAN, TUNING), EFFORT).run({tuned[0].cell: "ngram"})
    assert again == [tuned[0]]


def test_a_header_has_a_row_per_tuned_cell_and_pairs_it_with_the_reference(
    tuner: Tuner, tuned: list[Tuned], rows: list[ReportRow]
) -> None:
    found = tuning_header(tuner, tuned, rows, "auto")
    assert len(found["rows"]) == len(tuned)
    assert found["prompts"]["count"] == len(TUNING)
    assert found["searched"].keys() == {"static_tree", "pipespec:window=4"}
    assert "window" not in found["searched"]["pipespec:window=4"]["values"]
    for entry in found["rows"]:
        (auto,) = (
            row
            for row in rows
            if row.strategy == "auto"
            and (row.source, row.temperature) in [(s, entry["temperature"]) for s in sources(entry)]
        )
        (own,) = (
            row
            for row in rows
            if (row.strategy, row.source.partition(",")[0], row.temperature)
            == (entry["found"], entry["source"].partition(",")[0], entry["temperature"])
        )
        (default,) = (
            row
            for row in rows
            if (row.strategy, row.source.partition(",")[0], row.temperature)
            == (entry["strategy"], entry["source"].partition(",")[0], entry["temperature"])
        )
        gained = [own.speeds[at] / default.speeds[at] for at in own.speeds]
        assert entry["gained"]["median"] == pytest.approx(median(gained))
        assert entry["ratios"] == {at: auto.speeds[at] / own.speeds[at] for at in own.speeds}
        assert min(entry["ratios"].values()) <= entry["ratio"]["median"]
    lines = "\n".join(tuning_markdown(found))
    assert all(one.strategy in lines for one in tuned)
    assert "default over found (95%) | found over auto (95%)" in lines


def test_a_search_on_fewer_prompts_than_it_wants_says_how_many(
    tuner: Tuner, tuned: list[Tuned], rows: list[ReportRow]
) -> None:
    found = tuning_header(tuner, tuned, rows, None)
    found["prompts"]["count"] = 1
    assert "1 prompt (1, 3, ... of each set): at most" in tuning_markdown(found)[0]
    assert "configurations on 1 of them" in tuning_markdown(found)[0]


def sources(entry: dict[str, str]) -> list[str]:
    """Sources of the reference that a row with the entry's source is compared with."""
    first = entry["source"].partition(",")[0]
    return [{"slm": "slm:ngram"}.get(first, first)]


def test_without_a_reference_there_are_no_ratios(
    tuner: Tuner, tuned: list[Tuned], rows: list[ReportRow]
) -> None:
    found = tuning_header(tuner, tuned, rows, None)
    assert {entry["ratio"] for entry in found["rows"]} == {None}
    assert "found over" not in "\n".join(tuning_markdown(found))
    assert paired(rows[0], rows, "chain") is None


@pytest.mark.parametrize(
    ("source", "sources", "paired_with"),
    [
        ("slm:ngram", ("-", "slm", "slm:ngram"), "slm:ngram"),
        ("slm", ("-", "slm:ngram", "slm"), "slm"),
        ("slm", ("ngram", "-", "slm:ngram"), "slm:ngram"),
        ("slm:ngram", ("-", "slm"), "slm"),
        ("slm,medium", ("-", "slm"), "slm"),
        ("slm", ("ngram", "-"), "-"),
        ("-", ("slm", "-"), "-"),
        ("-", ("slm", "slm:ngram"), None),
        ("slm", ("ngram",), None),
    ],
)
def test_a_row_is_paired_with_the_reference_of_the_nearest_source(
    rows: list[ReportRow], source: str, sources: tuple[str, ...], paired_with: str | None
) -> None:
    row = replace(rows[0], strategy="chain", source=source, speeds={0: 10.0, 2: 5.0})
    references = [
        replace(rows[0], strategy="other", source=its, speeds={0: 10.0 * number, 1: 1.0})
        for number, its in enumerate(sources, 1)
    ]
    wrong = [replace(one, temperature=0.5) for one in references]
    ratios = paired(row, [row, *wrong, *references], "other")
    assert ratios == (None if paired_with is None else {0: 1.0 + sources.index(paired_with)})


def test_no_prompts_to_tune_on_is_an_error() -> None:
    grid = Grid(PLAN, [Prompt("a", "word " * 2000)])
    with pytest.raises(ConfigError, match="no prompt is left"):
        Tuner(grid, EFFORT).run(grid.cells())
