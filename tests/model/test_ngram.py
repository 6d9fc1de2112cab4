"""The n-gram drafter: every proposal did follow, however its rows arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling, gumbel
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.core.tree.live_rows import LiveRows
from flowspec.errors import ConfigError, StateError
from flowspec.model.base import DraftExecutor
from flowspec.model.drafters.ngram import LATER, RECENT, SHARES, NgramDrafter
from flowspec.rehearse.simulator import RunRecord, Simulation
from flowspec.strategies import EXACT, STRATEGIES, build
from tests.marks import crossed, examples
from tests.toy import limits
from tests.toy_model import ToyStage, ToyTarget

RUN = RunKey("j", 1)
LONE = RunKey("lone", 1)
VOCABULARY = 6
SAMPLED = Sampling(0.8, seed=11)
tokens_of = st.integers(0, VOCABULARY - 1)


def lone(
    drafter: DraftExecutor, text: Sequence[int], width: int, *, coupled: bool = False
) -> DraftDone:
    """A new run's proposals after ``text``, given in one pass."""
    drafter.allocate(LONE, 500, SAMPLED, Returns())
    rows = tuple(range(len(text)))
    parents = tuple(row - 1 for row in rows)
    part = Part(LONE, -1, rows, parents, rows, tuple(text), (), answers=rows[-1:])
    done = drafter.run(Draft(part, width, coupled=coupled))
    drafter.release(LONE)
    return done


class Bench:
    """One run fed by hand; its live rows are kept as a session keeps them."""

    def __init__(self, drafter: DraftExecutor, prompt: Sequence[int]) -> None:
        self.drafter = drafter
        self.rows = LiveRows(len(prompt))
        self.token = dict(enumerate(prompt))
        self.parent = {at: at - 1 for at in range(len(prompt))}
        self.lag = list(self.parent)
        drafter.allocate(RUN, 500, SAMPLED, Returns())
        self.root = -1

    def add(self, parent: int, token: int) -> int:
        node = len(self.parent)
        self.parent[node] = parent
        self.token[node] = token
        return node

    def path(self, node: int) -> list[int]:
        found = [node]
        while self.parent[found[-1]] >= 0:
            found.append(self.parent[found[-1]])
        return found[::-1]

    def text(self, node: int) -> list[int]:
        return [self.token[step] for step in self.path(node)]

    def run(self, nodes: Sequence[int], width: int, *, coupled: bool = False) -> DraftDone:
        """Run the lag, then ``nodes``, which are answered."""
        lag = self.lag
        self.lag = []
        ids = (*lag, *nodes)
        parents = tuple(self.parent[node] for node in ids)
        part = Part(
            run=RUN,
            segment=-1,
            ids=ids,
            parents=parents,
            positions=tuple(len(self.path(node)) - 1 for node in ids),
            tokens=tuple(self.token[node] for node in ids),
            offsets=(),
            context=len(lag),
            pruned=self.rows.begin_pass(ids, parents, len(lag)),
            answers=tuple(range(len(lag), len(ids))),
        )
        return self.drafter.run(Draft(part, width, coupled=coupled))

    def prune(self, data: st.DataObject) -> None:
        """Accept a path from the root; continue below it or from a new root.

        Some leaves were never drafted from.
        """
        last = data.draw(st.sampled_from([*self.rows.tree]))
        accepted = [node for node in self.path(last) if node in self.rows]
        children = [node for node in self.rows.tree if self.parent[node] == last]
        if data.draw(st.booleans()) and children:
            self.root = data.draw(st.sampled_from(children))
            self.rows.prune(accepted, self.root)
            return
        if data.draw(st.booleans()):
            accepted.append(self.add(last, data.draw(tokens_of)))
        self.root = self.add(accepted[-1], data.draw(tokens_of))
        if data.draw(st.booleans()):
            self.rows.forget_tree(self.root)
            self.lag = accepted
        else:
            self.lag = [node for node in accepted if node not in self.rows]
            self.rows.prune(accepted, self.root)


def expected(text: Sequence[int], longest: int) -> list[int]:
    """By definition: all tokens that followed the last one, by match length, count, recency."""
    found: dict[int, tuple[int, int, int]] = {}
    for length in range(longest, 0, -1):
        places = [
            at
            for at in range(length, len(text))
            if list(text[at - length : at]) == list(text[-length:])
        ]
        followers = [text[at] for at in places]
        for place, token in zip(places, followers, strict=True):
            if found.get(token, (0,))[0] <= length:
                found[token] = (length, followers.count(token), place)
    return sorted(found, key=lambda token: found[token], reverse=True)


@given(st.data(), st.integers(1, 5), st.integers(1, 8), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_rows_propose_what_their_whole_text_does(
    data: st.DataObject, longest: int, width: int, coupled: bool
) -> None:
    """For any sequence of passes and prunes that produces the text; also by definition."""
    fresh = NgramDrafter(VOCABULARY, longest)
    bench = Bench(
        NgramDrafter(VOCABULARY, longest), data.draw(st.lists(tokens_of, min_size=1, max_size=24))
    )
    bench.root = bench.add(bench.lag[-1], data.draw(tokens_of))
    for _ in range(data.draw(st.integers(1, 6))):
        nodes = [] if bench.root in bench.rows else [bench.root]
        for _ in range(data.draw(st.integers(0, 6))):
            nodes.append(
                bench.add(
                    data.draw(st.sampled_from([*bench.rows.tree, *nodes])), data.draw(tokens_of)
                )
            )
        done = bench.run(nodes, width, coupled=coupled)
        assert len(done.tokens) == len(done.values) == len(nodes)
        for node, tokens, values in zip(nodes, done.tokens, done.values, strict=True):
            text = bench.text(node)
            assert lone(fresh, text, width, coupled=coupled) == DraftDone((tokens,), (values,))
            if not coupled:
                assert list(tokens) == expected(text, longest)[:width]
        bench.prune(data)


@given(st.lists(tokens_of, min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 6))
@settings(max_examples=examples(200), deadline=None)
def test_values_are_logs_of_shares_of_one(text: list[int], width: int, longest: int) -> None:
    done = lone(NgramDrafter(VOCABULARY, longest), text, width)
    (tokens,) = done.tokens
    (values,) = done.values
    assert len(set(tokens)) == len(tokens) == len(values) <= width
    assert all(upper > lower for upper, lower in zip((0.0, *values), values, strict=False))
    assert sum(map(math.exp, values)) < 1


@given(st.lists(tokens_of, min_size=1, max_size=60), st.integers(1, 8))
@settings(max_examples=examples(200), deadline=None)
def test_a_coupled_draft_ranks_by_prior_and_the_targets_noise(text: list[int], width: int) -> None:
    drafter = NgramDrafter(VOCABULARY)
    plain = lone(drafter, text, 99)
    (known,) = plain.tokens
    (priors,) = plain.values
    noise = gumbel(SAMPLED.seed, len(text), np.array(known, dtype=np.int64))
    scores = {
        token: prior + lift
        for token, prior, lift in zip(known, priors, noise.tolist(), strict=True)
    }
    done = lone(drafter, text, width, coupled=True)
    ranked = sorted(scores, key=lambda token: -scores[token])[:width]
    assert list(done.tokens[0]) == ranked
    assert done.values[0] == pytest.approx([scores[token] - scores[ranked[0]] for token in ranked])
    assert all(value <= 0 for value in done.values[0])


def test_longer_matches_then_frequent_then_recent_ones_come_first() -> None:
    drafter = NgramDrafter(99)
    assert lone(drafter, [1, 2, 7, 3, 2, 8, 4, 2, 8, 1, 2], 9).tokens == ((7, 8),)
    assert lone(drafter, [2, 7, 3, 2, 8, 4, 2, 7, 5, 2, 9, 6, 2], 9).tokens == ((7, 9, 8),)
    longer = lone(drafter, [1, 2, 7, 1, 2], 1).values[0][0]
    assert lone(drafter, [1, 2, 7, 3, 2], 1).values[0][0] < longer < 0


def test_a_later_candidate_takes_its_part_of_what_is_left() -> None:
    first = SHARES[1]
    second = SHARES[0] * LATER  # matches of two tokens and of one
    values = lone(NgramDrafter(9), [1, 2, 7, 2, 8, 1, 2], 9).values[0]
    assert [math.exp(value) for value in values] == pytest.approx([first, (1 - first) * second])


def test_old_occurrences_of_a_frequent_token_are_not_looked_at() -> None:
    text = [*([5, 3] * RECENT), *([5, 4] * RECENT), 5]
    assert lone(NgramDrafter(9, longest=1), text, 9).tokens == ((4,),)
    assert lone(NgramDrafter(9, longest=1), text[: 2 * RECENT + 3], 9).tokens == ((3, 4),)


def test_nothing_asked_or_nothing_known_is_nothing_proposed() -> None:
    drafter = NgramDrafter(VOCABULARY)
    assert not drafter.wants_hidden
    assert lone(drafter, [1, 2, 3], 4) == DraftDone(((),), ((),))
    assert lone(drafter, [1, 2, 3], 4, coupled=True) == DraftDone(((),), ((),))
    assert (
        lone(drafter, [1, 1, 1], 0)
        == lone(drafter, [1, 1, 1], 0, coupled=True)
        == DraftDone(((),), ((),))
    )
    bench = Bench(drafter, [1, 1, 1])
    assert bench.run((), 4) == DraftDone((), ())


def test_jobs_do_not_know_each_other() -> None:
    drafter = NgramDrafter(VOCABULARY)
    bench = Bench(drafter, [1, 2, 1])
    other = lone(drafter, [3, 1], 4)
    assert other.tokens == ((),)
    assert bench.run([bench.add(2, 2)], 4).tokens == ((1,),)


def test_what_it_cannot_do_is_refused() -> None:
    for vocabulary, longest in ((0, 4), (9, 0)):
        with pytest.raises(ConfigError, match="expected at least 1"):
            NgramDrafter(vocabulary, longest)
    for token in (-1, VOCABULARY):
        with pytest.raises(StateError, match="outside the vocabulary"):
            lone(NgramDrafter(VOCABULARY), [1, token], 1)
    with pytest.raises(StateError, match="from tokens alone"):
        NgramDrafter(VOCABULARY).learn(RUN, [1], np.zeros((1, 4), dtype=np.float32))


class Endless(ToyTarget):
    """Few tokens, so that n-grams recur, and none that ends the text."""

    @property
    def eos(self) -> frozenset[int]:
        return frozenset()


ENDLESS = Endless(layers=4, vocabulary=20, context=128)


def simulate(
    drafter: DraftExecutor, prompt: Sequence[int], strategy: str, sampling: Sampling
) -> RunRecord:
    """60 tokens of ``ENDLESS`` over two stages, or as many as fit."""
    nodes: dict[Address, tuple[object, object]] = {
        DRAFT: (DraftMachine(limits(2, ENDLESS), build), drafter)
    }
    for stage in (1, 2):
        nodes[stage_address(stage)] = (StageMachine(stage, 2), ToyStage(ENDLESS, stage, 2))
    simulation = Simulation(nodes)  # type: ignore[arg-type]
    spec = JobSpec(
        prompt_ids=tuple(prompt), max_new_tokens=60, sampling=sampling, strategy=strategy
    )
    simulation.submit("j", spec)
    simulation.run()
    return simulation.jobs["j"]


@pytest.mark.parametrize(("strategy", "sampling"), crossed(EXACT, (Sampling(), SAMPLED), keep=4))
def test_every_strategy_lives_with_few_proposals_or_none(strategy: str, sampling: Sampling) -> None:
    prompt = (3, 4, 5, 6, 3, 4)
    for drafter in (NgramDrafter(20), NgramDrafter(20, longest=1)):
        record = simulate(drafter, prompt, strategy, sampling)
        assert tuple(record.tokens) == ENDLESS.decode(prompt, 60, sampling)
        assert not drafter._runs


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - set(EXACT)))
def test_lossy_strategies_end_as_well(strategy: str) -> None:
    assert len(simulate(NgramDrafter(20), (3, 4, 5, 6, 3, 4), strategy, SAMPLED).tokens) == 60
