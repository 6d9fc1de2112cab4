"""The composition of a stage's passes."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.bundles import MOST_ROWS
from flowspec.core.protocol.messages import Segment
from flowspec.core.run.key import RunKey
from flowspec.core.stage.next_pass import WaitingSegments

A, B, C = (RunKey(job, 1) for job in "abc")


def segment(
    run: RunKey, number: int, rows: int = 1, together: int = 0, round_number: int = 1
) -> Segment:
    ids = tuple(range(rows))
    return Segment(run, number, round_number, ids, ids, ids, together=together)


def chunk(run: RunKey, number: int, rows: int = 60) -> Segment:
    """A chunk of a prompt."""
    return segment(run, number, rows, round_number=0)


def names(segments: list[Segment]) -> str:
    return " ".join(f"{one.run.job}{one.segment}" for one in segments)


def passes(waiting: WaitingSegments) -> list[str]:
    found = []
    while waiting:
        found.append(names(waiting.take()))
    return found


def queue(names: str, rows: int = 1) -> WaitingSegments:
    """Waiting segments like ``a0 b0``."""
    waiting = WaitingSegments()
    for name in names.split():
        waiting.add(segment(RunKey(name[0], 1), int(name[1:]), rows))
    return waiting


def test_a_pass_has_the_first_waiting_segment_of_every_run() -> None:
    assert passes(queue("a0 a1 b0 c0 b1")) == ["a0 b0 c0", "a1 b1"]


def test_no_run_waits_for_another_ones_earlier_segment() -> None:
    """Even if both came in one entry, as a1 and c0."""
    assert passes(queue("a0 b0 a1 c0")) == ["a0 b0 c0", "a1"]


def test_what_does_not_fit_waits_and_is_not_overtaken() -> None:
    half = MOST_ROWS // 2
    assert passes(queue("a0 b0 c0 d0 e0", rows=half)) == ["a0 b0", "c0 d0", "e0"]
    assert passes(queue("a0 b0", rows=MOST_ROWS + 1)) == ["a0", "b0"]
    waiting = queue("a0 b0", rows=half + 1)
    waiting.add(segment(C, 0))
    assert passes(waiting) == ["a0", "b0 c0"]


def test_a_segment_limits_the_rows_of_a_pass_that_it_shares() -> None:
    waiting = WaitingSegments()
    for run, together in ((A, 2), (B, 0), (C, 0)):
        waiting.add(segment(run, 0, 1, together))
    assert passes(waiting) == ["a0 b0", "c0"]
    for run, together in ((A, 0), (B, 1), (C, 0)):
        waiting.add(segment(run, 1, 1, together))
    assert passes(waiting) == ["a1", "b1", "c1"], "also where it would come second"
    waiting.add(segment(A, 2, 9, together=4))
    assert passes(waiting) == ["a2"], "a pass of its own has any size"


def test_a_pass_with_a_prompts_rows_has_room_for_all_others() -> None:
    waiting = WaitingSegments()
    waiting.add(chunk(A, 0))
    waiting.add(chunk(A, 1))
    for run in (B, C):
        waiting.add(segment(run, 0, together=1))
    assert passes(waiting) == ["a0 b0 c0", "a1"]
    waiting.add(segment(B, 1, together=1))
    waiting.add(chunk(A, 2))
    assert passes(waiting) == ["a2 b1"]
    waiting.add(chunk(A, 3, MOST_ROWS))
    waiting.add(segment(B, 2))
    assert passes(waiting) == ["a3", "b2"]


def test_prompts_wait_for_decoding_runs_if_it_is_not_their_turn() -> None:
    waiting = WaitingSegments()
    waiting.add(chunk(A, 0))
    waiting.add(segment(B, 0))
    waiting.add(chunk(C, 0))
    assert names(waiting.take(prompts=False)) == "b0"
    assert names(waiting.take(prompts=False)) == "a0 c0", "no one else waits"


@pytest.mark.parametrize(("prompts", "rows"), [(1, 12), (2, 12), (3, 1), (3, 9)])
def test_prompts_never_fill_the_passes_that_decoding_runs_wait_for(prompts: int, rows: int) -> None:
    """Seven runs decode beside prompts of 25 chunks: all are served in each two passes."""
    waiting = WaitingSegments()
    for prompt in range(prompts):
        for number in range(25):
            waiting.add(chunk(RunKey(f"p{prompt}", 1), number))
    decoding = [RunKey(f"d{at}", 1) for at in range(7)]
    for number in range(5):
        for run in decoding:
            waiting.add(segment(run, number, rows))
        taken = [*waiting.take(), *waiting.take()]
        assert {one.run for one in taken if one.round} == set(decoding)
        assert sum(one.round == 0 for one in taken) >= 2


def test_a_short_prompt_does_not_wait_for_long_ones_nor_they_for_short_ones() -> None:
    waiting = WaitingSegments()
    for run in (A, B):
        for number in range(9):
            waiting.add(chunk(run, number))
    waiting.add(chunk(C, 0, 20))
    assert passes(waiting)[0] == "c0 a0"
    waiting = WaitingSegments()
    for number in range(9):
        waiting.add(chunk(A, number, MOST_ROWS))
    for number in range(4):  # one short prompt after the other
        waiting.add(chunk(RunKey(f"s{number}", 1), 0))
    assert passes(waiting)[:4] == ["s00 s10", "a0", "s20 s30", "a1"]


def test_a_dropped_run_leaves_the_others() -> None:
    waiting = queue("a0 b0 c0 b1")
    assert waiting.rows(B) == 2
    waiting.drop(B)
    assert waiting.rows(B) == 0
    assert passes(waiting) == ["a0 c0"]
    assert not waiting


def test_removed_segments_make_room_for_the_next_of_their_runs() -> None:
    waiting = queue("a0 b0 a1 b1")
    waiting.remove([waiting.firsts()[0]])
    assert names(waiting.firsts()) == "b0 a1"
    assert passes(waiting) == ["b0 a1", "b1"]


@given(st.lists(st.tuples(st.sampled_from((A, B, C)), st.integers(0, 150)), max_size=20))
def test_every_segment_is_taken_once_in_the_order_of_its_run(
    entries: list[tuple[RunKey, int]],
) -> None:
    waiting = WaitingSegments()
    numbers: defaultdict[RunKey, int] = defaultdict(int)
    for run, rows in entries:
        waiting.add(segment(run, numbers[run], rows))
        numbers[run] += 1
    taken: defaultdict[RunKey, list[int]] = defaultdict(list)
    while waiting:
        segments = waiting.take()
        assert len({one.run for one in segments}) == len(segments) > 0
        if len(segments) > 1:
            assert sum(len(one.ids) for one in segments) <= MOST_ROWS
        for one in segments:
            taken[one.run].append(one.segment)
    assert taken == {run: list(range(number)) for run, number in numbers.items()}
