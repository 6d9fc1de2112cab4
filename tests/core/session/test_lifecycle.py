"""A run's states: the code follows the tables in the module's docstring."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.messages import (
    MESSAGES,
    Answer,
    Close,
    Fault,
    Message,
    Meter,
    Open,
    PrefixLost,
    Prune,
    Retain,
    Revoke,
    Segment,
    StageReport,
    Submit,
    Synced,
)
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.session import lifecycle
from flowspec.core.session.lifecycle import TAKES, TRANSITIONS, Event, Lifecycle, State
from flowspec.errors import StateError

RUN = RunKey("j", 1)
#: One message of every kind.
SAMPLES: list[Message] = [
    Submit(RUN, ()),
    Open(RUN, 1, 1, Sampling()),
    Segment(RUN, 0, 0, (), (), ()),
    Prune(RUN, 0, (), 0, ()),
    Answer(RUN, 0, (), ()),
    Close(RUN),
    Revoke(RUN),
    StageReport(RUN, 1, Meter()),
    Fault(RUN, "why"),
    Synced(RUN, "task"),
    PrefixLost(RUN, 1),
    Retain(RUN, 20, (RUN,)),
]
PAIRS = list(itertools.product(State, Event))


def tables() -> list[list[list[str]]]:
    """The docstring's tables: blocks of indented lines, cells separated by two or more spaces."""
    lines = (lifecycle.__doc__ or "").splitlines()
    found = []
    for indented, group in itertools.groupby(lines, lambda line: line.startswith("    ")):
        if indented:
            found.append([re.split(r"\s{2,}", line.strip()) for line in group])
    return found


def in_state(state: State) -> Lifecycle:
    """A run brought to ``state`` in the fewest steps."""
    ways = {
        State.ENCODING: [],
        State.PREFILL: [Event.ENCODED],
        State.DECODE: [Event.ENCODED, Event.FIRST_TOKEN],
        State.CLOSING: [Event.ENCODED, Event.COMPLETE],
        State.ENDED: [Event.FAILED],
    }
    run = Lifecycle()
    for event in ways[state]:
        run.fire(event)
    assert run.state is state
    return run


def test_the_transitions_are_those_of_the_first_table() -> None:
    transitions, _ = tables()
    header, *rows = transitions
    assert header == ["state", *(event.name for event in Event)]
    assert [row[0] for row in rows] == [state.name for state in State]
    written = {
        State[name]: {
            Event[event]: State[after]
            for event, after in zip(header[1:], cells, strict=True)
            if after != "-"
        }
        for name, *cells in rows
    }
    assert written == TRANSITIONS


def test_the_messages_taken_are_those_of_the_second_table() -> None:
    _, takes = tables()
    header, *rows = takes
    assert header == ["state", "takes"]
    assert [row[0] for row in rows] == [state.name for state in State]
    kinds = {kind.__name__: kind for kind in MESSAGES}
    written = {
        State[name]: frozenset(kinds[kind] for kind in cell.split(", ") if kind != "-")
        for name, cell in rows
    }
    assert written == TAKES


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_what_the_table_does_not_have_cannot_happen(state: State, event: Event) -> None:
    run = in_state(state)
    after = TRANSITIONS[state].get(event)
    assert run.can(event) == (after is not None)
    if after is None:
        with pytest.raises(StateError, match=f"in state {state.value} cannot have {event.value}"):
            run.fire(event)
        assert run.state is state
    else:
        run.fire(event)
        assert run.state is after


@pytest.mark.parametrize("state", State)
def test_a_state_takes_just_its_messages(state: State) -> None:
    assert {type(message) for message in SAMPLES} == set(MESSAGES)
    run = in_state(state)
    taken = {type(message) for message in SAMPLES if run.takes(message)}
    assert taken == TAKES[state]


@given(st.lists(st.sampled_from(Event)))
def test_a_run_only_ever_goes_forward_and_ends_for_good(events: list[Event]) -> None:
    run = Lifecycle()
    order = list(State)
    for event in events:
        before = run.state
        if run.can(event):
            run.fire(event)
            assert order.index(run.state) > order.index(before)
        assert before is not State.ENDED or run.state is State.ENDED
