"""The run behind the constants of ``auto``."""

from __future__ import annotations

import pytest

from flowspec.emulation.profiles import load
from flowspec.testbed.prompts import Prompt
from ops.bench.constants import DEFAULT, VARIANTS, Measured, Trial, measured, tables

PROMPTS = [Prompt("a", "Who wrote the first computer program?")]


def test_every_variant_runs_on_every_profile_and_a_steep_price_of_rows_tells() -> None:
    profiles = [load("laptop-cpu"), load("jetson-7b")]
    found = measured(Trial(profiles, PROMPTS, tokens=12, draft="slm"), 0.0)
    assert found.prompts == 1
    assert list(found.profiles) == ["laptop-cpu", "jetson-7b"]
    for times in found.profiles.values():
        assert set(times) == {DEFAULT, *VARIANTS}
        assert all(seconds > 0 for seconds in times.values())
    assert len(set(found.profiles["laptop-cpu"].values())) > 1, "an option that changes nothing"


def test_a_cell_is_the_default_over_the_value_and_the_mean_is_geometric() -> None:
    times = {DEFAULT: 0.08} | dict.fromkeys(VARIANTS, 0.04)
    slower = {DEFAULT: 0.08} | dict.fromkeys(VARIANTS, 0.32)
    page = "\n".join(tables([Measured(1.0, 5, {"one": times, "two": slower})], 64, "head"))
    assert "T = 1, 5 prompts:" in page
    for text in VARIANTS:
        (line,) = [one for one in page.splitlines() if one.startswith(f"| {text.split(':')[1]} |")]
        cells = [float(cell) for cell in line.split("|")[2:-1]]
        assert cells == pytest.approx([2.0, 0.25, 0.71], abs=0.005)
