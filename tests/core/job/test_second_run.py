"""A job's second run at the draft worker while inputs of the first one still arrive."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import GRAPH, SCHEDULER
from flowspec.core.protocol.machine import (
    Commit,
    Compute,
    Done,
    Finish,
    Input,
    Output,
    Poll,
    Received,
    Release,
    Tick,
)
from flowspec.core.protocol.messages import Answer, Envelope, Fault, Submit, Synced
from flowspec.core.protocol.work import Encode, EncodeDone, EncodeFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.strategies import build
from tests.addresses import D0, M1, M2, S1, S2
from tests.core.traces import FIRST, MIDDLES, SECOND, STAGES, Cut, Step, cut, replay, trace
from tests.marks import examples
from tests.toy import PROMPT, TARGET, limits

COUNT = 14
#: Further messages about a first run.
STRAY = [
    Envelope(S2, 1, Answer(FIRST, 0, (len(PROMPT) - 1,), (3,))),
    Envelope(S2, 1, Answer(FIRST, 1, (len(PROMPT),), (1 << 40,))),
    Envelope(M1, 1, Answer(FIRST, 0, (len(PROMPT) - 1,), (3,))),
    Envelope(M2, 1, Answer(FIRST, 1, (len(PROMPT),), (1 << 40,))),
    Envelope(S1, 1, Fault(FIRST, "stage 1 is on fire")),
    Envelope(M1, 1, Fault(FIRST, "middle model 1 is on fire")),
    Envelope(GRAPH, 1, Synced(FIRST, "sync/1")),
]
STRATEGIES = ["flowspec", "flowspec:lockstep=on", "pipedec", "chain", "auto", "pipespec:window=8"]


def spec(strategy: str) -> JobSpec:
    """A recorded job, which uses no measurements of earlier jobs."""
    return JobSpec(prompt_ids=PROMPT, max_new_tokens=COUNT, strategy=strategy, record=True)


@cache
def steps(run: RunKey, strategy: str) -> list[Step]:
    return trace(run, spec(strategy))[D0]


def machine() -> DraftMachine:
    return DraftMachine(limits(STAGES, middles=len(MIDDLES)), build)


def text_of(second: list[Step]) -> tuple[int, ...]:
    outputs = [output for step in second for output in step.outputs]
    assert [type(output) for output in outputs].count(Finish) == 1
    return tuple(
        token for output in outputs if isinstance(output, Commit) for token in output.tokens
    )


def work_begins(second: list[Step]) -> int:
    return next((at for at, step in enumerate(second) if step.starts_work), len(second) - 1)


def check_a_second_run(stopped: Cut, strategy: str, data: st.DataObject) -> list[Output]:
    """The second run's outputs equal those alone; the first one's outputs after it began."""
    second = steps(SECOND, strategy)
    late: list[Input] = data.draw(st.permutations([*stopped.late, Tick(), Tick()]), label="late")
    places = st.integers(0, len(second) - 1)
    moments = [(data.draw(places), event) for event in late]
    if stopped.result is not None:
        # A drafter computes one pass at a time: the old one ends before the first new one starts.
        moments.insert(0, (data.draw(st.integers(0, work_begins(second))), stopped.result))
    drafter = machine()
    others = replay(drafter, stopped, second, moments)
    assert drafter.sessions == {}
    assert not drafter.runnable
    assert drafter.deadline is None
    return others


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_alone_is_what_was_recorded(strategy: str) -> None:
    second = steps(SECOND, strategy)
    assert text_of(second) == TARGET.decode(PROMPT, COUNT, Sampling())
    assert replay(machine(), cut([], 0), second, []) == []


def test_the_middle_models_take_part() -> None:
    """Otherwise the tests of pipespec here would be those of a chain of two."""
    answers = {
        envelope.sender
        for step in steps(SECOND, "pipespec:window=8")
        if isinstance(step.event, Received)
        for envelope in step.event.envelopes
        if isinstance(envelope.message, Answer) and envelope.message.ids[0] >= len(PROMPT)
    }
    assert answers == {S2, M1, M2}


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_whatever_comes_of_the_first_run_the_second_gives_the_same(
    strategy: str, data: st.DataObject
) -> None:
    first = steps(FIRST, data.draw(st.sampled_from(STRATEGIES), label="first strategy"))
    at = data.draw(st.integers(0, len(first)), label="steps of the first run")
    others = check_a_second_run(cut(first, at, STRAY), strategy, data)
    assert others in ([], [Release(FIRST)])


@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_a_first_run_whose_prompt_is_being_encoded_is_dropped_as_well(data: st.DataObject) -> None:
    submit = Submit(FIRST, (("prompt", "some text"), ("strategy", "flowspec")))
    submitted = Received((Envelope(SCHEDULER, 1, submit),))
    encode = Compute(Encode(FIRST, "some text", raw=False))
    results = [EncodeDone((5, 6, 7)), EncodeDone(()), EncodeFailed("no template")]
    told = cut([], 0, [submitted.envelopes[0], *STRAY])
    begun = data.draw(st.booleans(), label="encoding")
    before = [Step(0.0, submitted, ())]
    if begun:
        before.append(Step(0.25, Poll(), (encode,)))
    result = Done(data.draw(st.sampled_from(results))) if begun else None
    others = check_a_second_run(Cut(before, result, told.late), "flowspec", data)
    assert others in ([], [Release(FIRST)])
