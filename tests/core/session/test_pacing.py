"""Pacing as data: when segments leave, and what hops and joins wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Hop
from flowspec.core.session.pacing import (
    DELIVERED,
    NOTHING,
    FreeRunning,
    Lockstep,
    Pacing,
    Route,
    Timestep,
    TurnCause,
    TurnEnd,
)

POLICIES: dict[str, Callable[[], Pacing]] = {
    "free": FreeRunning,
    "lockstep": lambda: Lockstep(4),
    "timestep": lambda: Timestep(4, 2),
}


def hops_of(route: Route) -> list[Hop]:
    assert route.first is not None
    return [route.first, *route.rest]


@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("cause", TurnCause)
@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_judged_as_they_come_and_in_timesteps_where_one_ends(
    policy: str, cause: TurnCause, decoding: bool
) -> None:
    judges = cause is TurnCause.ANSWER
    if policy == "timestep" and (decoding or cause is TurnCause.JOIN):
        judges = cause is TurnCause.JOIN
    assert POLICIES[policy]().may_judge(cause, decoding=decoding) == judges


@pytest.mark.parametrize(
    ("policy", "keeps", "expands"),
    [("free", False, False), ("lockstep", True, True), ("timestep", False, False)],
)
def test_only_the_lockstep_counts_emptied_segments_and_expands_at_an_empty_verdict(
    policy: str, keeps: bool, expands: bool
) -> None:
    pacing = POLICIES[policy]()
    assert (pacing.keeps_emptied, pacing.expands_on_empty_verdict) == (keeps, expands)


# ---- free running --------------------------------------------------------------------------------


@given(st.integers(0, 20), st.integers(1, 20), st.sampled_from(TurnCause), st.booleans())
def test_free_running_is_about_free_slots_and_nothing_else(
    in_flight: int, slots: int, cause: TurnCause, decoding: bool
) -> None:
    pacing = FreeRunning()
    assert pacing.begin_judging(cause, of_segment=True) == ()
    assert pacing.start_round(3, slots) == ()
    pacing.begin_turn(cause, decoding=decoding)
    assert pacing.has_slot(in_flight, slots) == (in_flight < slots)
    pacing.follow_empty_verdict()
    assert not pacing.expansion_pending
    assert [pacing.bubbles_due(growing=growing) for growing in (False, True)] == [0, 0]
    assert pacing.route() == DELIVERED
    pacing.sent(7)
    assert pacing.has_slot(in_flight, slots) == (in_flight < slots)
    assert pacing.end_turn([7], lambda: True) == NOTHING


# ---- lockstep ------------------------------------------------------------------------------------


def test_a_step_behind_the_first_ones_waits_for_the_verdict_as_many_steps_before_it() -> None:
    pacing = Lockstep(3)
    pacing.start_round(2, 4)
    routes = [pacing.route() for _ in range(3)]
    assert [hops_of(route) for route in routes] == [
        [Hop("2/0/1"), Hop("2/0/2"), Hop("2/0/3")],
        [Hop("2/1/1"), Hop("2/1/2"), Hop("2/1/3", ("2/verdict/0",))],
        [Hop("2/2/1"), Hop("2/2/2", ("2/verdict/0",)), Hop("2/2/3", ("2/verdict/1",))],
    ]
    assert all(route.marker and not route.task for route in routes)


@given(
    stages=st.integers(1, 6),
    slots=st.integers(1, 8),
    rounds=st.lists(st.lists(st.booleans(), max_size=20), min_size=1, max_size=4),
)
def test_in_lockstep_nothing_of_an_old_round_is_held_for_ever(
    stages: int, slots: int, rounds: list[list[bool]]
) -> None:
    """True: judge an answer if possible; False, or otherwise: send a segment if possible."""
    pacing = Lockstep(stages)
    completed: list[str] = []
    awaited: set[str] = set()
    for number, moves in enumerate(rounds, 1):
        completed += pacing.start_round(number, slots)
        assert awaited <= set(completed), "every dependency of the last round is complete"
        sent = judged = 0
        due = slots
        for is_answer in moves:
            if is_answer and judged < sent:
                verdict = pacing.begin_judging(TurnCause.ANSWER, of_segment=True)
                assert verdict == (f"{number}/verdict/{judged}",)
                completed += verdict
                judged += 1
                due += 1
            elif due:
                hops = hops_of(pacing.route())
                pacing.sent(sent)
                for stage, hop in enumerate(hops, 1):
                    step = sent + stage - 1
                    before = (f"{number}/verdict/{step - stages}",) if step >= stages else ()
                    assert hop == Hop(f"{number}/{sent}/{stage}", before)
                    awaited |= set(hop.after)
                sent += 1
                due -= 1
            for in_flight in (0, slots, 99):
                assert pacing.has_slot(in_flight, slots) == (due > 0)
            assert pacing.bubbles_due(growing=False) == due
    completed += pacing.start_round(len(rounds) + 1, slots)
    assert awaited <= set(completed)
    assert len(completed) == len(set(completed)), "each verdict once"


def test_in_lockstep_an_answer_for_prompt_rows_is_no_step() -> None:
    pacing = Lockstep(2)
    assert pacing.begin_judging(TurnCause.ANSWER, of_segment=False) == ()
    assert not pacing.bubbles_due(growing=False)
    assert pacing.end_turn([], lambda: True) == NOTHING


def leave(pacing: Lockstep, segment: int) -> None:
    pacing.route()
    pacing.sent(segment)


def judged(pacing: Lockstep, answers: int, *, empty: bool) -> None:
    for _ in range(answers):
        pacing.begin_judging(TurnCause.ANSWER, of_segment=True)
        if empty:
            pacing.follow_empty_verdict()


@given(slots=st.integers(1, 8), empties=st.integers(0, 8), overtaken=st.booleans())
def test_in_lockstep_a_due_segment_is_a_bubble_only_if_no_growth_will_fill_it(
    slots: int, empties: int, overtaken: bool
) -> None:
    pacing = Lockstep(4)
    pacing.start_round(1, slots)
    assert pacing.bubbles_due(growing=True) == 0, "the round's tree fills all slots"
    for segment in range(slots):
        leave(pacing, segment)
    judged(pacing, 1, empty=False)
    pacing.begin_growth(idle=False)
    judged(pacing, empties, empty=True)
    assert pacing.bubbles_due(growing=True) == 0
    if overtaken:
        judged(pacing, 1, empty=False)
        pacing.begin_growth(idle=False)
        assert not pacing.expansion_pending
        assert pacing.bubbles_due(growing=True) == 1 + empties
        return
    assert pacing.bubbles_due(growing=False) == 1, "the growth found nothing"
    leave(pacing, slots)
    for left in reversed(range(empties)):
        assert pacing.expansion_pending
        pacing.begin_growth(idle=True)
        assert pacing.bubbles_due(growing=True) == 0
        assert pacing.bubbles_due(growing=False) == 1
        leave(pacing, slots + empties - left)
    assert not pacing.expansion_pending
    assert not pacing.has_slot(0, slots)


# ---- timesteps -----------------------------------------------------------------------------------


def idle() -> bool:
    return False


def busy() -> bool:
    return True


def step(
    pacing: Timestep, in_flight: Iterable[int], *, drafting: bool, sends: int | None = None
) -> TurnEnd:
    """The turn that starts a timestep; segment ``sends`` leaves in it."""
    pacing.begin_turn(TurnCause.JOIN if pacing.now else TurnCause.ANSWER, decoding=True)
    assert pacing.has_slot(99, 1)
    if sends is not None:
        pacing.route()
        pacing.sent(sends)
        assert not pacing.has_slot(0, 9), "one segment per timestep"
    return pacing.end_turn(in_flight, busy if drafting else idle)


def join(number: int, *after: str) -> TurnEnd:
    return TurnEnd(join=Hop(f"sync/{number}", after))


def test_only_the_first_stage_of_a_later_group_waits_for_the_verdict_before_it() -> None:
    route = Timestep(stages=5, groups=2).route()  # groups of stages 1-2 and 3-5
    assert hops_of(route) == [
        Hop("decode/1/1"),
        Hop("decode/2/1"),
        Hop("decode/3/2", ("verdict/1",)),
        Hop("decode/4/2"),
        Hop("decode/5/2"),
    ]
    assert route.task == "decode/1/1", "the first pass completes its own task"
    assert not route.marker


def test_a_join_waits_for_every_active_group_and_the_drafter() -> None:
    pacing = Timestep(stages=3, groups=3)
    assert step(pacing, [10], drafting=True, sends=10) == join(1, "decode/0/1", "decode/1/1")
    assert pacing.begin_judging(TurnCause.JOIN, of_segment=False) == ("verdict/1",)
    assert step(pacing, [10, 11], drafting=False, sends=11) == join(2, "decode/2/2", "decode/1/2")
    without_10 = step(pacing, [11], drafting=True)  # it was pruned away
    assert without_10 == join(3, "decode/0/3", "decode/2/3")
    assert step(pacing, [11], drafting=False) == join(4, "decode/3/4")
    assert step(pacing, [11], drafting=False) == join(5), "it has passed all stages"


@pytest.mark.parametrize(("stages", "groups"), [(1, 1), (7, 3), (21, 14), (12, 12)])
def test_groups_are_contiguous_and_near_equal(stages: int, groups: int) -> None:
    hops = hops_of(Timestep(stages, groups).route())
    steps = [int(hop.task.rpartition("/")[2]) for hop in hops]
    assert [int(hop.task.split("/")[1]) for hop in hops] == list(range(1, stages + 1))
    assert steps == sorted(steps)
    sizes = [steps.count(step) for step in range(1, groups + 1)]
    assert sum(sizes) == stages
    assert max(sizes) - min(sizes) <= 1


def test_the_drafters_task_is_complete_once_it_has_no_work_left() -> None:
    pacing = Timestep(stages=2, groups=2)
    step(pacing, [], drafting=True)
    pacing.begin_turn(TurnCause.DRAFTED, decoding=True)
    assert not pacing.has_slot(0, 9), "segments leave only at the start of a timestep"
    assert pacing.end_turn([], busy) == NOTHING
    assert pacing.end_turn([], idle) == TurnEnd(completes=("decode/0/1",))
    assert pacing.end_turn([], idle) == NOTHING, "once"


def test_a_join_that_does_not_wait_for_the_drafter_is_told_nothing_of_it() -> None:
    pacing = Timestep(stages=2, groups=2)
    step(pacing, [], drafting=False)
    assert pacing.end_turn([], busy) == NOTHING
    assert pacing.end_turn([], idle) == NOTHING


def test_no_timestep_begins_before_the_first_token() -> None:
    pacing = Timestep(stages=2, groups=1)
    for cause in (TurnCause.ANSWER, TurnCause.DRAFTED, TurnCause.MIDDLE_ANSWER):
        pacing.begin_turn(cause, decoding=False)
        assert not pacing.has_slot(0, 9)
        assert pacing.end_turn([], busy) == NOTHING
    assert pacing.now == 0


def test_a_verdict_ends_the_timestep_it_was_passed_in() -> None:
    pacing = Timestep(stages=2, groups=1)
    assert pacing.begin_judging(TurnCause.ANSWER, of_segment=True) == (), (
        "the first token ends none"
    )
    for number in (1, 2, 3):
        step(pacing, [], drafting=False)
        assert pacing.begin_judging(TurnCause.JOIN, of_segment=False) == (f"verdict/{number}",)
    assert pacing.start_round(2, 4) == (), "a new round delays nothing"


@given(
    groups=st.integers(1, 5),
    more=st.integers(0, 4),
    steps=st.lists(
        st.tuples(st.booleans(), st.booleans(), st.sets(st.integers(0, 9))), max_size=20
    ),
)
def test_each_join_waits_for_just_the_passes_of_its_timestep(
    groups: int, more: int, steps: list[tuple[bool, bool, set[int]]]
) -> None:
    """Per step: whether a segment leaves, whether the drafter works, which segments are pruned."""
    pacing = Timestep(groups + more, groups)
    on_the_way: dict[int, list[Hop]] = {}
    for number, (sends, drafts, pruned) in enumerate(steps, 1):
        on_the_way = {at: hops for at, hops in on_the_way.items() if at not in pruned}
        pacing.begin_turn(TurnCause.JOIN if pacing.now else TurnCause.ANSWER, decoding=True)
        if sends:
            hops = hops_of(pacing.route())
            assert int(hops[0].task.rpartition("/")[2]) == number, "it enters in this timestep"
            pacing.sent(number)
            on_the_way[number] = hops
        end = pacing.end_turn(list(on_the_way), busy if drafts else idle)
        assert end.completes == ()
        assert end.join is not None
        expected = [f"decode/0/{number}"] if drafts else []
        for hops in on_the_way.values():
            expected += [hop.task for hop in hops if hop.task.endswith(f"/{number}")]
        assert end.join.task == f"sync/{number}"
        assert sorted(end.join.after) == sorted(expected)
