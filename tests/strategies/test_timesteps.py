"""Timesteps counted by hand: the papers' costs of a hit, a miss and a starved pipeline.

The unit is one pass of a stage; drafting a layer takes as long. The prompt's first token is known
after one pass of every stage.
"""

from __future__ import annotations

import itertools

import pytest

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.machine import Compute, Done, Input, Output, Send
from flowspec.core.protocol.messages import Answer, Envelope, Segment
from flowspec.core.protocol.work import Pass as StagePass
from flowspec.core.run.spec import JobSpec
from flowspec.core.session.lifecycle import State
from flowspec.errors import ConfigError
from flowspec.rehearse.simulator import Costs
from flowspec.strategies import build
from tests.addresses import D0, S1, S2, S3
from tests.marks import crossed
from tests.strategies.scripted import commits, pipeline
from tests.toy import PROMPT, generate
from tests.toy import pipeline as toy_pipeline

LAYERED = ("pipedec", "pipedec:barrier=off", "specpipe", "specpipe:barrier=on", "pipedec_head")


def gaps(strategy: str, stages: int, hit_rate: float) -> list[float]:
    record = generate(strategy, stages, hit_rate=hit_rate, ranks=(0,), count=24)
    return [b - a for (a, _), (b, _) in itertools.pairwise(record.committed_at)]


@pytest.mark.parametrize("stages", [1, 3, 4, 7])
@pytest.mark.parametrize("strategy", LAYERED)
def test_at_hit_rate_one_there_is_one_token_per_timestep_after_the_fill(
    strategy: str, stages: int
) -> None:
    assert gaps(strategy, stages, 1.0) == [stages] + [1.0] * 22


@pytest.mark.parametrize(("strategy", "stages"), crossed(LAYERED, [1, 3, 4, 7]))
def test_a_miss_costs_a_refill_of_all_groups(strategy: str, stages: int) -> None:
    assert gaps(strategy, stages, 0.0) == [stages] * 23


@pytest.mark.parametrize(("groups", "stages", "step"), [(2, 4, 2), (3, 6, 2), (2, 6, 3), (4, 4, 1)])
def test_the_stages_of_a_group_follow_each_other_within_a_timestep(
    groups: int, stages: int, step: int
) -> None:
    """A timestep lasts as long as its largest group; the fill takes one timestep per group."""
    assert gaps(f"pipedec:groups={groups}", stages, 1.0) == [stages] + [step] * 22
    assert gaps(f"pipedec:groups={groups}", stages, 0.0) == [groups * step] * 23


def test_two_levels_per_segment_commit_two_tokens_where_both_hit() -> None:
    record = generate("specpipe:levels=2", 4, hit_rate=1.0, ranks=(0,), count=24)
    counts = [0, *(count for _, count in record.committed_at)]
    assert [b - a for a, b in itertools.pairwise(counts)] == [1, 1] + [2] * 11


#: After 3 the drafter prefers 5 (wrong) to 4 (right), so that with two nodes per layer all deeper
#: nodes descend from the wrong one; below 4 it is right.
STARVED = {
    3: [(5, -0.1), (4, -2.5)],
    5: [(50, -0.1), (51, -0.1)],
    50: [(52, -0.1), (53, -0.1)],
    51: [(54, -0.1), (55, -0.1)],
    4: [(6, -0.1), (60, -3.0)],
    6: [(7, -0.1), (61, -3.0)],
    7: [(8, -0.1), (62, -3.0)],
    8: [(9, -0.1), (63, -3.0)],
}


@pytest.mark.parametrize("strategy", ["pipedec:width=2,children=2", "specpipe:width=2,children=2"])
def test_partial_starvation(strategy: str) -> None:
    """Three stages; prompt 1 2, text 3 4 6 7 8 9.

    t=3   3, decided by prefill, enters stage 1; the drafter works below it.
    t=4   Layer {5, 4} follows; at t=5 layer {50, 51}, both below 5, the wrong one.
    t=6   3's row answers 4: a hit. 4's row is at stage 3 next; no row behind it is live, so stage 2
          idles. The drafter restarts below 4, the deepest surviving layer, whose candidates are
          known: {6, 60} enters stage 1 at once, behind the gap.
    t=7   4's row answers 6: a hit, one stage in flight. Now stage 3 idles: the gap moves on.
    t=9   6's row answers 7, and from here one token per step.

    A miss at t=7 would have cost three steps; the gap costs two.
    """
    simulation = pipeline(strategy, [1, 2, 3, 4, 6, 7, 8, 9], STARVED, stages=3)
    assert commits(simulation) == [(3, 1), (6, 1), (7, 1), (9, 1), (10, 1), (11, 1)]


def test_a_starved_group_computes_nothing() -> None:
    passes: list[tuple[float, Address, tuple[int, ...]]] = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Compute) and isinstance(output.work, StagePass):
                passes.append((now, node, output.work.parts[0].ids))

    pipeline("pipedec:width=2,children=2", [1, 2, 3, 4, 6, 7, 8, 9], STARVED, stages=3, tap=tap)
    busy = {now: {node for when, node, _ in passes if when == now} for now in (5, 6, 7, 8)}
    assert busy == {5: {S1, S2, S3}, 6: {S1, S3}, 7: {S1, S2}, 8: {S1, S2, S3}}


def test_the_static_tree_has_twenty_nodes_and_goes_as_one_segment() -> None:
    sent: list[Segment] = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        messages = [
            output.envelope.message for output in outputs if isinstance(output, Send) and node == D0
        ]
        sent.extend(
            message for message in messages if isinstance(message, Segment) and message.round
        )

    script = {
        token: [(token + 1, -0.1), (token + 40, -1.0), (token + 41, -2.0)] for token in range(3, 60)
    }
    pipeline("static_tree", [1, 2, *range(3, 24)], script, stages=2, tap=tap)
    first = sent[0]
    assert len(first.ids) == 21
    depth = {first.ids[0]: 0}
    for node, parent in zip(first.ids[1:], first.parents[1:], strict=True):
        depth[node] = depth[parent] + 1
    assert [list(depth.values()).count(level) for level in range(9)] == [1, 1, 1, 3, 3, 3, 3, 3, 3]


def test_a_static_trees_round_is_a_draft_and_a_pass_of_every_stage() -> None:
    # Nine tokens per round: eight levels and the target's own token.
    assert gaps("static_tree", 4, 1.0) == [5, 5, 5]
    assert gaps("static_tree", 4, 0.0) == [5] * 23


def test_a_chain_keeps_windows_in_flight_and_loses_them_all_at_a_miss() -> None:
    assert gaps("chain:window=1", 4, 1.0) == [4] + [1] * 22
    assert gaps("chain:window=2", 4, 1.0) == [4] + [1] * 11
    assert gaps("chain:window=1", 4, 0.0) == [4] * 23


@pytest.mark.parametrize("latency", [0.0, 2.0, 6.0])
def test_a_chain_keeps_as_many_windows_in_flight_as_hide_the_link(latency: float) -> None:
    """Three stages and four links there and back, with a fast drafter.

    If all guesses are right, the time between tokens approaches one pass on links of any latency.
    """
    slow = Costs(
        lambda node, work: 0.1 if node == D0 else 1.0, lambda source, target, envelope: latency
    )

    def seconds(strategy: str) -> float:
        record = generate(strategy, 3, hit_rate=1.0, ranks=(0,), costs=slow, count=120)
        (first, before) = record.committed_at[-40]
        (last, after) = record.committed_at[-1]
        return (last - first) / (after - before)

    assert seconds("chain:window=1") == pytest.approx(1.0, abs=0.05)
    assert seconds("chain:window=1,in_flight=3") == pytest.approx(1.0 + latency * 4 / 3, abs=0.1)


def seconds_per_token(strategy: str, latency: float) -> float:
    """Seconds between tokens on three stages with a fast drafter that is nearly always right."""
    costs = Costs(
        lambda node, work: 0.1 if node == D0 else 1.0, lambda source, target, envelope: latency
    )
    record = generate(strategy, 3, hit_rate=0.97, ranks=(0,), costs=costs, count=300)
    (first, before) = record.committed_at[0]
    (last, after) = record.committed_at[-1]
    return (last - first) / (after - before)


@pytest.mark.parametrize("latency", [0.0, 0.5, 2.0, 6.0])
def test_a_chain_left_to_itself_is_as_fast_as_the_best_fixed_depth(latency: float) -> None:
    fixed = {
        depth: seconds_per_token(f"chain:in_flight={depth}", latency) for depth in (1, 2, 4, 8, 16)
    }
    assert seconds_per_token("chain", latency) <= min(fixed.values()) * 1.03


def test_a_chain_drafts_on_while_a_slot_is_free() -> None:
    """After a verdict that overtakes a growth with nothing to send, the drafter has work."""
    idle = []
    drafting = False

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        nonlocal drafting
        if node != D0:
            return
        machine = simulation.machine(D0)
        assert isinstance(machine, DraftMachine)
        drafting = any(isinstance(output, Compute) for output in outputs) or (
            drafting and not isinstance(event, Done)
        )
        for session in machine.sessions.values():
            free = (
                session.tally.rounds
                and session.in_flight < session.strategy.max_in_flight
                and session.lifecycle.state is not State.CLOSING
            )
            if free and not drafting and not machine.runnable:
                idle.append(now)

    costs = Costs(
        lambda node, work: 0.7 if node == D0 else 1.0, lambda source, target, envelope: 6.0
    )
    simulation = toy_pipeline(3, 1.0, ranks=(0,), costs=costs, tap=tap)
    simulation.submit("job", JobSpec(prompt_ids=PROMPT, max_new_tokens=92, strategy="chain"))
    simulation.run()
    assert not idle


def test_late_answers_do_not_fill_a_chain_up_to_its_limit() -> None:
    """Every sixth answer is late, and the next ones arrive with it; the depth stays bounded."""
    depths: set[int] = set()
    late = itertools.cycle([0.0] * 5 + [3.0])
    last = 0.0

    def link(source: Address, target: Address, envelope: Envelope) -> float:
        nonlocal last
        if target != D0 or not isinstance(envelope.message, Answer):
            return 0.0
        last = max(simulation.now + next(late), last + 1e-6)
        return last - simulation.now

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        machine = simulation.machine(D0)
        assert isinstance(machine, DraftMachine)
        depths.update(session.strategy.max_in_flight for session in machine.sessions.values())

    costs = Costs(lambda node, work: 0.1 if node == D0 else 1.0, link)
    simulation = toy_pipeline(3, 0.97, ranks=(0,), costs=costs, tap=tap)
    simulation.submit("job", JobSpec(prompt_ids=PROMPT, max_new_tokens=120, strategy="chain"))
    simulation.run()
    assert max(depths) <= 5


@pytest.mark.parametrize(
    ("text", "fault"), [("1-0-2", "shape"), ("x", "shape"), ("9-9-9-9", "at most 512")]
)
def test_a_static_shape_must_be_one(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        build(f"static_tree:shape={text}", 2)


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ("7" * 5000, "expected 1 to 16 children per level"),
        ("1-" + "0" * 5000 + "1", "expected 1 to 16 children per level"),
        ("x" * 5000, "expected 1 to 16 children per level"),
        ("16-" * 5000 + "16", "expected at most 512"),
        ("1-" * 5000 + "1", "expected at most 512"),
    ],
    ids=["huge", "zeros", "no number", "wide", "deep"],
)
def test_a_long_static_shape_is_refused_in_one_short_line(shape: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as raised:
        build(f"static_tree:shape={shape}", 2)
    assert len(str(raised.value)) < 200
    assert "\n" not in str(raised.value)
