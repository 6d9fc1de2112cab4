"""The virtual clock: simultaneous events, the cost of actions, and the oracle's stages."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flowspec.core.drafting.drafting import Drafting
from flowspec.core.job.draft_run import REPORT_SECONDS
from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import Address, middle_address, stage_address
from flowspec.core.protocol.machine import Commit, Compute, Finish, Input, Output, Received, Send
from flowspec.core.protocol.messages import Answer, Segment, Synced
from flowspec.core.protocol.work import Pass as StagePass
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import StateError
from flowspec.rehearse.compare.oracle import OracleStage
from flowspec.rehearse.simulator import UNIT, Costs, Simulation, Tap, unit_costs
from flowspec.strategies import build
from tests.addresses import D0, M1, S1, S2, S3
from tests.toy import PROMPT, TARGET, generate, limits, pipeline
from tests.toy_model import ToyDrafter, ToyMiddle, ToyStage


def test_autoregressive_decoding_takes_a_pass_of_every_stage_a_token() -> None:
    """Counted by hand: at stage cost 1 and free links, N steps per token."""
    for stages in (1, 2, 5):
        record = generate("autoregressive", stages, count=10)
        times = [when for when, _ in record.committed_at]
        assert [b - a for a, b in itertools.pairwise(times)] == [float(stages)] * 9
        assert record.finish is not None
        assert record.finish.stats["tokens_per_step"] == pytest.approx(1 / stages)


def test_naive_rounds_take_drafting_and_n_plus_n_plus_1_slots() -> None:
    """Counted by hand: a draft and N + 1 segments through N stages take 1 + N + N steps.

    The papers' "5 stages" include D0: N = 4.
    """
    record = generate("naive_pp", 4, count=10, hit_rate=0.0)
    times = [when for when, _ in record.committed_at]
    assert {b - a for a, b in itertools.pairwise(times)} == {9.0}


def test_links_add_their_time_to_every_hop() -> None:
    costs = Costs(lambda node, work: unit_costs(work), lambda source, target, envelope: 0.25)
    record = generate("autoregressive", 3, count=5, costs=costs)
    times = [when for when, _ in record.committed_at]
    assert {b - a for a, b in itertools.pairwise(times)} == {3 + 4 * 0.25}


def test_a_resource_does_one_thing_at_a_time() -> None:
    busy: dict[Address, float] = {}

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Compute) and isinstance(output.work, StagePass):
                assert now >= busy.get(node, 0.0)
                busy[node] = now + 1.0

    simulation = pipeline(3, tap=tap)
    simulation.submit("job", JobSpec(prompt_ids=PROMPT, max_new_tokens=30))
    simulation.run()
    assert set(busy) == {S1, S2, S3}


@pytest.mark.parametrize(
    "strategy", ["flowspec", "naive_pp", "flowspec:lockstep=on", "flowspec:merge=off"]
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)])
def test_oracle_stages_run_like_the_real_ones(strategy: str, sampling: Sampling) -> None:
    """Answers for rows off the true path differ, but no commit depends on them."""
    real = generate(strategy, 3, count=30, sampling=sampling)
    text = TARGET.decode(PROMPT, 30, sampling)
    nodes: dict[Address, Any] = {
        D0: (DraftMachine(limits(3), build), ToyDrafter(TARGET, 0.8)),
    }
    for stage in (1, 2, 3):
        oracle = OracleStage({"job": (*PROMPT, *text)})
        nodes[stage_address(stage)] = (StageMachine(stage, 3), oracle)
    simulation = Simulation(nodes, UNIT)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=30, strategy=strategy, sampling=sampling)
    simulation.submit("job", spec)
    simulation.run()
    assert tuple(simulation.jobs["job"].tokens) == text
    assert simulation.jobs["job"].committed_at == real.committed_at
    assert simulation.jobs["job"].prompt == PROMPT


def test_a_job_that_is_revoked_while_its_stages_report_has_no_result() -> None:
    """The ledger has the revocation at once; it reaches no worker before the draft gives up."""

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        if any(isinstance(output, Commit) and output.finish for output in outputs):
            closing_at.append(now)
        if closing_at and now > closing_at[0] and not revoked:
            revoked.append(now)
            simulation.revoke("job", at=now + 2 * REPORT_SECONDS)

    closing_at: list[float] = []
    revoked: list[float] = []
    costs = Costs(lambda node, work: unit_costs(work), lambda source, target, envelope: 0.25)
    simulation = pipeline(3, costs=costs, tap=tap)
    simulation.submit("job", JobSpec(prompt_ids=PROMPT, max_new_tokens=8))
    simulation.run()
    assert revoked
    assert len(simulation.jobs["job"].tokens) == 8
    assert simulation.jobs["job"].finish is None


def test_a_job_is_submitted_once() -> None:
    simulation = pipeline(2)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=4)
    simulation.submit("job", spec)
    with pytest.raises(StateError, match="job job was submitted before"):
        simulation.submit("job", spec)


def test_a_simulation_that_does_not_end_is_said() -> None:
    simulation = pipeline(2)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=40, strategy="autoregressive")
    simulation.submit("job", spec)
    with pytest.raises(StateError, match="still busy at 5"):
        simulation.run(until=5.0)


def test_what_a_slow_drafter_has_drafted_before_a_verdict_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Costs(lambda node, work: 0.4 if node == D0 else unit_costs(work))
    kept = generate("flowspec", 4, count=48, costs=slow)
    monkeypatch.setattr(Drafting, "collect_overtaken", lambda drafting, tree: [])
    dropped = generate("flowspec", 4, count=48, costs=slow)
    assert kept.tokens == dropped.tokens
    assert kept.finish is not None
    assert dropped.finish is not None
    assert kept.finish.stats["segments"] > dropped.finish.stats["segments"]  # type: ignore[operator]


#: Stages and links differ in speed, so that transfers compete for nodes.
UNEVEN = Costs(
    lambda node, work: {D0: 0.3, S1: 0.5, S2: 0.7, M1: 0.2}.get(node, 0.4),
    lambda source, target, envelope: 0.25 + 0.5 * (target == S2),
)
FREE = Costs(UNEVEN.work)
#: As of a profile: a latency, and a time that a message keeps its directed link.
SHAPED = Costs(UNEVEN.work, lambda source, target, envelope: 0.25, lambda *_: 0.5)
EXCLUSIVE = ["flowspec", "naive_pp", "pipedec", "flowspec:lockstep=on", "specpipe", "pipespec"]


def prepared(
    strategy: str,
    costs: Costs,
    *,
    exclusive: bool,
    sampling: Sampling = Sampling(),
    tap: Tap | None = None,
) -> Simulation:
    """One job of 30 tokens over 3 stages, with a middle model if the strategy needs one."""
    middles = int(strategy == "pipespec")
    nodes: dict[Address, Any] = {
        D0: (DraftMachine(limits(3, middles=middles), build), ToyDrafter(TARGET, 0.8)),
    }
    for stage in (1, 2, 3):
        nodes[stage_address(stage)] = (StageMachine(stage, 3), ToyStage(TARGET, stage, 3))
    if middles:
        nodes[middle_address(1)] = (StageMachine(1, 3, middle=1), ToyMiddle(TARGET, 0.9))
    simulation = Simulation(nodes, replace(costs, exclusive=exclusive), tap=tap)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=30, strategy=strategy, sampling=sampling)
    simulation.submit("job", spec)
    return simulation


def run(strategy: str, costs: Costs, *, exclusive: bool, tap: Tap | None = None) -> Simulation:
    """As ``prepared``, to the end."""
    simulation = prepared(strategy, costs, exclusive=exclusive, tap=tap)
    simulation.run()
    return simulation


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=["T0", "T1"])
@pytest.mark.parametrize("strategy", EXCLUSIVE)
def test_exclusive_transfers_never_overlap_on_a_node_and_change_no_text(
    strategy: str, sampling: Sampling
) -> None:
    waiting: list[tuple[str, ...]] = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        if any(isinstance(output, Finish) for output in outputs):
            waiting.append(simulation.graph("job").waiting)

    simulation = prepared(strategy, UNEVEN, exclusive=True, sampling=sampling, tap=tap)
    simulation.run()
    assert tuple(simulation.jobs["job"].tokens) == TARGET.decode(PROMPT, 30, sampling)
    assert simulation.jobs["job"].finish is not None
    assert simulation.rows_held == 0
    assert waiting == [()], "the graph has no task left when the job ends"
    for node in (D0, S1, S2, S3):
        own = sorted(
            (t for t in simulation.transfers if node in (t.source, t.target)), key=lambda t: t.began
        )
        assert len(own) > 10
        assert all(a.ended <= b.began for a, b in itertools.pairwise(own))
    links = {(t.source, t.target) for t in simulation.transfers if M1 not in (t.source, t.target)}
    assert links == {(D0, S1), (S1, S2), (S2, S3), (S3, D0)}, (
        "rows come from where they were computed"
    )


@pytest.mark.parametrize("strategy", EXCLUSIVE)
def test_a_transfer_is_every_segment_and_answer_that_takes_time(strategy: str) -> None:
    """Counted at the receivers; no other message is a transfer."""
    received: list[tuple[Address, float]] = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        if isinstance(event, Received):
            received.extend(
                (node, now) for e in event.envelopes if isinstance(e.message, Segment | Answer)
            )

    simulation = run(strategy, UNEVEN, exclusive=True, tap=tap)
    assert Counter(received) == Counter((t.target, t.ended) for t in simulation.transfers)


@pytest.mark.parametrize("strategy", EXCLUSIVE)
def test_a_transfer_lasts_for_its_own_bytes_and_the_latency(strategy: str) -> None:
    """It waits for the transfers before it, and is not charged for them once more."""
    transfers = run(strategy, SHAPED, exclusive=True).transfers
    assert [one.ended - one.began for one in transfers] == pytest.approx([0.75] * len(transfers))
    for node in (D0, S1, S2, S3):
        own = sorted(one.began for one in transfers if node in (one.source, one.target))
        assert all(b - a > 0.75 - 1e-9 for a, b in itertools.pairwise(own))


def test_waiting_for_both_ends_costs_time_where_transfers_meet_and_none_where_they_do_not() -> None:
    def ends(strategy: str, costs: Costs) -> tuple[float, float]:
        plain, exclusive = (
            run(strategy, costs, exclusive=flag).jobs["job"] for flag in (False, True)
        )
        return plain.committed_at[-1][0], exclusive.committed_at[-1][0]

    alone, same = ends("autoregressive", UNEVEN)
    assert alone == pytest.approx(same)
    free, waiting = ends("flowspec", UNEVEN)
    assert free < waiting


def note_step(
    trace: list[object], node: Address, now: float, event: Input, outputs: list[Output]
) -> None:
    trace.append((node, now, event, outputs))


@pytest.mark.parametrize("strategy", EXCLUSIVE)
def test_free_links_are_no_transfers(strategy: str) -> None:
    traces: list[list[object]] = []
    for flag in (False, True):
        trace: list[object] = []
        tap = partial(note_step, trace)
        simulation = run(strategy, FREE, exclusive=flag, tap=tap)
        assert simulation.transfers == []
        traces.append(trace)
    assert traces[0] == traces[1]


@pytest.mark.parametrize("exclusive", [False, True], ids=["plain", "exclusive"])
@pytest.mark.parametrize("occupied", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("drafting", [0.5, 1.7, 3.0])
def test_a_join_reaches_d0_after_the_answers_and_completions_before_it(
    drafting: float, occupied: float, exclusive: bool
) -> None:
    """A drafter slower than the stages releases the joins, on D0, where they travel no link.

    A stage completes its group's task when it sends to the next group. D0 may know of that a
    link's latency later.
    """
    latency = 0.5
    under_way: set[int] = set()
    completed_at = [0.0]
    joins = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Send) and isinstance(output.envelope.message, Answer):
                under_way.add(output.envelope.message.segment)
            if isinstance(output, Send) and output.completes and node != D0:
                completed_at.append(now)
        if node == D0 and isinstance(event, Received):
            for message in (envelope.message for envelope in event.envelopes):
                if isinstance(message, Answer):
                    under_way.remove(message.segment)
                if isinstance(message, Synced):
                    assert not under_way, f"{message.task} at {now}"
                    assert now >= completed_at[-1] + latency - 1e-9, f"{message.task} at {now}"
                    joins.append(message)

    costs = Costs(
        lambda node, work: drafting if node == D0 else 0.5,
        lambda source, target, envelope: latency * (source != target),
        lambda *_: occupied,
    )
    simulation = run("pipedec:width=3,children=3", costs, exclusive=exclusive, tap=tap)
    assert tuple(simulation.jobs["job"].tokens) == TARGET.decode(PROMPT, 30, Sampling())
    assert joins
