"""The memo gives the wrapped drafter's results and computes nothing twice.

With exact arithmetic (the toy) whole traces are equal. Real models sum in an order that depends on
the other rows of a pass; there, answers are equal if their values agree to 1e-4 and their tokens
are the same except where two values are that close. Either order is then correct, and may lead to
another tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.machine import Input, Output
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, DraftPass, Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import StateError
from flowspec.model.base import DraftExecutor, DraftsAlone, RowArray
from flowspec.model.drafters.drafter_choice import ChoiceDrafter
from flowspec.model.drafters.ngram import NgramDrafter
from flowspec.model.drafters.sources import load_sources
from flowspec.model.weights.directory import open_directory
from flowspec.rehearse.compare import memo as module
from flowspec.rehearse.compare.memo import WIDTH, MemoDrafter
from flowspec.rehearse.compare.simulate import simulate
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.simulator import Costs, Simulation, unit_costs
from flowspec.strategies import EXACT, build
from tests.marks import crossed, examples
from tests.model.test_ngram import RUN, VOCABULARY, Bench, tokens_of
from tests.pair import TARGET as DEFAULT
from tests.toy import PROMPT, TARGET, limits
from tests.toy_model import ToyDrafter, ToyStage

SAMPLINGS = [Sampling(), Sampling(1.0, seed=3)]
#: A drafter pass takes 0.3 of a stage's, so that drafts, answers and verdicts interleave.
COSTS = Costs(
    lambda node, work: 0.3 if isinstance(work, DraftPass) else unit_costs(work), lambda *_: 0.1
)
CLOSE = 1e-4

torch.set_num_threads(1)


class Toy(ToyDrafter):
    """A toy drafter whose narrower answers are prefixes of its wider ones, as for any ranking."""

    def _propose(self, state: int, choice: int, width: int) -> tuple[int, ...]:
        return super()._propose(state, choice, WIDTH)[:width]


class Both(DraftsAlone):
    """Runs the drafter and its memo, compares their answers and returns the drafter's."""

    def __init__(self, plain: DraftExecutor, memo: MemoDrafter, close: float) -> None:
        self.plain = plain
        self.memo = memo
        self.close = close
        self.wants_hidden = plain.wants_hidden
        self.swapped = 0
        self.compared = 0

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        for one in (self.plain, self.memo):
            one.allocate(run, capacity, sampling, returns)

    def release(self, run: RunKey) -> None:
        self.plain.release(run)
        self.memo.release(run)

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        self.plain.learn(run, ids, rows)
        self.memo.learn(run, ids, rows)

    def run(self, work: Draft) -> DraftDone:
        plain = self.plain.run(work)
        memo = self.memo.run(work)
        assert list(map(len, plain.tokens)) == list(map(len, memo.tokens))
        for values, others in zip(plain.values, memo.values, strict=True):
            assert np.allclose(values, others, rtol=0, atol=self.close)
        for tokens, others, values in zip(plain.tokens, memo.tokens, plain.values, strict=True):
            for at in range(len(tokens)):
                self.compared += 1
                if tokens[at] != others[at]:
                    self.swapped += 1
                    near = [
                        value
                        for i, value in enumerate(values)
                        if i != at and abs(value - values[at]) < self.close
                    ]
                    assert near or at == len(tokens) - 1, (
                        "another token than the drafter's, and no tie"
                    )
        if not self.swapped:
            assert plain.sources == memo.sources
        return plain


def toy_trace(strategy: str, drafter: DraftExecutor, sampling: Sampling) -> list[object]:
    """All events in a toy pipeline of 3 stages."""
    trace: list[object] = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        trace.append((node, now, event, tuple(outputs)))

    nodes: dict[Address, Any] = {DRAFT: (DraftMachine(limits(3), build), drafter)}
    for stage in (1, 2, 3):
        nodes[stage_address(stage)] = (StageMachine(stage, 3), ToyStage(TARGET, stage, 3))
    simulation = Simulation(nodes, COSTS, tap=tap)
    simulation.submit(
        "j",
        JobSpec(prompt_ids=PROMPT, max_new_tokens=16, strategy=strategy, sampling=sampling),
    )
    simulation.run()
    assert simulation.jobs["j"].finish is not None
    return [*trace, simulation.jobs["j"].committed_at, simulation.jobs["j"].finish.stats]


@pytest.mark.heavy
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "T=1"])
def test_strategies_that_share_a_memo_run_as_without_it(sampling: Sampling) -> None:
    memo = MemoDrafter(Toy(TARGET, 0.7))
    for strategy in EXACT:
        assert toy_trace(strategy, memo, sampling) == toy_trace(
            strategy, Toy(TARGET, 0.7), sampling
        ), strategy
        passes = memo.passes
        toy_trace(strategy, memo, sampling)
        assert memo.passes == passes


@pytest.fixture(scope="module")
def text() -> Callable[[Sampling], Text]:
    """The default target's text by sampling, with its hidden rows."""
    found = texts(
        ["Say: red blue red blue red"], SAMPLINGS, 8, open_directory(DEFAULT), hidden=True
    )
    return dict(zip(SAMPLINGS, found, strict=True)).__getitem__


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("source", "sampling"), crossed(("draft", "head", "ngram", "head+ngram"), SAMPLINGS)
)
def test_real_drafters_are_remembered_as_they_are(
    text: Callable[[Sampling], Text], source: str, sampling: Sampling
) -> None:
    target = open_directory(DEFAULT)
    plain = load_sources(source, target)
    memo = MemoDrafter(load_sources(source, target))
    both = Both(plain, memo, 0.0 if source == "ngram" else CLOSE)
    for strategy in EXACT:
        given = simulate(text(sampling), strategy, 3, target, both, COSTS)
        first = simulate(text(sampling), strategy, 3, target, memo, COSTS)
        assert both.swapped or first == given
        passes = memo.passes
        assert simulate(text(sampling), strategy, 3, target, memo, COSTS) == first
        assert memo.passes == passes
    assert both.compared > 100 * (1 + both.swapped)


@given(st.data(), st.integers(1, 8))
@settings(max_examples=examples(100), deadline=None)
def test_any_passes_prunes_and_repetitions_answer_alike(data: st.DataObject, width: int) -> None:
    """Several runs over few tokens, so that their paths overlap."""
    memo = MemoDrafter(Toy(TARGET, 0.7))
    prompt = data.draw(st.lists(tokens_of, min_size=1, max_size=6))
    for _ in range(data.draw(st.integers(1, 3))):
        both = Both(Toy(TARGET, 0.7), memo, 0.0)
        bench = Bench(both, prompt)
        bench.root = bench.add(bench.lag[-1], data.draw(tokens_of))
        for _ in range(data.draw(st.integers(1, 5))):
            nodes = [] if bench.root in bench.rows else [bench.root]
            for _ in range(data.draw(st.integers(0, 5))):
                above = data.draw(st.sampled_from([*bench.rows.tree, *nodes]))
                nodes.append(bench.add(above, data.draw(tokens_of)))
            bench.run(nodes, width)
            bench.prune(data)
        both.release(RUN)
        assert not both.swapped


def one_pass(
    drafter: MemoDrafter, tokens: Sequence[int], width: int = 4, sampling: Sampling = SAMPLINGS[0]
) -> int:
    """Draft below ``tokens`` in a new run; the number of passes computed so far.

    The run's context is all of the tokens but the last.
    """
    rows = tuple(range(len(tokens)))
    drafter.allocate(RUN, 99, sampling, Returns())
    parents = tuple(row - 1 for row in rows)
    before = len(tokens) - 1
    part = Part(RUN, -1, rows, parents, rows, tuple(tokens), (), before, answers=rows[-1:])
    drafter.run(Draft(part, width))
    drafter.release(RUN)
    return drafter.passes


def test_a_text_is_its_tokens_and_its_sampling() -> None:
    memo = MemoDrafter(NgramDrafter(VOCABULARY))
    assert [one_pass(memo, [0, 1, 0]), one_pass(memo, [0, 1, 0]), one_pass(memo, [1, 1, 0])] == [
        1,
        1,
        2,
    ]
    assert one_pass(memo, [0, 1, 0], width=1) == one_pass(memo, [0, 1, 0], width=WIDTH) == 2
    assert one_pass(memo, [0, 1, 0], sampling=SAMPLINGS[1]) == 3


def test_what_is_remembered_is_bounded_and_can_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    memo = MemoDrafter(NgramDrafter(VOCABULARY))
    one_pass(memo, [0, 1])
    memo.forget()
    assert one_pass(memo, [0, 1]) == 2
    monkeypatch.setattr(module, "MOST", 1)
    assert one_pass(memo, [1, 1]) == 3, "one stored proposal is within the limit"
    assert [one_pass(memo, [0, 1]), one_pass(memo, [0, 1])] == [4, 4]


def test_what_cannot_be_served_is_refused() -> None:
    memo = MemoDrafter(NgramDrafter(VOCABULARY))
    with pytest.raises(StateError, match=f"asks for 65 continuations; {WIDTH} of every node"):
        one_pass(memo, [0], width=65)
    with pytest.raises(StateError, match="wrap each of them in its own"):
        MemoDrafter(ChoiceDrafter([NgramDrafter(VOCABULARY), Toy(TARGET, 0.7)]))
    memo.allocate(RUN, 9, SAMPLINGS[0], Returns())
    with pytest.raises(StateError, match="drafts from tokens alone"):
        memo.learn(RUN, [0], np.zeros((1, 4), np.float32))
