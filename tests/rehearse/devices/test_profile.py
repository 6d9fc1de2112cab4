"""A profile's arithmetic: passes by rows, layers by stage, bytes by what travels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import DRAFT, stage_address
from flowspec.core.protocol.messages import Answer, Close, Envelope, Prune, Segment
from flowspec.core.protocol.work import Draft, DraftPass, Encode, Part, Pass
from flowspec.core.run.key import RunKey
from flowspec.errors import ConfigError
from flowspec.rehearse.devices.profile import LinkShape, Profile, Times
from tests.addresses import D0, M1, S1, S2, S4

RUN = RunKey("j", 1)
ROWS = st.integers(1, 300)
SECONDS = st.floats(1e-6, 10)


@st.composite
def tables(draw: st.DrawFn) -> Times:
    rows = sorted(draw(st.sets(ROWS, min_size=1, max_size=6)))
    seconds = sorted(draw(st.lists(SECONDS, min_size=len(rows), max_size=len(rows))))
    return Times(tuple(zip(rows, seconds, strict=True)))


def make(
    layers: int = 12, layer: float = 1.0, head: float = 1.0, middles: tuple[Times, ...] = ()
) -> Profile:
    drafters = {"slm": Times(((1, 2.0), (3, 4.0))), "ngram": Times(((1, 0.5),))}
    link = LinkShape(0.25, 1000.0)
    times = Times(((1, layer), (11, 2 * layer))), Times(((1, head), (11, 2 * head)))
    return Profile("p", "", "", layers, 100, 2, *times, drafters, link, (4,), middles)


def part(rows: int, answers: int = 0) -> Part:
    ids = tuple(range(rows))
    return Part(
        run=RUN,
        segment=1,
        ids=ids,
        parents=ids,
        positions=ids,
        tokens=(),
        offsets=ids,
        answers=ids[rows - answers :],
    )


def segment(rows: int, *, tokens: bool) -> Envelope:
    ids = tuple(range(rows))
    return Envelope(D0, 1, Segment(RUN, 1, 1, ids, ids, ids, ids if tokens else ()))


def answer(rows: int, pairs: int = 0) -> Envelope:
    ids = tuple(range(rows))
    return Envelope(
        S4,
        1,
        Answer(RUN, 1, ids, ids, top=(((0, 0.0),) * pairs,) * rows if pairs else ()),
    )


# ---- times by rows -------------------------------------------------------------------------------


@given(tables(), ROWS)
def test_a_table_gives_its_points_and_never_falls(times: Times, rows: int) -> None:
    for known, seconds in times.points:
        assert times.at(known) == pytest.approx(seconds)
    assert times.at(rows) <= times.at(rows + 1) * (1 + 1e-12)
    assert times.at(1) == times.points[0][1]


@given(tables(), st.integers(2, 300))
def test_a_table_is_straight_between_and_beyond_its_points(times: Times, rows: int) -> None:
    first = times.points[0][0]
    inner = {known for known, _ in times.points[1:-1]}
    if rows > first and rows not in inner:
        bend = times.at(rows - 1) + times.at(rows + 1) - 2 * times.at(rows)
        assert bend == pytest.approx(0, abs=1e-9 * max(1.0, times.at(rows + 1)))


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((0, 1.0),),
        ((1, 1.0), (1, 2.0)),
        ((2, 1.0), (1, 2.0)),
        ((1, 2.0), (2, 1.0)),
        ((1, 0.0),),
        ((1, math.nan),),
    ],
)
def test_what_is_no_table_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigError, match="expected rising rows"):
        Times(points)


@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(-1.0, 1.0), (math.nan, 1.0), (0.0, 0.0), (0.0, math.nan)]
)
def test_what_is_no_link_is_refused(latency: float, bandwidth: float) -> None:
    with pytest.raises(ConfigError, match="latency"):
        LinkShape(latency, bandwidth)


# ---- layers by stage -----------------------------------------------------------------------------


@given(st.integers(1, 100), st.integers(1, 30), st.floats(0.01, 20))
def test_every_layer_is_on_one_stage_and_no_split_is_faster(
    layers: int, stages: int, head: float
) -> None:
    profile = make(layers, 1.0, head)
    split = [profile.stage_layers(stage, stages) for stage in range(1, stages + 1)]
    assert sum(split) == layers and min(split) >= 0
    before = split[:-1]
    assert before == sorted(before, reverse=True) and (not before or max(before) - min(before) <= 1)
    slowest = max(profile.stage_seconds(stage, stages, 1) for stage in range(1, stages + 1))
    for last in range(layers + 1) if stages > 1 else ():
        assert slowest <= max(math.ceil((layers - last) / (stages - 1)), last + head) + 1e-9


@given(st.integers(1, 40), st.integers(1, 12), ROWS)
def test_surplus_stages_cost_nothing_but_the_head(layers: int, surplus: int, rows: int) -> None:
    profile = make(layers)
    stages = layers + surplus
    costs = [profile.stage_seconds(stage, stages, rows) for stage in range(1, stages + 1)]
    assert costs[-1] == profile.head.at(rows)
    assert costs[:layers] == [profile.layer.at(rows)] * layers
    assert costs[layers:-1] == [0.0] * (surplus - 1)


@given(st.integers(1, 100), st.integers(1, 30), ROWS)
def test_the_whole_model_costs_the_same_however_it_is_split(
    layers: int, stages: int, rows: int
) -> None:
    profile = make(layers)
    whole = sum(profile.stage_seconds(stage, stages, rows) for stage in range(1, stages + 1))
    assert whole == pytest.approx(profile.stage_seconds(1, 1, rows))


@given(ROWS, st.data())
def test_the_head_is_charged_for_answered_rows_on_the_last_stage(
    rows: int, data: st.DataObject
) -> None:
    profile = make()
    answers = data.draw(st.integers(0, rows))
    layers = profile.stage_layers(4, 4) * profile.layer.at(rows)
    expected = layers + (profile.head.at(answers) if answers else 0.0)
    assert profile.work_seconds(S4, Pass((part(rows, answers),)), 4, "slm") == expected
    inner = profile.work_seconds(S2, Pass((part(rows, answers),)), 4, "slm")
    assert inner == profile.stage_layers(2, 4) * profile.layer.at(rows)


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_parts_of_one_pass_cost_as_one_part_of_all_their_rows(counts: list[int]) -> None:
    profile = make(middles=(Times(((1, 1.0), (2, 3.0))),))
    for node in (S1, S4, M1):
        parts = Pass(tuple(part(rows, rows) for rows in counts))
        whole = Pass((part(sum(counts), sum(counts)),))
        assert profile.work_seconds(node, parts, 4, "slm") == profile.work_seconds(
            node, whole, 4, "slm"
        )


# ---- drafters and middle models ------------------------------------------------------------------


@given(ROWS)
def test_drafters_of_a_hybrid_compute_one_after_another(rows: int) -> None:
    profile = make()
    both = profile.draft_seconds("slm+ngram", rows)
    assert both == profile.draft_seconds("slm", rows) + profile.draft_seconds("ngram", rows)
    work = DraftPass((Draft(part(rows), 4),))
    assert profile.work_seconds(D0, work, 4, "slm+ngram") == both


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1)), min_size=1, max_size=6))
def test_a_drafters_pass_for_several_runs_costs_what_its_rows_do(
    drafts: list[tuple[int, int]],
) -> None:
    profile = make()
    work = DraftPass(tuple(Draft(part(rows), 4, drafter=drafter) for rows, drafter in drafts))
    seconds = 0.0
    for number in range(2):
        if rows := sum(count for count, drafter in drafts if drafter == number):
            seconds += profile.draft_seconds("slm:ngram", rows, number)
    assert profile.work_seconds(D0, work, 4, "slm:ngram") == pytest.approx(seconds)


def test_reading_a_prompt_costs_nothing() -> None:
    assert make().work_seconds(D0, Encode(RUN, "text", raw=False), 4, "slm") == 0


def test_drafters_and_middle_models_a_profile_lacks_are_named() -> None:
    with pytest.raises(ConfigError, match="no drafter 'head'; expected one of: slm, ngram"):
        make().draft_seconds("slm+head", 1)
    with pytest.raises(ConfigError, match="0 middle models"):
        make().work_seconds(M1, Pass((part(1),)), 4, "slm")


@given(ROWS)
def test_each_of_several_drafters_costs_its_own_time(rows: int) -> None:
    profile = make()
    for number, alone in enumerate(("slm", "ngram", "slm+ngram")):
        seconds = profile.draft_seconds("slm:ngram:slm + ngram", rows, number)
        assert seconds == profile.draft_seconds(alone, rows)
        work = DraftPass((Draft(part(rows), 4, drafter=number),))
        assert profile.work_seconds(D0, work, 4, "slm:ngram:slm+ngram") == seconds


def test_every_choice_of_a_source_needs_times() -> None:
    make().check_source("slm:ngram:slm+ngram")
    for source in ("head", "slm:head", "slm:ngram+head"):
        with pytest.raises(ConfigError, match="no drafter 'head'"):
            make().check_source(source)


@pytest.mark.parametrize(
    "source", ["", "slm:", "slm+", "+", "slm:slm", "slm+slm", "ngram:slm+slm", "slm:ngram: slm"]
)
def test_a_source_that_is_no_list_of_drafters_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=r"an empty name|one drafter twice"):
        make().check_source(source)


@pytest.mark.parametrize("drafter", [-1, 2, 9])
def test_a_drafter_of_no_choice_is_refused(drafter: int) -> None:
    with pytest.raises(ConfigError, match=r"has no drafter number .*; expected 0 to 1"):
        make().draft_seconds("slm:ngram", 1, drafter)


@pytest.mark.parametrize("layers", [0, -1])
def test_a_model_without_layers_is_refused(layers: int) -> None:
    with pytest.raises(ConfigError, match="layers"):
        make(layers)


# ---- what travels --------------------------------------------------------------------------------


@given(ROWS, st.booleans(), st.booleans())
def test_bytes_grow_with_rows_and_equally_for_each(rows: int, tokens: bool, hidden: bool) -> None:
    profile = make()
    for to, messages in (
        (S1, [segment(count, tokens=tokens) for count in (rows, rows + 1, rows + 2)]),
        (DRAFT, [answer(count) for count in (rows, rows + 1, rows + 2)]),
    ):
        sizes = [profile.message_bytes(to, message, hidden=hidden) for message in messages]
        assert sizes[0] < sizes[1] < sizes[2]
        assert sizes[1] - sizes[0] == sizes[2] - sizes[1]


@given(ROWS)
def test_hidden_rows_are_charged_where_they_travel(rows: int) -> None:
    profile = make()
    carried = rows * profile.hidden * profile.value_bytes
    inner = segment(rows, tokens=False)
    first = segment(rows, tokens=True)
    for hidden in (False, True):
        sizes = [
            profile.message_bytes(stage_address(2), each, hidden=hidden) for each in (inner, first)
        ]
        assert sizes[0] - sizes[1] == carried
    back = [profile.message_bytes(DRAFT, answer(rows), hidden=hidden) for hidden in (True, False)]
    assert back[0] - back[1] == carried
    # A middle model's answers have no hidden rows.
    ours = replace(answer(rows), sender=M1)
    assert profile.message_bytes(DRAFT, ours, hidden=True) == back[1]
    # Its worker gets the verdict, without rows.
    assert profile.message_bytes(M1, answer(rows), hidden=True) == back[1]


@given(ROWS, st.integers(1, 5))
def test_returned_pairs_are_charged(rows: int, pairs: int) -> None:
    profile = make()
    more = profile.message_bytes(DRAFT, answer(rows, pairs)) - profile.message_bytes(
        DRAFT, answer(rows)
    )
    assert more == rows * pairs * (
        profile.message_bytes(DRAFT, answer(1, 1)) - profile.message_bytes(DRAFT, answer(1))
    )


@given(st.lists(st.integers(0, 99), max_size=9))
def test_every_message_takes_the_link_for_its_bytes(ids: list[int]) -> None:
    profile = make()
    prune = Envelope(D0, 1, Prune(RUN, 0, tuple(ids), 1, tuple(ids)))
    small = Envelope(D0, 1, Close(RUN))
    for message in (prune, small, segment(3, tokens=False)):
        seconds = profile.transfer_seconds(S2, message)
        assert seconds * profile.link.bandwidth == pytest.approx(profile.message_bytes(S2, message))
    assert profile.transfer_seconds(S2, prune) >= profile.transfer_seconds(S2, small) > 0


# ---- devices of different speeds -----------------------------------------------------------------

SPEEDS = st.lists(st.floats(0.25, 4.0), min_size=1, max_size=5).map(tuple)


@given(st.integers(1, 14), st.floats(0.1, 5.0), SPEEDS, st.integers(1, 5), ROWS)
def test_a_device_takes_its_share_of_the_time_by_its_speed(
    layers: int, head: float, speeds: tuple[float, ...], stages: int, rows: int
) -> None:
    profile = replace(make(layers, head=head), speeds=speeds)
    split = [profile.stage_layers(stage, stages) for stage in range(1, stages + 1)]
    assert sum(split) == layers
    for stage, own in enumerate(split, 1):
        whole = own * profile.layer.at(rows) + (profile.head.at(rows) if stage == stages else 0)
        speed = speeds[(stage - 1) % len(speeds)]
        assert profile.stage_seconds(stage, stages, rows) == pytest.approx(whole / speed)
        work = Pass((part(rows, rows),))
        found = profile.work_seconds(stage_address(stage), work, stages, "slm")
        assert found == profile.stage_seconds(stage, stages, rows)


@given(st.integers(1, 9), st.floats(0.1, 5.0), SPEEDS)
def test_no_split_has_a_faster_slowest_device(
    layers: int, head: float, speeds: tuple[float, ...]
) -> None:
    stages = min(len(speeds), 3)
    profile = replace(make(layers, head=head), speeds=speeds[:stages])

    def slowest(split: Sequence[int]) -> float:
        extra = [*[0.0] * (stages - 1), head]
        return max(
            (own + more) / speed for own, more, speed in zip(split, extra, speeds, strict=False)
        )

    others = (
        split
        for split in itertools.product(range(layers + 1), repeat=stages)
        if sum(split) == layers
    )
    best = [profile.stage_layers(stage, stages) for stage in range(1, stages + 1)]
    assert slowest(best) == pytest.approx(min(map(slowest, others)))


@given(st.integers(1, 20), st.integers(1, 8))
def test_equal_speeds_are_as_fast_as_none(layers: int, stages: int) -> None:
    plain = make(layers)
    equal = replace(plain, speeds=(1.0,))

    def slowest(profile: Profile) -> float:
        return max(profile.stage_seconds(stage, stages, 1) for stage in range(1, stages + 1))

    assert slowest(equal) == pytest.approx(slowest(plain))


@given(st.integers(1, 20), st.integers(1, 8))
def test_an_even_split_heeds_no_speed(layers: int, stages: int) -> None:
    profile = replace(make(layers), speeds=(1.0, 4.0), even_split=True)
    split = [profile.stage_layers(stage, stages) for stage in range(1, stages + 1)]
    assert sum(split) == layers
    assert max(split) - min(split) <= 1


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_speed_is_refused(speed: float) -> None:
    with pytest.raises(ConfigError, match="expected numbers above 0"):
        replace(make(), speeds=(1.0, speed))


# ---- a split that is given -----------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(sum), ROWS)
def test_a_given_split_is_the_stages_layers(split: list[int], rows: int) -> None:
    stages = len(split)
    profile = replace(make(sum(split)), split=tuple(split))
    assert [profile.stage_layers(stage, stages) for stage in range(1, stages + 1)] == split
    first = profile.stage_seconds(1, stages, rows, answers=0)
    assert first == pytest.approx(split[0] * profile.layer.at(rows))


@given(st.lists(tables(), min_size=1, max_size=5), ROWS, ROWS)
def test_a_block_is_timed_as_a_whole(blocks: list[Times], rows: int, answers: int) -> None:
    stages = len(blocks)
    profile = replace(make(stages), split=(1,) * stages, blocks=tuple(blocks))
    for stage, block in enumerate(blocks, start=1):
        head = profile.head.at(answers) if stage == stages else 0.0
        found = profile.stage_seconds(stage, stages, rows, answers)
        assert found == pytest.approx(block.at(rows) + head)


@given(st.integers(1, 20), st.integers(1, 8), ROWS)
def test_the_chosen_split_given_changes_nothing(layers: int, stages: int, rows: int) -> None:
    profile = make(layers)
    own = tuple(profile.stage_layers(stage, stages) for stage in range(1, stages + 1))
    given_it = replace(profile, split=own)
    for stage in range(1, stages + 1):
        expected = profile.stage_seconds(stage, stages, rows)
        assert given_it.stage_seconds(stage, stages, rows) == expected


@pytest.mark.parametrize("split", [(5, 6), (13, -1), (12, 1)])
def test_a_split_of_other_layers_is_refused(split: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="counts of layers that add up to 12"):
        replace(make(12), split=split)


def test_a_split_over_other_stages_is_refused() -> None:
    profile = replace(make(12), split=(6, 6))
    with pytest.raises(ConfigError, match="split over 2 stages, not 3"):
        profile.stage_layers(1, 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"blocks": (Times(((1, 1.0),)),)},
        {"blocks": (Times(((1, 1.0),)),), "split": (6, 6)},
        {"blocks": (Times(((1, 1.0),)),), "split": (12,), "speeds": (1.0,)},
    ],
)
def test_blocks_that_fit_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected a block for every stage"):
        replace(make(12), **fields)
