"""Reports of comparisons: valid intervals, lossless files, and refusals in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.errors import ConfigError
from flowspec.rehearse.compare.report import (
    BenchReport,
    Estimate,
    ReportRow,
    compare,
    described,
    gaps,
    markdown,
    measured,
)
from flowspec.rehearse.compare.simulate import Ran

VALUES = st.lists(st.floats(0.1, 1e3), min_size=1, max_size=60)


def row(strategy: str = "flowspec", speed: float = 2.0, **changes: Any) -> ReportRow:
    speeds = {at: speed + at / 10 for at in range(6)}
    fields: dict[str, Any] = {
        "strategy": strategy,
        "source": "slm",
        "stages": 4,
        "temperature": 0.0,
        "swept": "",
        "latency_ms": 0.3,
        "mbit": 1000.0,
        "prompts": 6,
        "tokens": 48,
        "tbt": {"mean": 0.5, "p50": 0.4, "p99": 0.9},
        "tokens_per_second": Estimate.of(list(speeds.values())),
        "ttft_seconds": 0.2,
        "tokens_per_step": 0.5,
        "tokens_per_round": 3.0,
        "hit_rate": 0.7,
        "stage_busy": (0.5, 0.4, 0.3, 0.2),
        "rows": {"useful": 192, "wasted": 400, "void": 10},
        "draft_passes_per_token": 1.0,
        "draft_seconds_per_token": 0.05,
        "repeated_4grams": 0.05,
        "speeds": speeds,
        "speedup": Estimate(1.5),
        "speedups": dict.fromkeys(range(6), 1.5),
    }
    return ReportRow(**{**fields, **changes})


HEADER: dict[str, Any] = {
    "how": "simulated",
    "target": "aa",
    "drafts": {"slm": "bb"},
    "tokens": 8,
    "seed": 1,
    "temperatures": [0.0],
    "prompts": {
        "digest": "cc",
        "count": 6,
        "half": "all",
        "sets": {},
        "loops": 1,
        "no_loops": False,
    },
    "profile": {
        "name": "jetson-7b",
        "summary": "five boards",
        "models": "the packaged models",
        "source": "a paper",
        "way": "the broker is somewhere",
        "digest": "dd",
    },
    "machine": {"line": "2 cores", "digest": "ee"},
    "version": "0.1.0",
    "baseline": "autoregressive",
    "command": "c",
}


def write(file: Path, *rows: ReportRow, **changes: Any) -> Path:
    file.write_text(BenchReport({**HEADER, **changes}, rows or (row(),)).text(), encoding="utf-8")
    return file


@given(VALUES)
def test_an_interval_holds_the_median_and_is_as_narrow_as_order_statistics_allow(
    values: list[float],
) -> None:
    found = Estimate.of(values)
    count = len(values)
    assert found is not None and found.median == pytest.approx(np.median(values))
    if found.low is None or found.high is None:
        assert count < 6
        return
    assert found.low <= found.median <= found.high

    def outside(rank: int) -> float:
        """Probability that the true median is beyond the values of this rank from either end."""
        return 2 * sum(comb(count, at) for at in range(rank)) / 2**count

    ranks = [rank for rank in range(1, count // 2 + 1) if outside(rank) <= 0.05]
    assert (found.low, found.high) == (sorted(values)[ranks[-1] - 1], sorted(values)[-ranks[-1]])


def test_there_is_no_estimate_of_nothing() -> None:
    assert Estimate.of([]) is None


@given(st.lists(st.tuples(st.floats(0.01, 5), st.integers(1, 6)), min_size=2, max_size=20))
def test_waits_add_up_to_the_decode_time_and_there_is_one_a_token(
    steps: list[tuple[float, int]],
) -> None:
    times = np.cumsum([wait for wait, _ in steps]).tolist()
    counts = np.cumsum([count for _, count in steps]).tolist()
    found = gaps(Ran({}, tuple(zip(times, counts, strict=True))))
    assert len(found) == counts[-1] - 1
    assert sum(found) == pytest.approx(times[-1] - times[0])
    assert sum(wait > 0 for wait in found) == len(steps) - 1


def stats(tokens: int, seconds: float, busy: float) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "decode_seconds": seconds,
        "tokens_per_second": (tokens - 1) / seconds,
        "ttft_seconds": 0.5,
        "steps": seconds * 2,
        "rounds": 2,
        "hit_rate": 0.5,
        "stage_busy": [busy, busy / 2],
        "draft_passes": 4,
        "rows": {"useful": tokens, "wasted": 3, "void": 1},
        "draft_seconds": 0.2,
        "repeated_4grams": 0.1,
    }


def test_a_row_weighs_its_prompts_by_their_tokens_and_seconds() -> None:
    runs = {
        3: Ran(stats(5, 4.0, 0.9), ((1.0, 1), (2.0, 3), (5.0, 5))),
        7: Ran(stats(3, 1.0, 0.4), ((1.0, 1), (1.5, 2), (2.0, 3))),
    }
    found = measured(runs, ())
    assert found["tbt"]["mean"] == pytest.approx(5.0 / 6)
    assert found["speeds"] == {3: 1.0, 7: 2.0}
    assert found["tokens_per_second"].median == 1.5
    assert found["stage_busy"] == pytest.approx(((0.9 * 4 + 0.4) / 5, (0.45 * 4 + 0.2) / 5))
    assert found["rows"] == {"useful": 8, "wasted": 6, "void": 2}
    assert found["draft_passes_per_token"] == pytest.approx(8 / 6)
    assert found["tokens_per_step"] == pytest.approx(6 / 10)


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    rows = (
        row(),
        row("autoregressive", 1.0, source="-", speedup=None, tokens_per_second=None),
        row("auto", source="slm:head", drafts={"slm": 30, "head": 12}),
    )
    loaded = BenchReport.load(write(tmp_path / "run.json", *rows))
    assert loaded.rows == rows
    assert loaded.header == json.loads(json.dumps(HEADER))


def test_a_file_from_before_drafts_were_counted_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "run.json")
    content = json.loads(file.read_text())
    del content["rows"][0]["drafts"]
    file.write_text(json.dumps(content))
    assert BenchReport.load(file).rows == (row(),)


def chosen(*changes: tuple[int, int], tokens: int) -> Ran:
    decisions = [
        {"segments": 1, "rows": 4},
        *({"tokens": at, "drafter": drafter} for at, drafter in changes),
    ]
    return Ran({**stats(tokens, 4.0, 0.9), "decisions": decisions}, ((1.0, 1), (2.0, tokens)))


def test_a_row_says_how_many_tokens_every_draft_was_used_for() -> None:
    runs = {0: chosen((0, 0), (24, 1), (48, 0), tokens=60), 1: chosen((0, 1), tokens=31)}
    found = measured(runs, ("slm", "head", "ngram"))
    assert found["drafts"] == {"slm": 24 + 11, "head": 24 + 30, "ngram": 0}
    assert (
        measured({0: Ran(stats(5, 4.0, 0.9), ((1.0, 1), (5.0, 5)))}, ("slm", "head"))["drafts"]
        == {}
    )


def test_a_row_announces_an_interval_where_it_has_one() -> None:
    named = dict(described(row(tokens_per_second=Estimate(5.0))))
    assert named["tokens/s"] == "5.00"
    named = dict(described(row(tokens_per_second=Estimate(5.0, 4.0, 6.0))))
    assert named["tokens/s (95%)"] == "5.00 (4.00 to 6.00)"


def test_drafts_are_named_below_the_table_where_there_was_a_choice() -> None:
    auto = row("auto", source="slm:head", drafts={"slm": 30, "head": 12})
    lines = markdown(BenchReport(HEADER, (row(), auto, replace(auto, stages=8)))).splitlines()
    at = lines.index("Tokens after each prompt's first by the draft used:")
    assert lines[at + 1 : at + 5] == [
        "",
        "- auto with slm:head on 4 stages, T 0, 0.3 ms, 1000 Mbit/s: slm 30, head 12",
        "- auto with slm:head on 8 stages, T 0, 0.3 ms, 1000 Mbit/s: slm 30, head 12",
        "",
    ]
    assert "by the draft used" not in markdown(BenchReport(HEADER, (row(),)))
    assert dict(described(auto))["tokens by draft"] == "slm 30, head 12"
    assert described(auto)[:-1] == [
        (name, value) for name, value in described(replace(auto, drafts={}))
    ]


def test_the_markdown_says_that_it_is_simulated_and_of_what() -> None:
    text = markdown(BenchReport(HEADER, (row(),)))
    assert "## jetson-7b, simulated" in text
    assert "none was measured on such a machine" in text
    assert "a paper" in text
    assert "6 prompts (all; 1 of them with loops, kept)" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1


def test_a_comparison_shows_ratios_prompt_by_prompt_and_rows_of_one_side(tmp_path: Path) -> None:
    faster = replace(row(), speeds={at: speed * 1.25 for at, speed in row().speeds.items()})
    old = write(tmp_path / "old.json", row(), row("chain"))
    new = write(tmp_path / "new.json", faster, row("auto"), version="0.2.0")
    text = compare(old, new)
    assert "version 0.1.0 to 0.2.0" in text
    assert "1.25 (1.25 to 1.25)" in next(line for line in text.splitlines() if "flowspec" in line)
    for name in ("chain", "auto"):
        assert next(line for line in text.splitlines() if f"| {name} " in line).endswith("| - |")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": "zz"}, "target: aa and zz"),
        ({"drafts": {"slm": "zz"}}, "draft models"),
        (
            {"prompts": {**HEADER["prompts"], "digest": "zz", "count": 4}},
            "prompts: count 6 digest cc and count 4",
        ),
        (
            {"profile": {**HEADER["profile"], "digest": "zz", "way": "another"}},
            "profile: name jetson-7b way the broker is somewhere digest dd and name jetson-7b way "
            "another digest zz",
        ),
        (
            {"profile": {**HEADER["profile"], "digest": "zz", "name": "other"}},
            "profile: name jetson-7b",
        ),
        ({"machine": {"line": "8 cores", "digest": "zz"}}, "machine: line 2 cores"),
        ({"tokens": 9}, "tokens: 8 and 9"),
        ({"how": "emulated"}, "kind of run: simulated and emulated"),
    ],
)
def test_runs_of_different_things_are_not_compared(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compare(write(tmp_path / "old.json"), write(tmp_path / "new.json", **change))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_drafters_only_one_side_has_and_a_profiles_wording_do_not_matter(tmp_path: Path) -> None:
    profile = {**HEADER["profile"], "summary": "in other words"}
    drafts = {"slm": "bb", "head": "ff"}
    assert compare(
        write(tmp_path / "old.json"), write(tmp_path / "new.json", drafts=drafts, profile=profile)
    )


@pytest.mark.parametrize(
    "spoil", [lambda text: text[:40], lambda text: "{}", lambda text: text.replace("tbt", "x")]
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    file = write(tmp_path / "run.json")
    file.write_text(spoil(file.read_text()))
    with pytest.raises(ConfigError, match=r"run\.json is no file written by"):
        BenchReport.load(file)
