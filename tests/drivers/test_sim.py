"""The virtual clock: what happens at one moment, what costs time, and the oracle's stages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.machine import Input, Output, Received, Run
from flowspec.core.protocol.machine import Pass as StagePass
from flowspec.core.protocol.messages import Answer, Segment, middle_node, stage_node
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.drivers.oracle import OracleStage
from flowspec.drivers.sim import UNIT, Costs, Simulation, Tap, unit_costs
from flowspec.errors import StateError
from flowspec.model.toy import ToyDrafter, ToyMiddle, ToyStage
from flowspec.strategies import build
from tests.toy import PROMPT, TARGET, generate, limits, pipeline, submit


def test_autoregressive_decoding_takes_a_pass_of_every_stage_a_token() -> None:
    """Hand-counted: at stage cost 1 and free links, N steps a token."""
    for stages in (1, 2, 5):
        record = generate("autoregressive", stages, count=10)
        times = [when for when, _ in record.committed_at]
        assert [b - a for a, b in itertools.pairwise(times)] == [float(stages)] * 9
        assert record.finish is not None
        assert record.finish.stats["tokens_per_step"] == pytest.approx(1 / stages)


def test_naive_rounds_take_drafting_and_n_plus_n_plus_1_slots() -> None:
    """Hand-counted: a draft, then N + 1 segments through N stages: 1 + N + N steps a round (5
    stages in the paper's count, D0 included).
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
    busy: dict[str, float] = {}

    def tap(node: str, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Run) and isinstance(output.work, StagePass):
                assert now >= busy.get(node, 0.0)
                busy[node] = now + 1.0

    simulation = pipeline(3, tap=tap)
    submit(simulation, "job", JobSpec(prompt_ids=PROMPT, max_new_tokens=30))
    simulation.run()
    assert set(busy) == {"s1", "s2", "s3"}


@pytest.mark.parametrize(
    "strategy", ["flowspec", "naive_pp", "flowspec:lockstep=on", "flowspec:merge=off"]
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)])
def test_oracle_stages_run_like_the_real_ones(strategy: str, sampling: Sampling) -> None:
    """Rows off the true path answer nonsense in one and truth in the other; nothing committed
    depends on it.
    """
    real = generate(strategy, 3, count=30, sampling=sampling)
    text = TARGET.decode(PROMPT, 30, sampling)
    nodes = {"d0": (DraftMachine(limits(3), build), ToyDrafter(TARGET, 0.8))}
    for stage in (1, 2, 3):
        nodes[stage_node(stage)] = (StageMachine(stage, 3), OracleStage({"job": (*PROMPT, *text)}))  # type: ignore[assignment]
    simulation = Simulation(nodes, UNIT)  # type: ignore[arg-type]
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=30, strategy=strategy, sampling=sampling)
    submit(simulation, "job", spec)
    simulation.run()
    assert tuple(simulation.jobs["job"].tokens) == text
    assert simulation.jobs["job"].committed_at == real.committed_at


def test_a_simulation_that_does_not_end_is_said() -> None:
    simulation = pipeline(2)
    submit(
        simulation, "job", JobSpec(prompt_ids=PROMPT, max_new_tokens=40, strategy="autoregressive")
    )
    with pytest.raises(StateError, match="still busy at 5"):
        simulation.run(until=5.0)


def test_a_slow_drafter_does_not_starve_the_pipeline() -> None:
    """A verdict that finds a growth half done takes what there is of it; else no growth would ever
    end.
    """
    slow = Costs(lambda node, work: 0.4 if node == "d0" else unit_costs(work))
    merged = generate("flowspec", 4, count=48, costs=slow)
    without = generate("flowspec:merge=off,expand=off", 4, count=48, costs=slow)
    assert merged.finish is not None
    assert without.finish is not None
    assert merged.finish.stats["segments"] > without.finish.stats["segments"]  # type: ignore[operator]


#: Stages and links differ in speed, so transfers meet at the nodes between them.
UNEVEN = Costs(
    lambda node, work: {"d0": 0.3, "s1": 0.5, "s2": 0.7, "m1": 0.2}.get(node, 0.4),
    lambda source, target, envelope: 0.25 + 0.5 * (target == "s2"),
)
FREE = Costs(UNEVEN.work)
EXCLUSIVE = ["flowspec", "naive_pp", "pipedec", "flowspec:lockstep=on", "specpipe", "pipespec"]


def run(
    strategy: str,
    costs: Costs,
    *,
    exclusive: bool,
    sampling: Sampling = Sampling(),
    tap: Tap | None = None,
) -> Simulation:
    """One job of 30 tokens over 3 stages, and a middle model where the strategy has one."""
    middles = int(strategy == "pipespec")
    nodes: dict[str, Any] = {
        "d0": (DraftMachine(limits(3, middles=middles), build), ToyDrafter(TARGET, 0.8))
    }
    for stage in (1, 2, 3):
        nodes[stage_node(stage)] = (StageMachine(stage, 3), ToyStage(TARGET, stage, 3))
    if middles:
        nodes[middle_node(1)] = (StageMachine(1, 3, middle=1), ToyMiddle(TARGET, 0.9))
    simulation = Simulation(nodes, costs, tap=tap, exclusive_transfers=exclusive)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=30, strategy=strategy, sampling=sampling)
    submit(simulation, "job", spec)
    simulation.run()
    return simulation


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=["T0", "T1"])
@pytest.mark.parametrize("strategy", EXCLUSIVE)
def test_exclusive_transfers_never_overlap_on_a_node_and_change_no_text(
    strategy: str, sampling: Sampling
) -> None:
    simulation = run(strategy, UNEVEN, exclusive=True, sampling=sampling)
    assert tuple(simulation.jobs["job"].tokens) == TARGET.decode(PROMPT, 30, sampling)
    assert simulation.jobs["job"].finish is not None
    assert (simulation.rows_held, simulation.jobs["job"].graph.waiting) == (0, ())
    for node in ("d0", "s1", "s2", "s3"):
        own = sorted(
            (t for t in simulation.transfers if node in (t.source, t.target)), key=lambda t: t.began
        )
        assert len(own) > 10
        assert all(a.ended <= b.began for a, b in itertools.pairwise(own))
    links = {(t.source, t.target) for t in simulation.transfers if "m1" not in (t.source, t.target)}
    assert links == {("d0", "s1"), ("s1", "s2"), ("s2", "s3"), ("s3", "d0")}, (
        "rows come from where they were computed"
    )


@pytest.mark.parametrize("strategy", EXCLUSIVE)
def test_a_transfer_is_every_segment_and_answer_that_takes_time(strategy: str) -> None:
    """Counted where they are received; of everything else none is one."""
    received: list[tuple[str, float]] = []

    def tap(node: str, now: float, event: Input, outputs: list[Output]) -> None:
        if isinstance(event, Received):
            received.extend(
                (node, now) for e in event.envelopes if isinstance(e.message, Segment | Answer)
            )

    simulation = run(strategy, UNEVEN, exclusive=True, tap=tap)
    assert sorted(received) == sorted((t.target, t.ended) for t in simulation.transfers)


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


@pytest.mark.parametrize("strategy", EXCLUSIVE)
def test_free_links_are_no_transfers(strategy: str) -> None:
    traces: list[list[object]] = []
    for flag in (False, True):
        trace: list[object] = []
        simulation = run(
            strategy, FREE, exclusive=flag, tap=lambda *step, trace=trace: trace.append(step)
        )  # type: ignore[misc]
        assert simulation.transfers == []
        traces.append(trace)
    assert traces[0] == traces[1]
