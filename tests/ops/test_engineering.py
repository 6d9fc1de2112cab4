"""Formulas agree with the unit ones, simulations with formulas; timelines are complete."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.emulation.profiles import load
from flowspec.strategies import EXACT
from flowspec.strategies.expected_tbt import expected_tbt
from ops.bench import engineering
from ops.bench.engineering import (
    BAR,
    FORMULAS,
    GAPLESS,
    MeasuredRun,
    cells,
    predicted,
    timeline,
    waits,
)
from ops.bench.formulas import predicted as unit_predicted
from ops.bench.trace import TraceBench

UNITED = (
    "autoregressive",
    "naive_pp",
    "pipedec",
    "specpipe",
    "static_tree",
    "speculative",
    "chain",
    "pipespec",
)


@dataclass
class Counts:
    """The counts that ``ops.bench.formulas`` needs."""

    tokens: float
    rounds: float


@st.composite
def measurements(draw: st.DrawFn) -> MeasuredRun:
    """Measurements of a pipeline whose drafter is faster than its stages."""
    stages = draw(st.integers(1, 12))
    seconds = st.floats(0.5, 2)
    passes = tuple(draw(st.lists(seconds, min_size=stages, max_size=stages)))
    kept = tuple(draw(st.lists(st.floats(0, 0.1), min_size=stages + 1, max_size=stages + 1)))
    tokens = draw(st.floats(1, 20))
    links = tuple(one + draw(st.floats(0, 1)) for one in kept)
    return MeasuredRun(
        1.0, passes, links, kept, draw(st.floats(0.01, 0.2)), tokens, stages + 1, 20.0, tokens - 1
    )


@given(measurements())
def test_with_unit_passes_and_free_links_the_formulas_are_the_unit_ones(m: MeasuredRun) -> None:
    stages = len(m.passes)
    free = (0.0,) * (stages + 1)
    m = replace(m, passes=(1.0,) * stages, links=free, kept=free)
    m = replace(m, tokens=1.0, steps=0.0) if m.tokens < 1 + 1e-6 else m
    for strategy in UNITED:
        tokens = 1.0 if strategy == "autoregressive" else m.tokens
        expected = unit_predicted(strategy, stages, Counts(tokens, 1.0), m.draft)
        assert predicted(strategy, replace(m, tokens=tokens)) == pytest.approx(
            expected, rel=1e-6
        ), strategy


@given(measurements())
def test_a_layer_a_step_is_expected_tbt_where_the_groups_are_equal(m: MeasuredRun) -> None:
    stages = len(m.passes)
    first = m.passes[0]
    m = replace(
        m, passes=(first,) * stages, links=(0.0,) * (stages + 1), kept=(0.0,) * (stages + 1)
    )
    expected = expected_tbt(m.passes, m.hit, refill=stages - 1)
    for strategy in ("specpipe", "pipedec"):
        assert predicted(strategy, m) == pytest.approx(expected)


@given(measurements(), st.floats(0.1, 5))
def test_gaps_cost_time_and_nothing_else_counts_them(m: MeasuredRun, gap: float) -> None:
    late = replace(m, steps=m.steps + gap)
    for strategy in GAPLESS:
        assert predicted(strategy, late) == predicted(strategy, m)
        assert predicted(strategy, late, gaps=True) > predicted(strategy, m, gaps=True)
    for strategy in ("specpipe", "pipedec", "auto", "chain:window=1"):
        assert predicted(strategy, m, gaps=True) == pytest.approx(predicted(strategy, m))


def test_a_formula_is_of_an_exact_strategy() -> None:
    assert set(FORMULAS) <= set(EXACT)


@given(measurements())
def test_a_strategy_without_a_formula_has_dashes(m: MeasuredRun) -> None:
    """A closed form is optional for a new strategy."""
    name = "specpipe_lossy_relaxed"
    assert name not in FORMULAS
    assert predicted(name, m) is None
    assert cells(name, m) == [f"{m.seconds * 1e3:.2f}", "-", "-"]


@pytest.fixture(scope="module")
def bench() -> TraceBench:
    return TraceBench("slm", 20, 1, count=2)


@pytest.mark.parametrize(
    ("strategy", "low"),
    [
        ("autoregressive", 0.999),
        ("naive_pp", 0.99),
        ("static_tree", 0.99),
        ("speculative", 0.99),
        ("flowspec", 0.9),
    ],
)
def test_simulated_systems_are_at_their_formulas(
    bench: TraceBench, strategy: str, low: float
) -> None:
    m = MeasuredRun.of(*bench.run(strategy, load("jetson-7b"), 4))
    assert low < m.seconds / predicted(strategy, m) < 1.02


@pytest.mark.parametrize("profile", ["jetson-7b", "wan-25ms"])
@pytest.mark.parametrize(
    "strategy", ["naive_pp", "flowspec", "pipedec", "specpipe", "pipespec", "chain"]
)
def test_the_parts_of_a_wait_are_all_of_it(bench: TraceBench, strategy: str, profile: str) -> None:
    runs, traces = bench.run(strategy, load(profile), 4)
    for ran, trace in zip(runs, traces, strict=True):
        found = list(waits(trace))
        assert min(seconds for _, parts in found for seconds in parts.values()) > -1e-9
        assert sum(sum(parts.values()) for _, parts in found) == pytest.approx(
            ran.stats["decode_seconds"]
        )
        assert sum(verdict.tokens for verdict, _ in found) == ran.stats["tokens"] - 1
        assert (
            1 + sum(verdict.planted for verdict in trace.verdicts[2:])
            == ran.stats["rounds"]
            == trace.rounds
        )


def test_plain_decoding_spends_its_time_in_passes_and_on_links(bench: TraceBench) -> None:
    _, traces = bench.run("autoregressive", load("wan-25ms"), 4)
    parts = {line.split("|")[1].strip(): float(line.split("|")[4]) for line in timeline(traces)[2:]}
    assert set(parts) == {"links", "a pass of the last stage", "passes of earlier stages", "all"}
    assert 125 < parts["links"] < 135, "five hops of 25 ms each, and one row's time"
    assert parts["all"] == pytest.approx(sum(parts.values()) - parts["all"], abs=0.02)


def test_the_table_has_a_row_a_cell_and_a_timeline_for_each_above_the_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "engineering --profiles jetson-7b,wan-100ms --strategies autoregressive,pipedec"
    words += " --tokens 12 --count 1"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--timeline"])
    engineering.main()
    printed = capsys.readouterr().out
    table = [line.split("|")[1:-1] for line in printed.splitlines() if line.count("|") == 8][2:]
    assert [(row[0].strip(), row[2].strip()) for row in table] == [
        (profile, strategy)
        for profile in ("jetson-7b", "wan-100ms")
        for strategy in ("autoregressive", "pipedec")
    ]
    over = [float(row[5]) for row in table]
    assert over[0] == over[2] == pytest.approx(1, abs=0.001)
    assert printed.count("of its formula") == sum(ratio > BAR for ratio in over) > 0
