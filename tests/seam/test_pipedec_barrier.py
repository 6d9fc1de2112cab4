"""Seam: PipeDec's timestep barrier, as data in the task graph.

A sketch, not the strategy: a drafted chain instead of a width-limited tree. It proves that the
unchanged stage machine, messages, graph and simulation support the workflow of
docs/algorithms.md#timesteps: ``sync(t)`` joins every ``decode(node, t)`` including the drafter's,
and ``decode(node, t + 1)`` waits for the verdict of t at the node that has its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

from flowspec.core.drafting.drafting import Drafting, DraftingOptions
from flowspec.core.protocol.addresses import DRAFT, GRAPH, Address, stage_address
from flowspec.core.protocol.machine import (
    Allocate,
    Commit,
    Complete,
    Compute,
    Done,
    Input,
    OpenJob,
    Output,
    Poll,
    Received,
    Send,
)
from flowspec.core.protocol.messages import (
    Answer,
    Envelope,
    Hop,
    Message,
    Open,
    Prune,
    Returns,
    Segment,
    Submit,
    Synced,
)
from flowspec.core.protocol.sequence import SeqWriter
from flowspec.core.protocol.work import DraftDone, DraftPass, DraftPassDone, Work
from flowspec.core.protocol.work import Pass as StagePass
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.core.tree.accept import follow
from flowspec.core.tree.tree import Tree
from flowspec.rehearse.simulator import Costs, Simulation
from tests.addresses import D0, S1, S2, S3
from tests.toy import PROMPT, TARGET
from tests.toy_model import ToyDrafter, ToyStage

STAGES = 3
COUNT = 20
RUN = RunKey("job", 1)


def task(kind: str, t: int, node: int | str = "") -> str:
    return f"{kind}/{node}/{t}"


class WholeChain:
    """Grows one layer with one node below the deepest one."""

    def __init__(self, tip: int) -> None:
        self.tip = tip

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        return (self.tip,) if tree[self.tip].expansion is None else ()

    def rebase(self, tree: Tree) -> None:
        """The sketch starts a new growth in every timestep."""

    def segments(self, tree: Tree) -> list[list[int]]:
        expansion = tree[self.tip].expansion
        assert expansion is not None
        return [[tree.add(self.tip, expansion.tokens[0], expansion.values[0])]]


class PipeDecSketch:
    """D0 of the sketch: one layer per timestep, a verdict at every sync."""

    deadline = None
    continuing = False

    def __init__(self) -> None:
        self.tree = Tree(len(PROMPT) - 1)
        self.tree.mark_sent([self.tree.plant(PROMPT[-1], len(PROMPT) - 1, len(PROMPT) - 2)])
        self.drafting = Drafting(RUN, PROMPT, DraftingOptions(4))
        self.writer = SeqWriter()
        self.output: list[int] = []
        self.offset = len(PROMPT) - 1
        self.t = 0
        # The stage that a layer reaches in this timestep -> its nodes.
        self.layers: dict[int, list[int]] = {}
        self.number = 0
        self.working = False

    @property
    def runnable(self) -> bool:
        return not self.working and self.drafting.has_work

    def step(self, event: Input, now: float) -> Sequence[Output]:
        match event:
            case Received(envelopes):
                return [
                    output for envelope in envelopes for output in self.receive(envelope.message)
                ]
            case Poll():
                self.working = True
                work = self.drafting.next_work(self.tree)
                return [Compute(DraftPass((work,)))] if work else []
            case Done(DraftPassDone((DraftDone() as result,))):
                self.working = False
                self.drafting.done(result, self.tree)
                if self.drafting.growing and not self.drafting.needs_drafter(self.tree):
                    self.drafting.collect(self.tree)
                    return [Complete(RUN, (task("decode", self.t, 0),))]
                return []
        raise AssertionError(event)

    def receive(self, message: Message) -> list[Output]:
        if isinstance(message, Submit):
            return self.start()
        if isinstance(message, Answer):
            for node, token in zip(message.ids, message.tokens, strict=True):
                self.tree.record_choice(node, token)
            return self.sync() if self.t == 0 else []
        if isinstance(message, Synced):
            assert message.task == task("sync", self.t)
            return self.sync()
        raise AssertionError(message)

    def start(self) -> list[Output]:
        outputs: list[Output] = [
            OpenJob(RUN, PROMPT, "sketch"),
            Allocate(RUN, 400, Sampling(), Returns()),
        ]
        opened = Open(RUN, len(PROMPT), 400, Sampling())
        outputs += [self.direct(stage, opened) for stage in range(1, STAGES + 1)]
        rows = tuple(range(len(PROMPT)))
        prefill = Segment(RUN, -1, 0, rows, tuple(at - 1 for at in rows), rows, PROMPT)
        return [*outputs, self.direct(1, prefill)]

    def direct(self, stage: int, message: Message) -> Send:
        to = stage_address(stage)
        return Send(to, Envelope(DRAFT, self.writer.next(to), message))

    def sync(self) -> list[Output]:
        """The verdict of timestep t, and the start of timestep t + 1."""
        outputs: list[Output] = []
        grown = self.deepest_child()
        verdict = follow(self.tree, budget=COUNT - len(self.output), eos=TARGET.eos)
        layers = {stage + 1: nodes for stage, nodes in self.layers.items()}
        if verdict is not None:
            path = [self.tree[node] for node in verdict.accepted]
            position = self.tree[verdict.accepted[-1]].position + 1
            if verdict.successor is None or verdict.finish:
                root = self.tree.plant(verdict.tokens[-1], position, verdict.accepted[-1])
                layers = {1: [root]}
                grown = None
            else:
                root = verdict.successor
                self.tree.advance(root)
            prune = Prune(
                RUN, self.offset, verdict.accepted, root, tuple(node.id for node in self.tree)
            )
            stages = tuple(stage_address(stage) for stage in range(1, STAGES + 1))
            prunes = tuple(Envelope(DRAFT, self.writer.next(stage), prune) for stage in stages)
            outputs.append(
                Commit(
                    RUN,
                    self.offset,
                    len(self.output),
                    len(verdict.accepted),
                    verdict.tokens,
                    verdict.finish,
                    stages,
                    prunes,
                )
            )
            self.offset += len(verdict.accepted)
            self.output += verdict.tokens
            self.drafting.commit(path, root, self.tree)
            if verdict.finish:
                return outputs
        if grown is not None and grown in self.tree:
            self.tree.mark_waiting([grown])
            layers[1] = [grown]
        self.layers = {stage: nodes for stage, nodes in layers.items() if stage <= STAGES}
        return [*outputs, *self.next_timestep()]

    def deepest_child(self) -> int | None:
        deepest = max(self.tree, key=lambda node: node.depth)
        return None if deepest.selected else deepest.id

    def next_timestep(self) -> list[Output]:
        """Complete verdict(t - 1), which releases the held rows of t; sync(t) joins its decodes."""
        before = self.t
        self.t = self.t + 1
        active = [task("decode", self.t, stage) for stage in self.layers]
        synced = Envelope(GRAPH, 0, Synced(RUN, task("sync", self.t)))
        after = (*active, task("decode", self.t, 0))
        outputs: list[Output] = [Send(DRAFT, synced, task=task("sync", self.t), after=after)]
        if 1 in self.layers:
            outputs.append(self.inject(self.layers[1]))
        tip = max(self.tree, key=lambda node: node.depth).id
        self.drafting.begin(WholeChain(tip), idle=False)
        assert self.drafting.needs_drafter(self.tree)
        return [*outputs, Complete(RUN, (task("verdict", before),))]

    def inject(self, nodes: list[int]) -> Send:
        self.number += 1
        self.tree.mark_sent(nodes)
        route = tuple(
            Hop(task("decode", self.t + hop, 1 + hop), (task("verdict", self.t + hop - 1),))
            for hop in range(1, STAGES)
        )
        entries = [self.tree[node] for node in nodes]
        segment = Segment(
            RUN,
            self.number,
            0,
            tuple(nodes),
            tuple(e.parent for e in entries),
            tuple(e.position for e in entries),
            tuple(e.token for e in entries),
            task=task("decode", self.t, 1),
            route=route,
        )
        return self.direct(1, segment)


def run(
    hit_rate: float, seconds: Mapping[Address, float]
) -> tuple[PipeDecSketch, Simulation, list[tuple[Address, float, float]]]:
    spans: list[tuple[Address, float, float]] = []

    def cost(node: Address, work: Work) -> float:
        prompt = isinstance(work, StagePass) and any(0 in part.ids for part in work.parts)
        lags = isinstance(work, DraftPass) and not any(one.part.answers for one in work.drafts)
        return 0.0 if prompt or lags else seconds[node]

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Compute) and (spent := cost(node, output.work)):
                spans.append((node, now, now + spent))

    sketch = PipeDecSketch()
    nodes = {DRAFT: (sketch, ToyDrafter(TARGET, hit_rate, ranks=(0,)))}
    for stage in range(1, STAGES + 1):
        nodes[stage_address(stage)] = (StageMachine(stage, STAGES), ToyStage(TARGET, stage, STAGES))  # type: ignore[assignment]
    simulation = Simulation(nodes, Costs(cost), tap=tap)
    simulation.submit(RUN.job, JobSpec(prompt_ids=PROMPT, max_new_tokens=COUNT))
    simulation.run()
    return sketch, simulation, spans


UNEQUAL = {D0: 2.0, S1: 1.0, S2: 3.0, S3: 2.0}


@pytest.mark.parametrize("hit_rate", [0.0, 0.7, 1.0])
def test_text_is_the_targets_and_no_timestep_overlaps_the_next(hit_rate: float) -> None:
    sketch, simulation, spans = run(hit_rate, UNEQUAL)
    assert tuple(sketch.output) == TARGET.decode(PROMPT, COUNT, Sampling())
    assert simulation.jobs[RUN.job].tokens == sketch.output
    starts = sorted({start for _, start, _ in spans})
    for step, following in itertools.pairwise(starts):
        assert max(end for _, start, end in spans if start == step) <= following, (
            "two timesteps overlap"
        )


def test_at_hit_rate_one_there_is_one_token_per_timestep_after_the_fill() -> None:
    _, simulation, _spans = run(1.0, dict.fromkeys((D0, S1, S2, S3), 1.0))
    times = [when for when, _ in simulation.jobs[RUN.job].committed_at]
    assert times[1] - times[0] == STAGES, "the fill"
    assert {round(b - a, 9) for a, b in itertools.pairwise(times[1:])} == {1.0}


def test_a_miss_costs_the_refill() -> None:
    _, simulation, _ = run(0.0, dict.fromkeys((D0, S1, S2, S3), 1.0))
    times = [when for when, _ in simulation.jobs[RUN.job].committed_at]
    assert {round(b - a, 9) for a, b in itertools.pairwise(times)} == {float(STAGES)}
