"""The table of every system by place."""

from __future__ import annotations

from flowspec.rehearse.compare.grid import Grid
from flowspec.rehearse.compare.prompts import Prompt
from flowspec.rehearse.devices.profiles import load
from ops.bench.places import plan_of, tables

PROMPTS = [Prompt("a", "Say the alphabet."), Prompt("b", "Count to ten.")]


def test_every_system_has_a_line_with_each_source_and_a_column_for_each_link() -> None:
    profile = load("laptop-cpu")
    systems = ("autoregressive", "speculative", "auto")
    plan = plan_of(profile, systems, ("ngram", "head:ngram"), [0.0, 5.0], (0.0,), 8, 2)
    lines = tables(Grid(plan, PROMPTS))
    assert lines[1] == "### 2 stages, T = 0"
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    assert [cell.strip() for cell in rows[0]] == ["strategy", "draft", "0 ms", "5 ms"]
    assert [(strategy.strip(), draft.strip()) for strategy, draft, *_ in rows[1:]] == [
        ("autoregressive", "-"),
        ("speculative", "ngram"),
        ("auto", "ngram"),
        ("auto", "head:ngram"),
    ]
    plain = [float(cell.strip(" *").split(",")[0]) for cell in rows[1][2:]]
    assert plain[1] > plain[0] + 10.0  # two links of 5 ms
    assert sum("**" in cell for row in rows for cell in row) >= 2


def test_the_profile_of_smollm2_names_its_models() -> None:
    profile = load("ops/bench/smollm2-cpu.toml")
    assert profile.models["head"] == "smollm2-head"
    assert profile.models["target"].endswith(".gguf")
