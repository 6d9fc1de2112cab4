"""The composition of a stage's passes."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.bundles import MOST_ROWS
from flowspec.core.protocol.messages import Segment
from flowspec.core.run.key import RunKey
from flowspec.core.stage.waiting import WaitingSegments

A, B, C = (RunKey(job, 1) for job in "abc")


def segment(run: RunKey, number: int, rows: int = 1) -> Segment:
    ids = tuple(range(rows))
    return Segment(run, number, 0, ids, ids, ids)


def names(segments: list[Segment]) -> str:
    return " ".join(f"{one.run.job}{one.segment}" for one in segments)


def passes(waiting: WaitingSegments) -> list[str]:
    found = []
    while waiting:
        found.append(names(waiting.take()))
    return found


def queue(*groups: str, rows: int = 1) -> WaitingSegments:
    """Waiting groups like ``a0 b0``."""
    waiting = WaitingSegments()
    for bundle, group in enumerate(groups, start=1):
        for name in group.split():
            waiting.add(segment(RunKey(name[0], 1), int(name[1:]), rows), bundle)
    return waiting


def test_a_pass_has_the_first_waiting_segment_of_every_run() -> None:
    assert passes(queue("a0", "a1", "b0", "c0", "b1")) == ["a0 b0 c0", "a1 b1"]


def test_segments_that_came_together_stay_together() -> None:
    assert passes(queue("a0", "a1 b0", "c0")) == ["a0 c0", "a1 b0"]
    assert passes(queue("a0 b0", "b1 c0", "a1", "c1")) == ["a0 b0", "b1 c0 a1", "c1"]


def test_a_group_that_does_not_fit_waits_and_is_not_overtaken() -> None:
    third = MOST_ROWS // 3
    assert passes(queue("a0 b0", "c0 d0", "e0", rows=third)) == ["a0 b0", "c0 d0 e0"]
    assert passes(queue("a0", "b0", rows=MOST_ROWS + 1)) == ["a0", "b0"]


def test_entries_of_a_single_message_are_groups_of_their_own() -> None:
    waiting = WaitingSegments()
    for run in (A, B):
        waiting.add(segment(run, 0, MOST_ROWS))
    assert passes(waiting) == ["a0", "b0"]


def test_a_part_that_was_held_up_joins_nothing() -> None:
    waiting = WaitingSegments()
    waiting.add(segment(A, 0), 1)
    waiting.add(segment(B, 0), 1)
    waiting.add(segment(B, 1), 2)
    waiting.add(segment(C, 0), 1)
    assert passes(waiting) == ["a0 b0 c0", "b1"]


def test_a_run_twice_in_an_entry_is_taken_in_order() -> None:
    waiting = WaitingSegments()
    for number in range(2):
        waiting.add(segment(A, number), 1)
    waiting.add(segment(B, 0), 1)
    assert passes(waiting) == ["a0", "a1 b0"]


def test_what_follows_a_taken_group_does_not_join_it() -> None:
    waiting = queue("a0 b0")
    assert names(waiting.take()) == "a0 b0"
    waiting.add(segment(C, 0), 1)
    assert passes(waiting) == ["c0"]


def test_a_dropped_run_leaves_the_others_together() -> None:
    waiting = queue("a0 b0 c0", "b1")
    assert waiting.rows(B) == 2
    waiting.drop(B)
    assert waiting.rows(B) == 0
    assert passes(waiting) == ["a0 c0"]
    assert not waiting


ENTRIES = st.lists(
    st.lists(st.tuples(st.sampled_from((A, B, C)), st.integers(0, 70)), min_size=1, max_size=3),
    max_size=12,
)


@given(ENTRIES)
def test_every_segment_is_taken_once_in_the_order_of_its_run(
    entries: list[list[tuple[RunKey, int]]],
) -> None:
    waiting = WaitingSegments()
    numbers: defaultdict[RunKey, int] = defaultdict(int)
    together = []
    for bundle, entry in enumerate(entries, start=1):
        group = []
        for run, rows in dict(entry).items():
            made = segment(run, numbers[run], rows)
            numbers[run] += 1
            waiting.add(made, bundle)
            group.append(made)
        together.append(group)
    taken: defaultdict[RunKey, list[int]] = defaultdict(list)
    while waiting:
        segments = waiting.take()
        assert len({one.run for one in segments}) == len(segments) > 0
        groups = {tuple(g) for g in together if any(one in segments for one in g)}
        first = sum(len(one.ids) for one in next(g for g in together if g[0] in segments))
        assert sum(len(one.ids) for one in segments) <= max(MOST_ROWS, first)
        assert sum(map(len, groups)) == len(segments), "no group is split"
        for one in segments:
            taken[one.run].append(one.segment)
    assert taken == {run: list(range(number)) for run, number in numbers.items()}
