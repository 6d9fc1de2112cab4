"""The clairvoyant: sends only the text's rows, and is no slower than any system that learns it."""

from __future__ import annotations

import pytest

from flowspec.core.run.history import History
from flowspec.rehearse.compare.grid import BenchPlan, Cell, Grid, SweptLink
from flowspec.rehearse.compare.prompts import Prompt
from flowspec.rehearse.devices.profiles import load
from flowspec.strategies import EXACT
from ops.bench.clairvoyant import NAME, Fastest, builder, searched, seconds_per_token

PROFILE = load("jetson-7b")
PROMPTS = [
    Prompt("a", "Who wrote the first computer program?"),
    Prompt("a", "Why is the sky blue?"),
]
#: Strategies with options that search other shapes than the defaults.
VARIANTS = ("specpipe:width=64,levels=3", "pipedec:barrier=off", "chain:window=4,in_flight=8")


def grid_of(draft: str, temperature: float, prompts: list[Prompt]) -> Grid:
    plan = BenchPlan(
        PROFILE, (*EXACT, *VARIANTS), (draft,), (temperature,), PROFILE.stages[:1], tokens=16
    )
    return Grid(plan, prompts)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("profile", "draft", "temperature"),
    [
        pytest.param("jetson-7b", "slm", 1.0, marks=pytest.mark.heavy),
        ("laptop-cpu", "slm", 0.0),
        pytest.param("wan-50ms", "head", 0.0, marks=pytest.mark.heavy),
    ],
)
def test_it_is_never_slower_than_a_registered_strategy(
    profile: str, draft: str, temperature: float
) -> None:
    grid = grid_of(draft, temperature, PROMPTS).on(load(profile))
    (bound,) = seconds_per_token([grid], draft)
    for row in grid.run():
        assert bound <= row.tbt["mean"] * (1 + 1e-9), row.strategy


@pytest.mark.heavy
@pytest.mark.parametrize("options", ["", "in_flight=1,holds=on,least=4", "most=1,redrafts=off"])
@pytest.mark.parametrize("draft", ["slm", "head"])
def test_every_row_it_sends_is_of_the_text(options: str, draft: str) -> None:
    grid = grid_of(draft, 1.0, PROMPTS[:1])
    (case,) = grid.cases
    cell = Cell(f"{NAME}:{options}", draft, 4, 1.0, SweptLink("", PROFILE.link))
    ran = grid.simulate(case, cell, draft, History(), make=builder(case.text))
    rows = ran.stats["rows"]
    assert (rows["wasted"], rows["void"]) == (0, 0)
    assert rows["useful"] == 4 * (len(case.text.output) - 1)


def test_of_every_text_the_fastest_run_counts() -> None:
    grid = grid_of("slm", 0.0, PROMPTS)
    fastest = Fastest(grid, "slm", 0.0)
    costs = [
        fastest.cost(f"{NAME}:{options}", grid.cases)
        for options in ("", "in_flight=1", "least=8,most=8")
    ]
    assert fastest.seconds_per_token <= min(costs)
    assert len(set(costs)) == 3


def test_what_only_matters_to_draft_heads_is_searched_for_them() -> None:
    assert "redrafts" in searched(hidden=True).values
    assert "redrafts" not in searched(hidden=False).values
