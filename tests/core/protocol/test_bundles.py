"""Which messages of one moment travel together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.bundles import MOST_ROWS, Bundle, bundled, unbundled
from flowspec.core.protocol.machine import Complete, Send
from flowspec.core.protocol.messages import Close, Envelope, Segment
from flowspec.core.run.key import RunKey
from tests.addresses import D0, S1, S2

A, B, C = (RunKey(job, 1) for job in "abc")
#: An operation that is no message: of a run, or of all.
Other = Complete | None
Entries = list[Other | Send | Bundle]


def sent(
    run: RunKey, number: int, rows: int = 1, to: Address = S1, **more: tuple[str, ...]
) -> Send:
    ids = tuple(range(rows))
    return Send(to, Envelope(D0, number, Segment(run, number, 0, ids, ids, ids)), **more)


def entries(*outputs: Other | Send) -> Entries:
    return bundled(outputs, lambda output: output.run if output is not None else None)


def shape(found: Sequence[Other | Send | Bundle]) -> list[object]:
    """Every entry by its runs and numbers."""
    return [
        [(one.envelope.message.run, one.envelope.seq) for one in unbundled([entry])]
        if isinstance(entry, Send | Bundle)
        else entry
        for entry in found
    ]


def test_segments_of_different_runs_are_one_entry_at_the_place_of_the_last() -> None:
    done = Complete(C, ("t",))
    found = entries(sent(A, 1), done, sent(B, 1))
    assert shape(found) == [done, [(A, 1), (B, 1)]]
    (_, bundle) = found
    assert isinstance(bundle, Bundle)
    assert bundle.to == S1
    assert [envelope.seq for envelope in bundle.envelopes] == [1, 1]


def test_a_message_alone_stays_what_it_is() -> None:
    one = sent(A, 1)
    assert entries(one) == [one]


def test_the_second_segments_of_runs_are_a_second_entry() -> None:
    given = [sent(A, 1), sent(A, 2), sent(B, 1), sent(B, 2), sent(C, 1)]
    assert shape(entries(*given)) == [[(A, 1), (B, 1), (C, 1)], [(A, 2), (B, 2)]]


def test_receivers_have_entries_of_their_own() -> None:
    given = [sent(A, 1), sent(A, 1, to=S2), sent(B, 1), sent(B, 1, to=S2)]
    found = entries(*given)
    assert [entry.to for entry in found if isinstance(entry, Bundle)] == [S1, S2]


@pytest.mark.parametrize("more", [{"completes": ("t",)}, {"after": ("u",)}])
def test_what_concerns_a_task_goes_alone(more: dict[str, tuple[str, ...]]) -> None:
    held = Send(S1, sent(B, 1).envelope, task="t" if "after" in more else "", **more)  # type: ignore[arg-type]
    assert shape(entries(sent(A, 1), held, sent(C, 1))) == [[(B, 1)], [(A, 1), (C, 1)]]


def test_nothing_of_a_run_overtakes_its_segment() -> None:
    done = Complete(A, ("t",))
    closing = Send(S1, Envelope(D0, 2, Close(A)))
    assert shape(entries(sent(A, 1), done, sent(B, 1))) == [[(A, 1)], done, [(B, 1)]]
    assert shape(entries(sent(A, 1), closing, sent(B, 1))) == [[(A, 1)], [(A, 2)], [(B, 1)]]
    assert shape(entries(sent(A, 1), None, sent(B, 1))) == [[(A, 1)], None, [(B, 1)]]


def test_rows_bound_an_entry() -> None:
    most = MOST_ROWS
    long = [sent(A, 1, most + 1), sent(B, 1, most), sent(C, 1, 1)]
    assert shape(entries(*long)) == [[(A, 1)], [(B, 1)], [(C, 1)]]
    fit = [sent(A, 1, most - 1), sent(B, 1, 2), sent(C, 1, 1)]
    assert shape(entries(*fit)) == [[(A, 1), (C, 1)], [(B, 1)]]
    markers = [sent(RunKey(str(at), 1), 1, 0) for at in range(most + 1)]
    assert [len(entry) for entry in shape(entries(*markers))] == [most, 1]  # type: ignore[arg-type]


def test_a_segment_limits_the_entry_that_it_is_in() -> None:
    def alone(run: RunKey) -> Send:
        send = sent(run, 1)
        message = replace(send.envelope.message, together=1)  # type: ignore[call-arg]
        return replace(send, envelope=replace(send.envelope, message=message))

    assert shape(entries(alone(A), alone(B))) == [[(A, 1)], [(B, 1)]]
    assert shape(entries(sent(A, 1), alone(B), sent(C, 1))) == [[(A, 1), (C, 1)], [(B, 1)]]


RUNS = st.sampled_from((A, B, C))
OUTPUTS = st.one_of(
    st.tuples(RUNS, st.integers(0, 90), st.sampled_from((S1, S2)), st.just(())),
    st.tuples(RUNS, st.integers(0, 90), st.just(S1), st.just(("t",))),
    RUNS.map(lambda run: Complete(run, ("t",))),
    st.none(),
)


@given(st.lists(OUTPUTS, max_size=30))
def test_every_message_is_in_one_entry_and_every_run_keeps_its_order(drawn: list[object]) -> None:
    numbers: defaultdict[tuple[RunKey, Address], int] = defaultdict(int)
    outputs: list[Other | Send] = []
    for one in drawn:
        if isinstance(one, tuple):
            run, rows, to, completes = one
            numbers[run, to] += 1
            outputs.append(sent(run, numbers[run, to], rows, to, completes=completes))
        else:
            assert isinstance(one, Other)
            outputs.append(one)
    found = entries(*outputs)
    opened = list(unbundled(found))
    assert sorted(map(repr, opened)) == sorted(map(repr, outputs))
    for run in (A, B, C):
        for to in (S1, S2):
            assert _of(run, to, opened) == _of(run, to, outputs)
    for entry in found:
        if isinstance(entry, Bundle):
            runs = [envelope.message.run for envelope in entry.envelopes]
            assert len(set(runs)) == len(runs) > 1
            assert {send.to for send in entry.sends} == {entry.to}
            assert sum(max(1, len(e.message.ids)) for e in entry.envelopes) <= MOST_ROWS  # type: ignore[union-attr]


def _of(run: RunKey, to: Address, outputs: Sequence[Other | Send]) -> list[object]:
    """What concerns ``run`` at the receiver ``to``, or all, in order."""
    found = []
    for output in outputs:
        if isinstance(output, Send):
            if (output.envelope.message.run, output.to) == (run, to):
                found.append(output)
        elif output is None or output.run == run:
            found.append(output)
    return found
