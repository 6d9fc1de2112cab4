"""A comparison's rows: every combination once, reproducible, with its baselines."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowspec.core.drafting.calibration import Calibration, Calibrations
from flowspec.core.run.history import History
from flowspec.core.session.stats import repeated_4grams
from flowspec.errors import ConfigError
from flowspec.model.base import DraftExecutor
from flowspec.model.weights.directory import default_pair, packaged
from flowspec.rehearse.compare import grid as module
from flowspec.rehearse.compare.grid import BenchPlan, Case, Cell, Grid, SweptLink, run_together
from flowspec.rehearse.compare.memo import MemoDrafter
from flowspec.rehearse.compare.naming import drafter_of, models_of
from flowspec.rehearse.compare.prompts import Prompt, halve
from flowspec.rehearse.compare.report import ReportRow
from flowspec.rehearse.compare.simulate import Ran
from flowspec.rehearse.devices.profile import LinkShape
from flowspec.rehearse.devices.profiles import load
from flowspec.rehearse.devices.way import Way
from flowspec.rehearse.simulator import Tap

PROFILE = load("jetson-7b")
NO_HEAD = replace(
    PROFILE, drafters={name: times for name, times in PROFILE.drafters.items() if name != "head"}
)
FAR = SweptLink("latency", LinkShape(0.05, PROFILE.link.bandwidth))
PROMPTS = [
    Prompt("a", "Who wrote the first computer program?"),
    Prompt("b", "Tell me about the moon. " * 400),
    Prompt("b", "Why is the sky blue?"),
]
PLAN = BenchPlan(
    PROFILE,
    ("naive_pp", "autoregressive", "chain:window=2"),
    ("slm", "ngram"),
    (0.0, 1.0),
    (2, 4),
    8,
    links=(FAR,),
)


@pytest.fixture(scope="module")
def grid() -> Grid:
    return Grid(PLAN, PROMPTS)


@pytest.fixture(scope="module")
def rows(grid: Grid) -> list[ReportRow]:
    return grid.run()


def key(row: ReportRow) -> tuple[Any, ...]:
    return (row.strategy, row.source, row.stages, row.temperature, row.swept)


def test_there_is_one_row_for_every_combination_and_plain_decoding_has_no_source(
    rows: list[ReportRow],
) -> None:
    drafting = itertools.product(
        ("naive_pp", "chain:window=2"), ("slm", "ngram"), (2, 4), (0.0, 1.0), ("", "latency")
    )
    plain = itertools.product(("autoregressive",), ("-",), (2, 4), (0.0, 1.0), ("", "latency"))
    assert sorted(map(key, rows)) == sorted([*drafting, *plain])


def test_a_prompt_that_does_not_fit_is_left_out_and_counted(
    grid: Grid, rows: list[ReportRow]
) -> None:
    assert grid.too_long == 1
    assert [prompt.set for prompt in grid.prompts] == ["a", "b"]
    assert {row.prompts for row in rows} == {2}


def test_speedups_are_over_plain_decoding_of_the_same_prompt_in_the_same_place(
    rows: list[ReportRow],
) -> None:
    plain = {key(row)[2:]: row for row in rows if row.strategy == "autoregressive"}
    for row in rows:
        base = plain[key(row)[2:]]
        assert row.speedups == {at: row.speeds[at] / base.speeds[at] for at in row.speeds}
        assert row.speedup is not None
        if row is base:
            assert set(row.speedups.values()) == {1.0}


def test_plain_decoding_takes_what_its_formula_says(rows: list[ReportRow]) -> None:
    for row in (row for row in rows if row.strategy == "autoregressive" and not row.swept):
        seconds = sum(
            PROFILE.stage_seconds(stage, row.stages, 1) for stage in range(1, row.stages + 1)
        )
        hops = (row.stages + 1) * PROFILE.link.latency
        assert row.tbt["mean"] == pytest.approx(seconds + hops, rel=0.01)
        assert row.tbt["mean"] == pytest.approx(row.tbt["p99"])
        assert row.rows == {
            "useful": (row.tokens - row.prompts) * row.stages,
            "wasted": 0,
            "void": 0,
        }
        assert row.draft_passes_per_token == 0


def test_a_longer_link_is_slower_for_every_strategy(rows: list[ReportRow]) -> None:
    near = {key(row)[:4]: row for row in rows if not row.swept}
    for row in (row for row in rows if row.swept):
        assert row.latency_ms == 50
        assert row.tbt["mean"] > near[key(row)[:4]].tbt["mean"]


@pytest.mark.heavy
def test_the_same_plan_gives_the_same_rows(grid: Grid, rows: list[ReportRow]) -> None:
    assert grid.run() == rows


@pytest.mark.heavy
def test_grids_on_several_profiles_give_the_rows_of_each_and_draft_a_node_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[MemoDrafter] = []

    def remembered(drafter: DraftExecutor) -> MemoDrafter:
        made.append(MemoDrafter(drafter))
        return made[-1]

    monkeypatch.setattr(module, "MemoDrafter", remembered)
    profiles = [PROFILE, load("wan-50ms")]
    plan = BenchPlan(PROFILE, ("chain:window=2", "static_tree"), ("slm",), (0.0,), (4,), 8)
    apart = [Grid(replace(plan, profile=profile), PROMPTS).run() for profile in profiles]
    passes = [memo.passes for memo in made]
    first = Grid(plan, PROMPTS)
    together = [first.on(profile) for profile in profiles]
    assert run_together([(grid, grid.cells()) for grid in together]) == apart
    assert len(made) == len(passes) + 1
    assert made[-1].passes < 0.7 * sum(passes)


@pytest.mark.parametrize("strategy", ["specpipe:width=auto", "naive_pp", "auto"])
def test_every_strategy_begins_with_what_an_unmeasured_run_of_the_last_prompt_taught(
    grid: Grid, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    cell = Cell(strategy, "slm", 3, 1.0, SweptLink("", PROFILE.link))
    cases = grid.cases_at(1.0)
    seen: list[tuple[int, History]] = []
    simulated = grid.simulate

    def watched(
        case: Case, cell: Cell, source: str, history: History, tap: Tap | None = None
    ) -> Ran:
        seen.append((case.number, history))
        return simulated(case, cell, source, history, tap)

    monkeypatch.setattr(grid, "simulate", watched)
    for case in cases:
        grid.trace(case, cell, "slm")
    assert [number for number, _ in seen] == [cases[-1].number, *(case.number for case in cases)]
    assert len({id(history) for _, history in seen}) == 1


@pytest.mark.parametrize(
    ("strategy", "source", "temperature", "learns"),
    [
        ("naive_pp", "slm", 1.0, True),  # a coupled draft is calibrated
        ("naive_pp:coupled=off", "slm", 1.0, False),
        ("naive_pp", "slm", 0.0, False),
        ("specpipe:width=auto", "slm", 0.0, True),
    ],
)
def test_a_job_uses_what_an_earlier_one_with_its_history_learnt(
    grid: Grid, strategy: str, source: str, temperature: float, learns: bool
) -> None:
    cell = Cell(strategy, source, 3, temperature, SweptLink("", PROFILE.link))
    case = grid.cases_at(temperature)[0]
    history = History()
    first = grid.simulate(case, cell, source, history)
    assert (grid.simulate(case, cell, source, history) != first) == learns
    assert grid.simulate(case, cell, source, History()) == first


@pytest.mark.parametrize(("source", "learns"), [("slm+ngram", True), ("slm", False)])
def test_merged_drafts_teach_what_the_next_job_begins_with(
    grid: Grid, source: str, learns: bool
) -> None:
    cell = Cell("specpipe:width=2", source, 3, 0.0, SweptLink("", PROFILE.link))
    history = History()
    grid.simulate(grid.cases_at(0.0)[0], cell, source, history)
    known = history.get(Calibrations).model(coupled=False, sampled=False)
    candidates = ([1, 2], [-0.5, -1.0], (0, 1))
    assert (known.expansion(*candidates) != Calibration().expansion(*candidates)) == learns


def test_the_header_names_what_was_used(grid: Grid) -> None:
    head = grid.header("flowspec bench", "all")
    assert head["how"] == "simulated"
    assert set(head["drafts"]) == {"slm"}  # a table in the text needs no model
    assert head["prompts"]["sets"] == {"0": "a", "1": "b"}
    assert (head["profile"]["name"], head["tokens"], head["command"]) == (
        "jetson-7b",
        8,
        "flowspec bench",
    )


def test_prompts_whose_greedy_text_repeats_itself_are_counted_and_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, grid: Grid
) -> None:
    shares = {
        case.number: repeated_4grams(case.text.output)
        for case in grid.cases
        if case.temperature == 0
    }
    monkeypatch.setattr(module, "LOOP", max(shares.values()))
    plan = replace(PLAN, temperatures=(1.0,))
    kept = Grid(plan, PROMPTS)
    left = Grid(replace(plan, no_loops=True), PROMPTS)
    looping = {number for number, share in shares.items() if share >= module.LOOP}
    assert kept.loops == left.loops == len(looping) > 0
    assert {case.number for case in kept.cases} == set(shares)
    assert {case.number for case in left.cases} == set(shares) - looping
    assert {case.temperature for case in kept.cases} == {1.0}


def test_nothing_left_to_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOP", 0.0)
    with pytest.raises(ConfigError, match="no prompt is left"):
        Grid(replace(PLAN, no_loops=True, temperatures=(0.0,)), PROMPTS[:1]).run()


def test_a_draft_source_is_the_packaged_drafter_of_that_name() -> None:
    draft, head = packaged("draft"), packaged("head")
    assert [
        drafter_of(name) for name in ("slm", "draft", "head", "slm+ngram", "head:slm+ngram")
    ] == [draft, draft, head, f"{draft}+ngram", f"{head}:{draft}+ngram"]


def test_a_profile_of_own_models_shows_their_text_and_acceptance() -> None:
    own = replace(PROFILE, models={"target": default_pair()[1]})
    grid = Grid(BenchPlan(own, ("chain",), ("ngram",), (0.0,), (2,), 8), PROMPTS[:1])
    packaged = Grid(BenchPlan(PROFILE, ("chain",), ("ngram",), (0.0,), (2,), 8), PROMPTS[:1])
    assert grid.cases[0].text.output != packaged.cases[0].text.output
    assert {row.strategy for row in grid.run()} == {"autoregressive", "chain"}
    header = grid.header("", "all")
    assert header["target"] != packaged.header("", "all")["target"]
    assert (header["drafts"], header["profile"]["models"]) == ({}, Path(default_pair()[1]).name)


def test_profiles_of_different_models_share_no_texts() -> None:
    grid = Grid(BenchPlan(PROFILE, ("chain",), ("ngram",), (0.0,), (2,), 8), PROMPTS[:1])
    with pytest.raises(ConfigError, match=r"profile mine is of draft, .*; run each by itself"):
        grid.on(replace(PROFILE, name="mine", models={"target": default_pair()[1]}))


def test_the_drafters_of_a_profile_of_own_models_are_its_own() -> None:
    own = replace(PROFILE, models={"target": default_pair()[1], "head": "mine"})
    assert drafter_of("head:ngram", models_of(own)) == "mine:ngram"
    with pytest.raises(ConfigError, match="'slm'; expected head, ngram"):
        BenchPlan(own, ("chain",))


def test_a_folder_called_as_a_packaged_model_does_not_stand_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("draft", "head"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    plan = BenchPlan(PROFILE, ("chain",), ("slm", "head"), (0.0,), (2,), 8)
    assert {row.source for row in Grid(plan, PROMPTS[:1]).run()} >= {"slm", "head"}


def test_who_does_not_choose_among_drafts_has_the_first_one() -> None:
    plan = BenchPlan(PROFILE, ("chain", "auto"), ("slm", "ngram:slm"), (0.0,), (2,), 8)
    rows = Grid(plan, PROMPTS[:1]).run()
    drafted = {(row.strategy, row.source): row for row in rows}
    assert set(drafted) == {
        ("autoregressive", "-"),
        ("chain", "slm"),
        ("chain", "ngram"),
        ("auto", "slm"),
        ("auto", "ngram:slm"),
    }
    choosing = drafted.pop(("auto", "ngram:slm"))
    assert list(choosing.drafts) == ["ngram", "slm"]
    assert sum(choosing.drafts.values()) == choosing.tokens - choosing.prompts
    assert not any(row.drafts for row in drafted.values())


@pytest.mark.parametrize(
    ("sources", "baseline", "strategy", "expected"),
    [
        (
            ("ngram:slm", "ngram"),
            "autoregressive",
            "auto",
            {("autoregressive", "-"), ("auto", "ngram:slm"), ("auto", "ngram")},
        ),
        (("ngram:slm",), "auto", "chain", {("auto", "ngram:slm"), ("chain", "ngram")}),
        (
            ("ngram:slm", "ngram:head"),
            "autoregressive",
            "chain",
            {("autoregressive", "-"), ("chain", "ngram")},
        ),
        (("slm", "draft"), "autoregressive", "chain", {("autoregressive", "-"), ("chain", "slm")}),
    ],
)
def test_every_row_is_run_once_and_has_a_baseline(
    sources: tuple[str, ...], baseline: str, strategy: str, expected: set[tuple[str, str]]
) -> None:
    told: list[tuple[int, int]] = []
    plan = BenchPlan(PROFILE, (strategy,), sources, (0.0,), (2,), 6, baseline=baseline)
    rows = Grid(plan, PROMPTS[:1], lambda _, done, of: told.append((done, of))).run()
    assert sorted((row.strategy, row.source) for row in rows) == sorted(expected)
    assert [done for done, of in told if of] == list(range(len(rows)))
    (base,) = {row.strategy: row for row in rows if row.strategy == baseline}.values()
    for row in rows:
        assert row.speedups == {at: speed / base.speeds[at] for at, speed in row.speeds.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strategies": ()}, "nothing to run"),
        ({"strategies": ("quick",)}, "unknown strategy 'quick'"),
        ({"sources": ("medusa",)}, "has no drafter 'medusa'"),
        ({"sources": ("slm:medusa",)}, "has no drafter 'medusa'"),
        ({"sources": ("slm:draft",)}, "names one drafter twice; .*; draft means slm"),
        ({"sources": ("slm+draft",)}, "names one drafter twice; .*; draft means slm"),
        ({"sources": ("slm:",)}, "has an empty name"),
        ({"profile": NO_HEAD, "sources": ("slm:head",)}, "no drafter 'head'"),
        ({"profile": NO_HEAD, "sources": ("slm:ngram+head",)}, "no drafter 'head'"),
        ({"baseline": "none"}, "unknown strategy 'none'"),
        ({"baseline": "naive_pp"}, "autoregressive drafts nothing .* baseline naive_pp"),
        ({"tokens": 1}, "tokens is 1"),
        ({"stages": (0,)}, "stages"),
        ({"profile": replace(PROFILE, way=Way("stage-9"))}, "at 'stage-9', but there are"),
        ({"temperatures": (-1.0,)}, "temperature is -1.0"),
        ({"half": "third"}, "the half is 'third'"),
    ],
)
def test_a_plan_that_cannot_be_run_says_why(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        if "half" in change:
            halve([], change["half"])
        replace(PLAN, **change)


def test_progress_counts_every_run(grid: Grid) -> None:
    told: list[tuple[int, int]] = []
    again = Grid(
        replace(PLAN, temperatures=(0.0,), sources=("ngram",)),
        PROMPTS,
        lambda _, done, of: told.append((done, of)),
    )
    again.run()
    runs = [(done, of) for done, of in told if of]
    assert [done for done, _ in runs] == list(range(runs[0][1]))
    assert runs[0][1] == 3 * 2 * 2 * 2  # strategies, stage counts, links, prompts


def test_a_chain_of_three_where_the_profile_has_a_middle_model() -> None:
    (row,) = [
        row
        for row in Grid(BenchPlan(load("a100-70b"), ("pipespec",), tokens=8), PROMPTS[:1]).run()
        if row.strategy == "pipespec"
    ]
    assert row.source == "slm,medium"
    assert row.rows["useful"] > 0
