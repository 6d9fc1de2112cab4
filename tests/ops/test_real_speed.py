"""What free drafts gain, what the tables show, and what is read from llama.cpp's tool."""

from __future__ import annotations

import itertools
import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.errors import ClusterError
from ops.bench import real_speed
from ops.bench.free_drafts import best_length, expected_tokens, rounds
from ops.bench.real_speed import hits, typical_seeds
from ops.bench.real_table import (
    DRAFTED,
    PLAIN,
    Drafts,
    Linked,
    Ours,
    drafted_table,
    passes_table,
    plain_table,
    software_table,
    whole_table,
)
from ops.peer.batches import parsed

rights = st.lists(st.booleans(), min_size=1, max_size=40)
lengths = st.integers(1, 16)
SEVEN_OF_TEN = [True] * 7 + [False] * 3


@given(rate=st.floats(0, 1), length=st.integers(1, 8))
def test_expected_tokens_are_those_of_all_outcomes(rate: float, length: int) -> None:
    expected = 0.0
    for outcome in itertools.product([True, False], repeat=length):
        chance = math.prod(rate if right else 1 - rate for right in outcome)
        accepted = next((at for at, right in enumerate(outcome) if not right), length)
        expected += chance * (accepted + 1)
    assert expected_tokens(rate, length) == pytest.approx(expected)


@given(right=rights, length=lengths)
def test_rounds_are_between_those_of_perfect_and_of_useless_drafts(
    right: list[bool], length: int
) -> None:
    least = math.ceil(len(right) / (length + 1))
    assert least <= rounds(right, length) <= len(right)
    assert rounds([True] * len(right), length) == least
    assert rounds([False] * len(right), length) == len(right)


@given(right=rights, length=lengths)
def test_longer_drafts_need_no_more_rounds(right: list[bool], length: int) -> None:
    assert rounds(right, length + 1) <= rounds(right, length)


def test_the_best_length_weighs_rows_and_drafting() -> None:
    flat = dict.fromkeys(range(1, 18), 0.1)
    every = range(1, 17)

    def gain(length: int) -> float:
        return expected_tokens(0.7, length)

    assert best_length(flat, gain, every) == (16, pytest.approx(0.1 / gain(16)))
    steep = {rows: 0.1 * rows for rows in range(1, 18)}
    assert best_length(steep, gain, every)[0] == 1
    assert best_length(flat, gain, every, 0.02)[0] < 16


def test_typical_seeds_have_nearly_the_rate() -> None:
    prompt = tuple(range(15))
    seeds = typical_seeds(prompt, 24, 0.7, 3)
    assert len(set(seeds)) == 3
    for seed in seeds:
        assert sum(hits(prompt, 24, 0.7, seed)) == 16


@given(st.lists(st.tuples(st.integers(1, 99), st.floats(1, 9), st.integers(1, 9)), min_size=1))
def test_times_of_passes_are_read_from_the_tool(lines: list[tuple[int, float, int]]) -> None:
    said = "".join(
        json.dumps({"pl": rows, "t_tg": seconds, "tg": passes}) + "\n"
        for rows, seconds, passes in lines
    )
    found = parsed(f"\n{said}\n")
    assert found == {rows: seconds / passes for rows, seconds, passes in lines}


def test_a_tool_without_times_is_an_error() -> None:
    with pytest.raises(ClusterError, match="printed no times"):
        parsed("no lines\n")


@pytest.fixture
def ours() -> dict[tuple[str, Linked], Ours]:
    def one(plain: float) -> Ours:
        times = {PLAIN: [plain, plain, 9 * plain], **{name: [plain / 2] for name in DRAFTED}}
        return Ours(times, [0.8 * plain], {"verify-1": [0.01], "verify-2": [0.02], "broker": [0.1]})

    return {
        (dtype, Linked(stages, latency)): one(0.06)
        for dtype in ("bfloat16", "nf4")
        for stages in (1, 2)
        for latency in (0.0, 5.0)
    }


@pytest.fixture
def theirs() -> dict[Linked, list[dict[int, float]]]:
    passes = {1: 0.05, 2: 0.06, 4: 0.07}
    places = [Linked(0, 0.0), *(Linked(stages, ms) for stages in (1, 2) for ms in (0.0, 5.0))]
    return {place: [passes] for place in places}


def rows_of(lines: list[str]) -> list[list[str]]:
    """The cells of a table's rows, after its head; all rows have the head's number of cells."""
    assert len({line.count("|") for line in lines}) == 1
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_plain_decoding_is_beside_theirs_at_equal_bits(
    ours: dict[tuple[str, Linked], Ours], theirs: dict[Linked, list[dict[int, float]]]
) -> None:
    rows = rows_of(list(plain_table(ours, theirs, ["nf4"])))
    assert rows[0] == ["whole", "0 ms", "50.0", "60.0", "1.20"]
    assert rows[4] == ["2", "5 ms", "50.0", "60.0", "1.20"]


def test_drafts_of_theirs_are_the_best_measured_length(
    ours: dict[tuple[str, Linked], Ours], theirs: dict[Linked, list[dict[int, float]]]
) -> None:
    drafts = Drafts(0.7, [SEVEN_OF_TEN])
    rows = rows_of(list(drafted_table(ours, theirs, ["nf4"], drafts)))
    expected = 70 / (1 + 0.7 + 0.49 + 0.343)
    drawn = 70 * rounds(SEVEN_OF_TEN, 3) / 10
    assert rows[1] == [
        *("1", "0 ms", f"{expected:.1f}, k = 3", f"{drawn:.1f}, k = 3"),
        *("30.0", "30.0", f"{drawn / 30:.2f}"),
    ]


def test_the_other_tables_have_a_row_for_each_place(
    ours: dict[tuple[str, Linked], Ours], theirs: dict[Linked, list[dict[int, float]]]
) -> None:
    whole = rows_of(list(whole_table(ours, 0.12, "bfloat16")))
    assert [row[-1] for row in whole] == ["0.50"] * 4
    assert len(rows_of(list(passes_table(theirs)))) == 5
    software = rows_of(list(software_table(ours)))
    assert software[0] == ["bfloat16", "1", "0 ms", "60.0", "48.0", "12.0", "30.0", "0.0", "100.0"]


def test_an_unknown_precision_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["real_speed", "--busy", "--dtypes", "nf5"])
    with pytest.raises(SystemExit) as ended:
        real_speed.main()
    assert str(ended.value).startswith("real_speed: --dtypes 'nf5'; expected some of float32")
