"""A job's second run at a stage or middle model while inputs of the first one still arrive."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import Address, Role
from flowspec.core.protocol.machine import Input, Release
from flowspec.core.protocol.messages import Close, Envelope
from flowspec.core.run.key import RunKey
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from tests.addresses import D0, M1, M2, S1, S2
from tests.core.traces import FIRST, SECOND, STAGES, Step, cut, replay, trace
from tests.marks import examples
from tests.toy import PROMPT

#: By run: the strategies of a pipeline, and of one with middle models.
STRATEGIES = {
    FIRST: ("flowspec", "pipespec:window=8"),
    SECOND: ("flowspec:lockstep=on", "pipespec"),
}
WORKERS = [S1, S2, M1, M2]


@cache
def traced(run: RunKey, *, chain: bool) -> dict[Address, list[Step]]:
    strategy = STRATEGIES[run][chain]
    return trace(run, JobSpec(prompt_ids=PROMPT, max_new_tokens=14, strategy=strategy))


def steps(run: RunKey, address: Address) -> list[Step]:
    return traced(run, chain=address.role is Role.MIDDLE)[address]


def machine_of(address: Address) -> StageMachine:
    if address.role is Role.MIDDLE:
        return StageMachine(1, STAGES, middle=address.number)
    return StageMachine(address.number, STAGES)


@pytest.mark.parametrize("address", WORKERS, ids=str)
def test_a_run_alone_is_what_was_recorded(address: Address) -> None:
    machine = machine_of(address)
    second = steps(SECOND, address)
    passes = sum(step.starts_work for step in second)
    assert passes > 3, "the trace has no more than the prompt"
    assert replay(machine, cut([], 0), second, []) == []
    assert machine.open_runs == ()


@pytest.mark.parametrize("address", WORKERS, ids=str)
@given(data=st.data())
@settings(max_examples=examples(80), deadline=None)
def test_whatever_comes_of_the_first_run_the_second_answers_the_same(
    address: Address, data: st.DataObject
) -> None:
    second = steps(SECOND, address)
    first = steps(FIRST, address)
    stopped = cut(
        first,
        data.draw(st.integers(0, len(first)), label="steps of the first run"),
        [Envelope(D0, 99, Close(FIRST))],
    )
    late = data.draw(st.permutations(stopped.late), label="late")
    places = st.integers(0, len(second) - 1)
    moments: list[tuple[int, Input]] = [(data.draw(places), event) for event in late]
    if stopped.result is not None:
        # A stage computes one pass at a time: the old one ends before the first new one starts.
        work = next(at for at, step in enumerate(second) if step.starts_work)
        moments.insert(0, (data.draw(st.integers(0, work)), stopped.result))
    machine = machine_of(address)
    others = replay(machine, stopped, second, moments)
    assert others in ([], [Release(FIRST)])
    assert machine.open_runs == ()
