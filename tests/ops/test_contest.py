"""Two sides in turn: order, choice, paired ratios, and what may be claimed of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.rehearse.compare.report import Estimate
from ops.peer.contest import Runs, Sides, System, run, turns, word
from ops.peer.llama import LlamaRun
from ops.peer.page import page, take
from ops.peer.prompts import PeerPrompt

PROMPTS = [PeerPrompt(f"p{at}", (at,), f"<p{at}>", expected="right") for at in range(12)]
TIMES = st.floats(0.001, 10.0)


def steady(seconds: float, text: str = "right and more") -> System:
    return lambda prompt: LlamaRun(text, seconds)


def sides(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Sides:
    return Sides(
        {name: steady(seconds) for name, seconds in ours.items()},
        {name: steady(seconds) for name, seconds in theirs.items()},
    )


def runs_of(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Runs:
    return Runs({"a": [*map(list, ours)], "b": [*map(list, theirs)]})


def ratio_of(ratios: Sequence[float]) -> Estimate:
    """The ratio of a side that takes 1 s to one that takes ``ratios`` by prompt."""
    return runs_of([[1.0]] * len(ratios), [[ratio] for ratio in ratios]).ratio("a", "b")


@given(count=st.integers(1, 6), turn=st.integers(0, 200))
def test_every_system_has_one_turn_and_the_sides_alternate(count: int, turn: int) -> None:
    ours = [f"ours {at}" for at in range(count)]
    theirs = [f"theirs {at}" for at in range(count)]
    order = turns(ours, theirs, turn)
    assert sorted(order) == sorted(ours + theirs)
    assert {name in ours for name in order[::2]} == {turn % 2 == 0}
    assert {name in ours for name in order[1::2]} == {turn % 2 == 1}


@given(count=st.integers(1, 5))
def test_no_pair_of_neighbours_and_no_first_place_is_favoured(count: int) -> None:
    ours = [f"ours {at}" for at in range(count)]
    theirs = [f"theirs {at}" for at in range(count)]
    orders = [turns(ours, theirs, turn) for turn in range(2 * count * count)]
    firsts = [order[0] for order in orders]
    assert {firsts.count(name) for name in ours + theirs} == {count}
    assert {frozenset(order[:2]) for order in orders} == {
        frozenset((one, other)) for one in ours for other in theirs
    }


@given(
    ratio=TIMES,
    drift=st.lists(st.lists(TIMES, min_size=3, max_size=3), min_size=1, max_size=14),
)
def test_drift_from_repeat_to_repeat_does_not_change_a_ratio(
    ratio: float, drift: list[list[float]]
) -> None:
    theirs = [[ratio * seconds for seconds in repeats] for repeats in drift]
    found = runs_of(drift, theirs).ratio("a", "b")
    assert found.median == pytest.approx(ratio)
    if found.low is not None:
        assert (found.low, found.high) == pytest.approx((ratio, ratio))


def test_a_ratio_is_the_median_over_prompts_of_the_median_over_repeats() -> None:
    ours = [[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]]
    theirs = [[2.0, 3.0, 90.0], [1.0, 2.0, 0.1]]
    found = runs_of(ours, theirs).ratio("a", "b")
    assert (found.median, found.low, found.high) == (2.0, None, None)  # 3 and 1


def test_the_interval_of_twelve_prompts_is_from_the_third_to_the_tenth() -> None:
    assert ratio_of([float(at) for at in range(1, 13)]) == Estimate(6.5, 3.0, 10.0)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1.1] * 12, "faster"),
        ([0.9] * 12, "slower"),
        ([1.0] * 12, "not distinguished"),
        ([0.9] * 3 + [2.0] * 9, "not distinguished"),
        ([0.9] * 2 + [2.0] * 10, "faster"),
        ([1.1] * 2 + [0.5] * 10, "slower"),
        ([5.0] * 5, "not distinguished"),  # too few for an interval
    ],
)
def test_only_an_interval_without_1_is_called_faster_or_slower(
    ratios: list[float], said: str
) -> None:
    assert word(ratio_of(ratios)) == said


def test_a_slow_prompt_does_not_decide_the_rank() -> None:
    runs = Runs({"even": [[1.0], [1.0], [100.0]], "quick": [[0.5], [0.5], [150.0]]})
    assert runs.ranked(["even", "quick"]) == ["quick", "even"]


def test_the_finalists_are_the_fastest_on_the_tuning_prompts() -> None:
    both = sides({"o1": 3.0, "o2": 1.0, "o3": 2.0}, {"t1": 1.0, "t2": 2.0, "t3": 3.0})
    taken = take(both, PROMPTS[:2], PROMPTS[2:], finalists=2, repeats=3)
    assert [*taken.finalists.ours] == ["o2", "o3"]
    assert [*taken.finalists.theirs] == ["t1", "t2"]
    assert {len(times) for times in taken.tuned.seconds.values()} == {2}
    assert taken.measured.seconds.keys() == {"o2", "o3", "t1", "t2"}
    assert {len(prompts) for prompts in taken.measured.seconds.values()} == {10}
    assert taken.measured.seconds["o3"] == [[2.0] * 3] * 10


def test_measuring_prompts_do_not_choose_the_finalists() -> None:
    def turncoat(prompt: PeerPrompt) -> LlamaRun:
        return LlamaRun("right", 9.0 if prompt in PROMPTS[:2] else 0.001)

    both = Sides({"late": turncoat, "even": steady(1.0)}, sides({}, {"t1": 1.0, "t2": 2.0}).theirs)
    taken = take(both, PROMPTS[:2], PROMPTS[2:], finalists=1, repeats=1)
    assert [*taken.finalists.ours] == ["even"]


def test_the_sides_run_in_turn_on_every_prompt_and_repeat() -> None:
    order: list[tuple[str, str]] = []

    def noted(name: str) -> Callable[[PeerPrompt], LlamaRun]:
        def decode(prompt: PeerPrompt) -> LlamaRun:
            order.append((name, prompt.text))
            return LlamaRun("right", 1.0)

        return decode

    both = Sides({"o1": noted("o1"), "o2": noted("o2")}, {"t1": noted("t1"), "t2": noted("t2")})
    heard: list[str] = []
    run(both, PROMPTS[:2], 3, heard.append)
    assert heard == ["prompt 1 of 2", "prompt 2 of 2"]
    assert [text for _, text in order] == ["p0"] * 12 + ["p1"] * 12
    for at in range(0, len(order), 2):
        assert {name[0] for name, _ in order[at : at + 2]} == {"o", "t"}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_page_lists_every_setting_the_finalists_and_all_their_ratios() -> None:
    both = sides({"o1": 0.003, "o2": 0.001, "o3": 0.002}, {"t1": 0.0015, "t2": 0.002, "t3": 0.004})
    both = Sides({**both.ours, "o1": steady(0.003, "wrong")}, both.theirs)
    lines = [*page(take(both, PROMPTS[:2], PROMPTS[2:], finalists=2, repeats=1))]
    rows = [cells(line) for line in lines]
    assert rows[2:5] == [
        ["o2", "1.00", "t1", "1.50"],
        ["o3", "2.00", "t2", "2.00"],
        ["o1", "3.00", "t3", "4.00"],
    ]
    assert rows[8:12] == [
        ["o2", "1.00", "1.00 to 1.00", "10/10"],
        ["o3", "2.00", "2.00 to 2.00", "10/10"],
        ["t1", "1.50", "1.50 to 1.50", "10/10"],
        ["t2", "2.00", "2.00 to 2.00", "10/10"],
    ]
    assert rows[15:19] == [
        ["o2", "t1", "1.50 (1.50 to 1.50)", "faster"],
        ["o2", "t2", "2.00 (2.00 to 2.00)", "faster"],
        ["o3", "t1", "0.75 (0.75 to 0.75)", "slower"],
        ["o3", "t2", "1.00 (1.00 to 1.00)", "not distinguished"],
    ]
    assert lines[-1].strip() == (
        "Best of ours against best of theirs: o2 against t1, 1.50 (1.50 to 1.50): faster. "
        "Same text: 24/26 runs of ours, 26/26 of theirs."
    )
