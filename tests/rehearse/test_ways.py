"""Simulated runs over every way: what a token costs, the order of messages, and the text."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import GRAPH, Address
from flowspec.core.protocol.machine import Commit, Complete, Input, Output, Received, Send
from flowspec.core.protocol.messages import Answer, Prune, Segment, StageReport, Synced
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.rehearse.devices.way import NO_BROKER, OWN_BOX, Way
from flowspec.rehearse.simulator import Costs, Simulation, Tap, unit_costs
from tests.addresses import D0, M1, S1, S2, S3
from tests.marks import crossed, examples
from tests.toy import PROMPT, TARGET, generate, pipeline

LATENCY = 0.25
STRATEGIES = [
    *("autoregressive", "naive_pp", "flowspec", "flowspec:lockstep=on", "pipedec", "specpipe"),
    *("chain", "pipespec", "auto"),
]
BOXES = (D0, S1, S2, S3, M1, OWN_BOX)
PLACES = ["draft", "stage-1", "stage-2", "stage-3", "own"]
WAYS = [Way(at, rows) for at in PLACES for rows in ("straight", "broker")]


def costs(way: Way, occupied: float = 0.0, latency: float = LATENCY) -> Costs:
    return Costs(
        lambda node, work: unit_costs(work),
        lambda source, target, envelope: latency * (source != target),
        lambda *_: occupied,
        way=way,
    )


def run(strategy: str, costs: Costs, tap: Tap | None = None) -> Simulation:
    """One job of 16 tokens over 3 stages; its text is the target's."""
    middles = (0.9,) if strategy == "pipespec" else ()
    simulation = pipeline(3, costs=costs, tap=tap, middles=middles)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=16, strategy=strategy)
    simulation.submit("job", spec)
    simulation.run()
    record = simulation.jobs["job"]
    assert tuple(record.tokens) == TARGET.decode(PROMPT, 16, Sampling())
    assert record.finish is not None and not record.finish.error
    return simulation


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize(
    ("way", "links"),
    [
        (NO_BROKER, lambda stages: stages + 1),
        (Way("draft", "straight"), lambda stages: stages + 1),
        (Way("stage-1", "straight"), lambda stages: stages + 1),
        # Rows wait at stage 1 for the prune that was sent before them, by the broker.
        (Way("own", "straight"), lambda stages: stages + 2),
        # One from the draft worker, two between stages, one back to the draft worker.
        (Way("draft", "broker"), lambda stages: 2 * stages),
        # One to stage 1 and one from it, or on one stage back to the draft worker; else two.
        (Way("stage-1", "broker"), lambda stages: 2 * stages),
        (Way("own", "broker"), lambda stages: 2 * stages + 2),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_plain_decoding_pays_the_passes_and_every_link_of_its_way(
    way: Way, links: object, stages: int
) -> None:
    """Counted by hand: four stages take five latencies straight, and eight by the draft's box."""
    record = generate("autoregressive", stages, count=8, costs=costs(way))
    times = [when for when, _ in record.committed_at]
    paid = stages + links(stages) * LATENCY  # type: ignore[operator]
    assert {after - before for before, after in itertools.pairwise(times)} == {paid}


@pytest.mark.parametrize(("strategy", "way"), crossed(STRATEGIES, WAYS, keep=3))
def test_the_text_is_the_targets_on_every_way(strategy: str, way: Way) -> None:
    run(strategy, costs(way, occupied=0.125))


@pytest.mark.parametrize("strategy", ["flowspec", "specpipe", "chain", "auto", "pipespec"])
def test_straight_rows_with_the_broker_beside_the_draft_cost_what_no_broker_does(
    strategy: str,
) -> None:
    """Without the task graph all else comes from the draft worker or goes to it."""
    near, none = (
        run(strategy, costs(way, occupied=0.125)).jobs["job"].committed_at
        for way in (Way("draft", "straight"), NO_BROKER)
    )
    assert near == none


@pytest.mark.parametrize("strategy", ["pipedec", "flowspec:lockstep=on", "autoregressive"])
def test_a_longer_way_takes_longer(strategy: str) -> None:
    ends = [
        run(strategy, costs(way)).jobs["job"].committed_at[-1][0]
        for way in (
            NO_BROKER,
            Way("draft", "straight"),
            Way("draft", "broker"),
            Way("own", "broker"),
        )
    ]
    assert ends == sorted(ends)
    assert ends[0] < ends[-1]


@given(
    st.sampled_from(["flowspec", "flowspec:lockstep=on", "pipedec", "pipespec"]),
    st.sampled_from(WAYS),
    st.lists(st.floats(0, 3), min_size=len(BOXES) ** 2, max_size=len(BOXES) ** 2),
    st.floats(0, 1),
)
@settings(max_examples=examples(25))
def test_a_senders_messages_are_delivered_in_order_whatever_the_links_take(
    strategy: str, way: Way, drawn: list[float], occupied: float
) -> None:
    """The machines refuse a gap, so a run that ends has none; here every batch is looked at."""
    last: dict[tuple[RunKey, Address, Address], int] = defaultdict(int)

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for envelope in event.envelopes if isinstance(event, Received) else ():
            channel = (envelope.message.run, envelope.sender, node)
            last[channel] += 1
            assert envelope.seq == last[channel]

    def latency(source: Address, target: Address, _: object) -> float:
        return drawn[len(BOXES) * BOXES.index(source) + BOXES.index(target)]

    chosen = Costs(lambda node, work: unit_costs(work), latency, lambda *_: occupied, way=way)
    run(strategy, chosen, tap)
    assert any(sender == D0 for _, sender, _ in last)


class GraphWatch:
    """A tap that knows when the broker of ``way`` gets every task's end; checks what follows."""

    def __init__(self, way: Way) -> None:
        self.released: list[str] = []
        self._box = way.box
        self._ended: dict[str, float] = {}
        self._after: dict[str, tuple[str, ...]] = {}

    def __call__(self, node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        link = LATENCY * (node != self._box)
        for envelope in event.envelopes if isinstance(event, Received) else ():
            if envelope.sender == GRAPH and isinstance(envelope.message, Segment):
                self._check(envelope.message.task, now - link)
        for output in outputs:
            self._note(output, now + link)

    def _check(self, task: str, left: float) -> None:
        """``task`` left the broker at ``left``."""
        self.released.append(task)
        assert all(left >= self._ended[name] - 1e-9 for name in self._after[task])

    def _note(self, output: Output, at: float) -> None:
        if isinstance(output, Send) and output.task:
            self._after[output.task] = output.after
        if isinstance(output, Send | Commit):
            self._ended |= dict.fromkeys(output.completes, at)
        if isinstance(output, Complete):
            self._ended |= dict.fromkeys(output.tasks, at)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_the_graph_releases_was_completed_at_the_broker_before(way: Way) -> None:
    """A task's end takes a link to the broker, and what it releases takes one from it."""
    watch = GraphWatch(way)
    run("pipedec:width=3,children=3", costs(way), watch)
    assert watch.released


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("occupied", [0.0, 0.5])
def test_a_join_reaches_the_draft_after_the_answers_that_it_waited_for(
    way: Way, occupied: float
) -> None:
    """An answer that completes a task goes by the broker, whichever way rows go."""
    under_way: set[int] = set()
    joins = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Send) and isinstance(output.envelope.message, Answer):
                under_way.add(output.envelope.message.segment)
        for envelope in event.envelopes if isinstance(event, Received) and node == D0 else ():
            message = envelope.message
            if isinstance(message, Answer):
                under_way.remove(message.segment)
            if isinstance(message, Synced):
                assert not under_way, f"{message.task} at {now}"
                joins.append(message)

    run("pipedec:width=3,children=3", costs(way, occupied), tap)
    assert joins


def test_prunes_reach_the_broker_once_and_leave_it_for_every_stage() -> None:
    """Beside stage 1 the prune of stage 1 takes one link, the others two; reports likewise."""
    got: dict[tuple[Address, type], list[float]] = defaultdict(list)
    sent: dict[Address, list[float]] = defaultdict(list)

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for envelope in event.envelopes if isinstance(event, Received) else ():
            got[node, type(envelope.message)].append(now)
        sent[node] += [now for output in outputs if isinstance(output, Commit)]
        sent[S2] += [
            now
            for output in outputs
            if isinstance(output, Send)
            and node == S2
            and isinstance(output.envelope.message, StageReport)
        ]

    run("autoregressive", costs(Way("stage-1", "straight")), tap)
    assert got[S1, Prune] == [at + LATENCY for at in sent[D0]]
    assert got[S2, Prune] == [at + 2 * LATENCY for at in sent[D0]]
    (reported,) = sent[S2]
    assert reported + 2 * LATENCY in got[D0, StageReport]
