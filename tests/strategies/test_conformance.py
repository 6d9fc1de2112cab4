"""Properties of every registered strategy, on the toy model and the virtual clock."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from typing import Any

import pytest

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, GRAPH, Address
from flowspec.core.protocol.graph import TaskGraph
from flowspec.core.protocol.machine import (
    Commit,
    Compute,
    Discard,
    Done,
    Input,
    Output,
    Received,
    Send,
)
from flowspec.core.protocol.messages import Answer, Close, Envelope, Message, Prune, Segment
from flowspec.core.protocol.work import Pass as StagePass
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.tree.tree import Status, Tree
from flowspec.rehearse.simulator import Costs, Simulation, unit_costs
from flowspec.strategies import EXACT, STRATEGIES, build
from tests.addresses import D0, S1, S2, S3
from tests.marks import crossed, heavy
from tests.toy import PROMPT, TARGET, generate, pipeline

LOSSY = sorted(set(STRATEGIES) - set(EXACT))
VARIANTS = [
    *EXACT,
    "flowspec:lockstep=on",
    "flowspec:merge=off",
    "flowspec:expand=off",
    "flowspec:order=generation",
    "flowspec:nodes=5,width=2,loops=2,segment=3",
    "pruned_pp:order=score,lockstep=on",
    "naive_pp:lockstep=on",
    "flowspec:merge=off,expand=off,lockstep=on",
    "flowspec:nodes=300,segment=40",
    "flowspec:coupled=off",
    "pipedec:groups=2",
    "pipedec:barrier=off",
    "pipedec:width=4,children=2",
    "specpipe:width=auto",
    "specpipe:levels=2",
    "specpipe:barrier=on",
    "specpipe:width=3,children=2,in_flight=9",
    "chain:window=1",
    "chain:window=5,in_flight=3",
    "chain:confidence=30",
    "pipespec:window=4",
    "pipespec:lookahead=4",
    "pipespec:window=3,lookahead=3",
    "speculative:lookahead=3",
    "speculative:lookahead=6,confidence=50",
    "static_tree:shape=2-2-1",
    "static_tree:overlap=on",
    "static_tree:shape=2-1-2,overlap=on",
]
GREEDY = Sampling()
SAMPLED = [Sampling(temperature=1.0, seed=seed) for seed in range(3)]
NUCLEUS = Sampling(temperature=0.6, top_k=20, top_p=0.9, seed=7)


SAMPLINGS = (GREEDY, SAMPLED[0], NUCLEUS)


@pytest.mark.parametrize(("variant", "sampling"), crossed(VARIANTS, SAMPLINGS, keep=4))
def test_ids_equal_plain_decoding(variant: str, sampling: Sampling) -> None:
    check_ids(variant, 4, 0.6, sampling)


@pytest.mark.parametrize(
    ("variant", "shape", "sampling"),
    crossed(EXACT, ((1, 0.6), (2, 1.0), (4, 0.0), (7, 0.6)), SAMPLINGS, keep=6),
)
def test_ids_equal_plain_decoding_in_any_pipeline(
    variant: str, shape: tuple[int, float], sampling: Sampling
) -> None:
    """``shape``: stages, and how many of the drafter's tokens are right."""
    check_ids(variant, *shape, sampling)


def check_ids(variant: str, stages: int, hit_rate: float, sampling: Sampling) -> None:
    record = generate(variant, stages, hit_rate=hit_rate, sampling=sampling, count=40)
    assert record.finish is not None
    assert record.finish.error == ""
    expected = TARGET.decode(PROMPT, 40, sampling)
    assert tuple(record.tokens) == expected
    assert record.finish.reason == ("eos" if expected[-1] in TARGET.eos else "length")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_budget_is_exact(variant: str) -> None:
    for count in (1, 3):
        record = generate(variant, 3, count=count, hit_rate=1.0)
        assert tuple(record.tokens) == TARGET.decode(PROMPT, count, GREEDY)
        assert record.finish is not None
        assert record.finish.reason == "length"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_end_of_the_context_is_the_end(variant: str) -> None:
    prompt = PROMPT + tuple(range(2, 52)) * 10
    assert TARGET.context - len(prompt) == 2
    record = generate(variant, 2, prompt=prompt, count=50)
    assert tuple(record.tokens) == TARGET.decode(prompt, 50, GREEDY)[:2]


@pytest.mark.parametrize("variant", EXACT)
def test_seeds_are_reproduced_and_differ(variant: str) -> None:
    texts = [
        tuple(generate(variant, 2, sampling=sampling, count=30).tokens) for sampling in SAMPLED
    ]
    assert texts == [TARGET.decode(PROMPT, 30, sampling) for sampling in SAMPLED]
    assert len(set(texts)) == len(texts)


class Watch:
    """Records what a run sends, answers and computes; checks trees after every step."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.answered: Counter[int] = Counter()
        self.rows: dict[int, set[int]] = {}
        self.sent_rows: set[int] = set()
        self.dropped: dict[int, set[int]] = {}  # rows that a commit drops, by its offset
        self.stages = {stage: StageWatch(stage, self) for stage in (S1, S2, S3)}
        self.trace: list[object] = []
        self.draft: DraftMachine | None = None
        self.graph: TaskGraph | None = None

    def __call__(self, node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        self.trace.append((node, now, event, tuple(outputs)))
        if node in self.stages:
            self.stages[node](event, outputs)
        if node != D0 or self.draft is None:
            return
        for session in self.draft.sessions.values():
            session.tree.check()
            assert session.in_flight <= session.strategy.max_in_flight
        for output in outputs:
            if isinstance(output, Commit):
                prune = output.prunes[0].message
                assert isinstance(prune, Prune)
                left = {*prune.accepted, *prune.retained, prune.root}
                self.dropped[prune.offset] = self.sent_rows - left
            if (
                isinstance(output, Send)
                and isinstance(segment := output.envelope.message, Segment)
                and segment.round
            ):
                assert self.sent_rows.isdisjoint(segment.ids), "a row is sent twice"
                self.sent_rows.update(segment.ids)
                self.sent[segment.segment] += 1
                self.rows[segment.segment] = set(segment.ids)
        if isinstance(event, Received):
            for envelope in event.envelopes:
                if isinstance(envelope.message, Answer):
                    self.answered[envelope.message.segment] += 1


class StageWatch:
    """Checks that one stage forwards the live rows of each segment, and nothing of a void one.

    ``void``: segments whose rows were all dead before or after their pass. ``left``: those that the
    stage had not computed when the text was complete.
    """

    def __init__(self, stage: Address, watch: Watch) -> None:
        self.stage = stage
        self.watch = watch
        self.queue: list[Segment] = []
        self.dead: set[int] = set()
        self.void: list[int] = []
        self.left: list[int] = []
        self.closed = False

    def __call__(self, event: Input, outputs: list[Output]) -> None:
        if isinstance(event, Received):
            for envelope in event.envelopes:
                self.receive(envelope.message)
        sent = [
            output.envelope.message
            for output in outputs
            if isinstance(output, Send)
            and isinstance(output.envelope.message, Segment | Answer)
            and output.envelope.message.segment in self.watch.rows
        ]
        over = isinstance(event, Done) or any(isinstance(output, Discard) for output in outputs)
        if not over or not self.queue or self.queue[0].segment not in self.watch.rows:
            assert sent == []
            self.queue = self.queue[over:]
            return
        segment = self.queue.pop(0)
        live = tuple(node for node in segment.ids if node not in self.dead)
        assert [message.ids for message in sent] == ([live] if live or segment.marker else [])
        if not sent:
            self.void.append(segment.segment)

    def receive(self, message: Message) -> None:
        if isinstance(message, Segment):
            self.queue.append(message)
        if isinstance(message, Prune):
            self.dead |= self.watch.dropped[message.offset]
        self.closed = self.closed or isinstance(message, Close)
        if self.closed:
            self.left += [segment.segment for segment in self.queue]
            self.queue = []


def watched(variant: str, stages: int, hit_rate: float, costs: Costs) -> tuple[Watch, Simulation]:
    watch = Watch()
    simulation = pipeline(stages, hit_rate, costs=costs, tap=watch)
    machine = simulation.machine(D0)
    assert isinstance(machine, DraftMachine)
    watch.draft = machine
    simulation.submit("job", JobSpec(prompt_ids=PROMPT, max_new_tokens=40, strategy=variant))
    watch.graph = simulation.graph("job")
    simulation.run()
    return watch, simulation


UNIT = Costs(lambda node, work: unit_costs(work))
#: Slow links, a fast drafter, unequal stages: answers and prunes meet segments everywhere.
RAGGED = Costs(
    lambda node, work: {D0: 0.3, S1: 1.0, S2: 1.7, S3: 0.6}.get(node, 1.1),
    lambda source, target, envelope: 0.45,
)


@pytest.mark.parametrize("variant", [*EXACT, *crossed(VARIANTS[len(EXACT) :], keep=3)])
def test_segments_are_answered_once_or_void_and_nothing_is_left_behind(variant: str) -> None:
    """And the same input gives the same trace."""
    watch, simulation = watched(variant, 3, 0.7, RAGGED)
    check_segments(watch, simulation)
    check_nothing_is_left(watch, simulation)
    assert watched(variant, 3, 0.7, RAGGED)[0].trace == watch.trace


@pytest.mark.parametrize("variant", EXACT)
def test_segments_are_answered_once_or_void_where_all_is_equally_fast(variant: str) -> None:
    check_segments(*watched(variant, 3, 0.7, UNIT))


def check_segments(watch: Watch, simulation: Simulation) -> None:
    """Every segment is answered once or void."""
    record = simulation.jobs["job"]
    assert tuple(record.tokens) == TARGET.decode(PROMPT, 40, GREEDY)
    ends = Counter(watch.answered)
    for stage in watch.stages.values():
        ends.update({*stage.void, *stage.left} & watch.rows.keys())
        for segment in stage.left:
            assert watch.rows.get(segment, set()) <= stage.dead
    assert set(watch.sent.values()) == {1}
    assert {segment: ends[segment] for segment in watch.sent} == dict.fromkeys(watch.sent, 1)
    assert watch.draft is not None
    stats = record.finish.stats if record.finish else {}
    assert isinstance(stats["rows"], dict)
    committed = len(record.tokens) - 1
    assert stats["rows"]["useful"] == committed * 3, "every committed row passed every stage once"


def check_nothing_is_left(watch: Watch, simulation: Simulation) -> None:
    assert watch.graph is not None
    assert watch.graph.waiting == ()
    assert watch.draft is not None
    assert watch.draft.sessions == {}
    assert simulation.rows_held == 0
    for stage in (S1, S2, S3):
        assert simulation.machine(stage).open_runs == ()  # type: ignore[attr-defined]
        assert simulation.executor(stage).layers.runs == ()  # type: ignore[union-attr]


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "lockstep" in v])
def test_lockstep_starts_no_step_before_the_answer_of_n_steps_before(variant: str) -> None:
    """With slow answers the last stage must not run ahead of the draft worker's verdicts."""
    slow = Costs(
        lambda node, work: unit_costs(work),
        lambda source, target, envelope: 5.0 if target == D0 else 0.0,
    )
    watch, _ = watched(variant, 2, 1.0, slow)
    answers = 0
    running = 0
    held_back = False
    for node, _, event, outputs in watch.trace:  # type: ignore[misc]
        if node == D0 and isinstance(event, Received):
            answers += sum(isinstance(envelope.message, Answer) for envelope in event.envelopes)
        for output in outputs:
            if node == S2 and isinstance(output, Compute) and isinstance(output.work, StagePass):
                running += min(output.work.parts[0].ids) >= len(PROMPT)
                # Segment i is at stage 2 in step i + 1, after verdict i - 1. The first answer is
                # the prompt's.
                assert running <= answers - 1 + 1
                held_back |= running == answers - 1 + 1
    assert held_back, "the barrier never held anything back"


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_mode_says_so_in_name_and_result_and_ends(name: str) -> None:
    assert "lossy" in name
    for sampling in (GREEDY, SAMPLED[0]):
        record = generate(name, 3, hit_rate=0.6, sampling=sampling, count=40)
        assert record.finish is not None
        assert record.finish.error == ""
        assert record.finish.stats["lossy"] == name.rpartition("_")[2]
        assert 1 <= len(record.tokens) <= 40


def test_the_relaxed_mode_hits_where_the_exact_one_misses() -> None:
    exact, relaxed = (
        generate(name, 3, hit_rate=0.3) for name in ("specpipe", "specpipe_lossy_relaxed")
    )
    assert exact.finish is not None
    assert relaxed.finish is not None
    assert relaxed.finish.stats["hit_rate"] == 1.0  # every child is among the 256 best of 64 tokens
    assert exact.finish.stats["hit_rate"] < 0.6  # type: ignore[operator]
    assert relaxed.tokens != exact.tokens
    assert "lossy" not in exact.finish.stats


def test_the_nucleus_mode_takes_the_drafts_favourite_of_those_the_target_likes() -> None:
    tree = Tree(0)
    root = tree.plant(1, 0, -1)
    best = tree.add(root, 5, -0.1)
    second = tree.add(root, 6, -0.2)
    tree.mark_waiting([best, second])
    mode = build("specpipe_lossy_nucleus:nucleus=50", 2)
    node = tree[root]

    def decided(*top: tuple[int, float]) -> int:
        tree.mark_sent([entry.id for entry in tree if entry.status is Status.WAITING])
        tree.record_choice(root, 7, top)
        return mode.decide(tree, node, 7)

    top = [(7, math.log(0.4)), (6, math.log(0.3)), (5, math.log(0.2))]
    assert decided(*top) == 6, "5 lies outside the nucleus"
    assert decided((5, math.log(0.3)), *top) == 5
    assert decided((7, math.log(0.9))) == 7, "a miss emits the target's own"


class Meddled(Simulation):
    """A broker that delivers some messages twice, and can lose one message."""

    def __init__(
        self, *arguments: Any, lose: tuple[type, Address] | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._lose = lose
        self._seen = 0
        self.lost = False

    def _deliver(self, source: Address, to: Address, entry: tuple[Envelope, ...]) -> None:
        (envelope,) = entry
        if self._lose is not None and not self.lost and self._is_lost(to, envelope):
            self.lost = True
            return
        super()._deliver(source, to, entry)
        if zlib.crc32(f"{to} {envelope.sender} {envelope.seq}".encode()) % 3 == 0:
            super()._deliver(source, to, entry)

    def _is_lost(self, to: Address, envelope: Envelope) -> bool:
        assert self._lose is not None
        kind, node = self._lose
        self._seen += to == node and isinstance(envelope.message, kind)
        return self._seen == 3


def meddled(variant: str, **options: Any) -> Meddled:
    """A run in which messages of different senders overtake each other on the way to a receiver.

    Each sender's messages stay in order. Those that the graph releases keep their place among the
    draft worker's own: one script writes a commit and the segments it releases to one log.
    """
    arrived: dict[tuple[Address, Address], float] = {}

    def link(source: Address, to: Address, envelope: Envelope) -> float:
        now = simulation.now
        sender = DRAFT if envelope.sender == GRAPH else envelope.sender
        wanted = now + zlib.crc32(f"{source} {to} {envelope.seq}".encode()) % 100 / 30
        # A margin over the previous one, since rounding could reorder equal times.
        arrived[sender, to] = max(wanted, arrived.get((sender, to), 0.0) + 1e-6)
        return arrived[sender, to] - now

    plain = pipeline(3, 0.7)
    nodes = {node: (plain.machine(node), plain.executor(node)) for node in (D0, S1, S2, S3)}
    simulation = Meddled(nodes, Costs(RAGGED.work, link), **options)
    simulation.submit("job", JobSpec(prompt_ids=PROMPT, max_new_tokens=40, strategy=variant))
    simulation.run()
    return simulation


@pytest.mark.parametrize("variant", [*EXACT, *map(heavy, VARIANTS[len(EXACT) :])])
def test_duplicates_delays_and_reordered_streams_do_not_change_the_text(variant: str) -> None:
    assert tuple(meddled(variant).jobs["job"].tokens) == TARGET.decode(PROMPT, 40, GREEDY)


@pytest.mark.parametrize(
    ("variant", "lose"),
    crossed(EXACT, ((Segment, S1), (Segment, S3), (Prune, S2), (Answer, D0))),
)
def test_a_lost_message_ends_in_a_clear_failure(variant: str, lose: tuple[type, Address]) -> None:
    simulation = meddled(variant, lose=lose)
    record = simulation.jobs["job"]
    assert simulation.lost
    assert record.finish is not None, "it hangs"
    assert record.finish.reason == "error"
    assert (
        "lost" in record.finish.error
        or "missing" in record.finish.error
        or "lacks" in record.finish.error
    )
    assert tuple(record.tokens) == TARGET.decode(PROMPT, 40, GREEDY)[: len(record.tokens)]
