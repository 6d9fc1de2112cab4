"""The hybrid drafter: the merge invents nothing, keeps each best, and names the sources."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.drafting.drafting import MOST_SOURCES
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, StateError
from flowspec.model.base import DraftsAlone, RowArray
from flowspec.model.drafters.hybrid import HybridDrafter
from flowspec.model.drafters.ngram import NgramDrafter
from flowspec.strategies import EXACT
from tests.marks import crossed, examples
from tests.model.test_ngram import ENDLESS, RUN, SAMPLED, Bench, simulate, tokens_of
from tests.toy_model import ToyDrafter

Rows = list[list[tuple[int, float]]]


class Scripted(DraftsAlone):
    """Gives scripted answers, and records its requests."""

    def __init__(self, rows: Rows | None = None, *, wants_hidden: bool = False) -> None:
        self.wants_hidden = wants_hidden
        self.rows = rows or []
        self.calls = list[object]()

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self.calls.append(("allocate", run, capacity, sampling, returns))

    def release(self, run: RunKey) -> None:
        self.calls.append(("release", run))

    def run(self, work: Draft) -> DraftDone:
        self.calls.append(work)
        return DraftDone(
            tuple(tuple(token for token, _ in row[: work.width]) for row in self.rows),
            tuple(tuple(value for _, value in row[: work.width]) for row in self.rows),
        )

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        self.calls.append(("learn", run, ids, rows))


class Given(Scripted):
    """Gives answers that were computed elsewhere."""

    def __init__(self, done: DraftDone) -> None:
        super().__init__()
        self.done = done

    def run(self, work: Draft) -> DraftDone:
        return self.done


def draft(rows: int, width: int, *, coupled: bool = False) -> Draft:
    """Request ``rows`` rows below a context of four."""
    ids = tuple(range(4, 4 + rows))
    at = tuple(range(rows))
    part = Part(RUN, -1, ids, (3,) * rows, (4,) * rows, at, (), answers=at)
    return Draft(part, width, coupled=coupled)


@st.composite
def proposals(draw: st.DrawFn, rows: int) -> Rows:
    """Distinct tokens per row, zero to six, in descending value."""
    lists = st.lists(st.integers(0, 9), max_size=6, unique=True)
    value = st.floats(-9, -0.01)
    return [
        list(zip(row, sorted((draw(value) for _ in row), reverse=True), strict=True))
        for row in (draw(lists) for _ in range(rows))
    ]


@given(st.data(), st.integers(0, 3), st.integers(1, 3), st.integers(0, 9))
@settings(max_examples=examples(300), deadline=None)
def test_a_row_is_a_fair_cut_of_the_union(
    data: st.DataObject, rows: int, count: int, width: int
) -> None:
    sources = [data.draw(proposals(rows)) for _ in range(count)]
    done = HybridDrafter([Scripted(source) for source in sources]).run(draft(rows, width))
    assert len(done.tokens) == len(done.values) == len(done.sources) == rows
    for at in range(rows):
        ranks = [
            {token: rank for rank, (token, _) in enumerate(source[at][:width])}
            for source in sources
        ]
        tokens = done.tokens[at]
        assert len(set(tokens)) == len(tokens) == min(width, len(set().union(*ranks)))
        places = []
        for token, value, source in zip(tokens, done.values[at], done.sources[at], strict=True):
            best = min(
                (known[token], number) for number, known in enumerate(ranks) if token in known
            )
            assert best[1] == source
            assert sources[source][at][best[0]] == (token, value)
            places.append(best)
        assert places == sorted(places)
        if width >= count:
            assert {source[at][0][0] for source in sources if source[at]} <= set(tokens)


def test_the_merge_by_hand() -> None:
    model = Scripted([[(1, -0.1), (2, -1.0), (3, -2.0)], []])
    lookup = Scripted([[(2, -0.3), (1, -2.0)], [(5, -0.5)]])
    done = HybridDrafter([model, lookup]).run(draft(2, 9))
    assert done == DraftDone(((1, 2, 3), (5,)), ((-0.1, -0.3, -2.0), (-0.5,)), ((0, 1, 0), (1,)))
    assert HybridDrafter([model, lookup]).run(draft(2, 1)).tokens == ((1,), (5,))


@given(st.data(), st.integers(1, 6), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_every_source_holds_the_same_rows(data: st.DataObject, width: int, coupled: bool) -> None:
    """Each answers in the hybrid as it does alone, through growth and prunes; run twice."""

    def sources() -> tuple[ToyDrafter, NgramDrafter]:
        return ToyDrafter(ENDLESS, 0.8), NgramDrafter(ENDLESS.vocabulary)

    prompt = data.draw(st.lists(tokens_of, min_size=1, max_size=12))
    benches = [
        Bench(drafter, prompt)
        for drafter in (*sources(), HybridDrafter(sources()), HybridDrafter(sources()))
    ]
    first, *others = benches
    for bench in benches:  # one tree, four drafters
        bench.token = first.token
        bench.parent = first.parent
    first.root = first.add(first.lag[-1], data.draw(tokens_of))
    for _ in range(data.draw(st.integers(1, 4))):
        nodes = [] if first.root in first.rows else [first.root]
        for _ in range(data.draw(st.integers(0, 4))):
            nodes.append(
                first.add(
                    data.draw(st.sampled_from([*first.rows.tree, *nodes])), data.draw(tokens_of)
                )
            )
        toy, lookup, merged, again = [bench.run(nodes, width, coupled=coupled) for bench in benches]
        assert (
            merged
            == again
            == HybridDrafter([Given(toy), Given(lookup)]).run(draft(len(nodes), width))
        )
        held = [node for node in first.rows.tree if first.parent[node] == first.root]
        last = data.draw(st.sampled_from(held)) if held else first.root
        accepted = [node for node in first.path(last) if node in first.rows]
        root = first.add(last, data.draw(tokens_of))
        first.root = root
        for bench in (first, *others):
            bench.rows.prune(accepted, root)


def test_sources_are_asked_and_told_the_same() -> None:
    pair = Scripted([[(1, -0.5)]]), Scripted([[(2, -0.5)]])
    hybrid = HybridDrafter(pair)
    work = draft(1, 4, coupled=True)
    hybrid.allocate(RUN, 7, SAMPLED, Returns(top=2))
    hybrid.run(work)
    hybrid.release(RUN)
    for source in pair:
        assert source.calls == [
            ("allocate", RUN, 7, SAMPLED, Returns(top=2)),
            work,
            ("release", RUN),
        ]


def test_hidden_rows_go_to_those_that_want_them() -> None:
    head = Scripted(wants_hidden=True)
    lookup = Scripted()
    rows = np.zeros((2, 3), dtype=np.float32)
    hybrid = HybridDrafter([lookup, head])
    assert hybrid.wants_hidden
    hybrid.learn(RUN, [1, 2], rows)
    assert head.calls == [("learn", RUN, [1, 2], rows)]
    assert lookup.calls == []
    alone = HybridDrafter([lookup])
    assert not alone.wants_hidden
    with pytest.raises(StateError, match="no source of this hybrid"):
        alone.learn(RUN, [1, 2], rows)


def test_no_sources_and_wrong_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match="no sources"):
        HybridDrafter([])
    HybridDrafter([Scripted()] * MOST_SOURCES)
    with pytest.raises(ConfigError, match="has 17 sources; expected 16 at most"):
        HybridDrafter([Scripted()] * (MOST_SOURCES + 1))
    whole = DraftDone(((7,),), ((-1.0,),))
    ragged = DraftDone(((7,),), ((-1.0, -2.0),))
    for wrong in (DraftDone(((7,), (8,)), ((-1.0,), (-1.0,))), DraftDone((), ()), ragged):
        with pytest.raises(StateError, match="source 1 must answer for each of 1 rows"):
            HybridDrafter([Given(whole), Given(wrong)]).run(draft(1, 4))


@pytest.mark.parametrize(("strategy", "sampling"), crossed(EXACT, (Sampling(), SAMPLED), keep=4))
def test_text_drafted_by_a_hybrid_is_that_of_plain_decoding(
    strategy: str, sampling: Sampling
) -> None:
    prompt = (3, 4, 5, 6, 3, 4)
    hybrid = HybridDrafter([NgramDrafter(ENDLESS.vocabulary), ToyDrafter(ENDLESS, 0.6)])
    record = simulate(hybrid, prompt, strategy, sampling)
    assert tuple(record.tokens) == ENDLESS.decode(prompt, 60, sampling)


def test_values_stay_logs_of_an_acceptance() -> None:
    hybrid = HybridDrafter([ToyDrafter(ENDLESS, 0.8), NgramDrafter(ENDLESS.vocabulary)])
    bench = Bench(hybrid, (1, 2, 1, 2, 3, 1))
    (values,) = bench.run([bench.add(5, 2)], 6).values
    assert values
    assert all(-math.inf < value <= 0 for value in values)
