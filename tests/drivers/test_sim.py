"""The virtual clock: what happens at one moment, what costs time, and the oracle's stages."""

from __future__ import annotations

import itertools

import pytest

from flowspec.core.jobs import JobSpec
from flowspec.core.machine import Input, Output, Run
from flowspec.core.machine import Pass as StagePass
from flowspec.core.messages import stage_node
from flowspec.core.sampling import Sampling
from flowspec.core.stage import StageMachine
from flowspec.drivers.oracle import OracleStage
from flowspec.drivers.sim import UNIT, Costs, Simulation, unit_costs
from flowspec.errors import StateError
from flowspec.model.toy import ToyDrafter
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
    """Hand-counted: a draft, then N + 1 segments through N stages: 1 + N + N steps a round (5 stages in
    the paper's count, D0 included)."""
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


@pytest.mark.parametrize("strategy", ["flowspec", "naive_pp", "flowspec:lockstep=on", "flowspec:merge=off"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)])
def test_oracle_stages_run_like_the_real_ones(strategy: str, sampling: Sampling) -> None:
    """Rows off the true path answer nonsense in one and truth in the other; nothing committed depends on it."""
    from flowspec.core.draft import DraftMachine

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
    submit(simulation, "job", JobSpec(prompt_ids=PROMPT, max_new_tokens=40, strategy="autoregressive"))
    with pytest.raises(StateError, match="still busy at 5"):
        simulation.run(until=5.0)


def test_a_slow_drafter_does_not_starve_the_pipeline() -> None:
    """A verdict that finds a growth half done takes what there is of it; else no growth would ever end."""
    slow = Costs(lambda node, work: 0.4 if node == "d0" else unit_costs(work))
    merged = generate("flowspec", 4, count=48, costs=slow)
    without = generate("flowspec:merge=off,expand=off", 4, count=48, costs=slow)
    assert merged.finish is not None
    assert without.finish is not None
    assert merged.finish.stats["segments"] > without.finish.stats["segments"]  # type: ignore[operator]
