"""Best first: exactly the most probable rows, drafted no further than necessary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.tree.tree import Expansion, Tree
from flowspec.strategies.auto.best_first import ALTERNATIVE, LEAST_TOKENS, SIZES, BestFirstGrowth
from tests.core.tree.views import path_tokens

CHILDREN = 3


def planted() -> Tree:
    tree = Tree(10)
    tree.plant(7, 10, 9)
    return tree


def proposals(path: tuple[int, ...], weights: list[float]) -> Expansion:
    """The drafter's proposals after ``path``, by a hash of it."""
    picks = sorted(
        (weights[hash((path, rank)) % len(weights)] for rank in range(CHILDREN)), reverse=True
    )
    return Expansion(tuple(range(CHILDREN)), tuple(math.log(pick / CHILDREN) for pick in picks))


def grow(tree: Tree, growth: BestFirstGrowth, weights: list[float]) -> int:
    """Draft until the growth is complete; the passes it took."""
    passes = 0
    while wanted := growth.proceed(tree):
        passes += 1
        for node in wanted:
            tree.expand(node, proposals(path_tokens(tree, node), weights))
    return passes


def every_path(depth: int) -> Iterator[tuple[int, ...]]:
    for length in range(1, depth + 1):
        yield from itertools.product(range(CHILDREN), repeat=length)


@given(weights=st.lists(st.floats(0.05, 0.98), min_size=3, max_size=9), rows=st.integers(1, 12))
def test_without_a_bound_on_passes_the_rows_are_the_likeliest_there_are(
    weights: list[float], rows: int
) -> None:
    tree = planted()
    growth = BestFirstGrowth(rows, batch=4, passes=1000)
    grow(tree, growth, weights)
    (segment,) = growth.segments(tree)

    def score(path: tuple[int, ...]) -> float:
        return sum(
            proposals((7, *path[:at]), weights).values[token] for at, token in enumerate(path)
        )

    found = sorted((tree[node].score for node in segment), reverse=True)
    # No path among them is longer than the number of rows, since all its ancestors are included.
    best = sorted(map(score, every_path(min(rows, 6))), reverse=True)[: len(found)]
    assert len(found) == rows
    if rows <= 6:
        assert all(math.isclose(one, other) for one, other in zip(found, best, strict=True))
    assert all(tree[node].parent == tree.root or tree[node].parent in segment for node in segment)
    assert segment == sorted(segment)


@given(st.integers(1, 5), st.integers(1, 8))
def test_passes_are_bounded_and_their_size_too(passes: int, batch: int) -> None:
    tree = planted()
    growth = BestFirstGrowth(40, batch, passes)
    taken = 0
    while wanted := growth.proceed(tree):
        assert len(wanted) <= batch
        assert growth.proceed(tree) == wanted, "requested again while it is drafted"
        taken += 1
        for node in wanted:
            tree.expand(node, proposals(path_tokens(tree, node), [0.9]))
    assert taken == passes, "after it there is more to draft"
    assert growth.segments(tree)


def test_the_next_segment_goes_on_where_the_last_one_ended() -> None:
    tree = planted()
    sent: set[int] = set()
    for _ in range(4):
        growth = BestFirstGrowth(5, 5, 10)
        grow(tree, growth, [0.5, 0.8])
        (segment,) = growth.segments(tree)
        assert not sent & set(segment)
        tree.mark_waiting(segment)
        sent |= set(segment)
    tree.check()
    assert len(sent) == 20


def test_of_equal_leaves_the_earlier_are_drafted() -> None:
    tree = planted()
    tree.expand(tree.root, Expansion((1, 2, 3, 4), (-1.0,) * 4))
    equal = [tree.add(tree.root, token, -1.0) for token in (3, 1, 4, 2)]
    assert BestFirstGrowth(8, batch=2, passes=1).proceed(tree) == tuple(equal[:2])


def test_a_verdict_leaves_the_growth_what_is_below_the_new_root() -> None:
    tree = planted()
    first = BestFirstGrowth(6, 6, 10)
    grow(tree, first, [0.6])
    tree.mark_waiting(first.segments(tree)[0])
    growth = BestFirstGrowth(6, 6, 10)
    asked = growth.proceed(tree)
    root = next(iter(tree[tree.root].children.values()))
    tree.advance(root)
    growth.rebase(tree)
    assert set(growth.proceed(tree)) <= set(tree.nodes)
    assert set(growth.proceed(tree)) != set(asked)
    grow(tree, growth, [0.6])
    (segment,) = growth.segments(tree)
    assert set(segment) <= set(tree.nodes)


def test_a_pass_in_progress_when_the_growth_begins_is_not_counted_and_its_children_come_first() -> (
    None
):
    tree = planted()
    tree.expand(tree.root, proposals((7,), [0.9, 0.6]))
    growth = BestFirstGrowth(12, batch=4, passes=1)
    drafting, *others = growth.proceed(tree)
    tree.expand(drafting, Expansion((4, 5, 6), (-0.01, -5.0, -6.0)))
    chosen = growth.proceed(tree)
    child = tree.child(drafting, 4)
    assert child in chosen
    assert set(chosen) & set(others), "the others compete with the new ones"
    for node in chosen:
        tree.expand(node, proposals(path_tokens(tree, node), [0.9]))
    assert growth.proceed(tree) == (), "its own pass is the only one"


@given(st.integers(1, 4), st.integers(2, 6))
def test_passes_over_parts_of_a_batch_are_bounded(passes: int, batch: int) -> None:
    tree = planted()
    tree.expand(tree.root, proposals((7,), [0.9]))
    growth = BestFirstGrowth(40, batch, passes)
    taken = 0
    while wanted := growth.proceed(tree):
        tree.expand(wanted[0], proposals(path_tokens(tree, wanted[0]), [0.9]))
        taken += 1
    assert taken <= passes + 1


def test_a_drafter_that_knows_nothing_gives_no_segment() -> None:
    tree = planted()
    growth = BestFirstGrowth(4, 4, 4)
    assert growth.proceed(tree) == (tree.root,)
    tree.expand(tree.root, Expansion((), ()))
    assert growth.proceed(tree) == ()
    assert growth.segments(tree) == []


#: The best child of any node yields more than ``LEAST_TOKENS``.
WEIGHTS = st.lists(st.floats(0.16, 0.98), min_size=3, max_size=9)


def worth(tree: Tree, segment: list[int]) -> float:
    """Expected tokens of ``segment`` if the root is right."""
    return sum(math.exp(tree[node].score - tree[tree.root].score) for node in segment)


def cut(
    weights: list[float], rows: int, price: Callable[[int], float] | None
) -> tuple[Tree, list[int], int]:
    """The segment at ``price``, and the number of passes."""
    tree = planted()
    growth = BestFirstGrowth(rows, 4, 1000, price)
    passes = grow(tree, growth, weights)
    (segment,) = growth.segments(tree)
    return tree, segment, passes


@given(WEIGHTS, st.integers(1, 12), st.floats(0.0, 1.0))
def test_the_rows_of_a_segment_are_the_best_and_as_many_as_a_size_that_is_tried(
    weights: list[float], rows: int, each: float
) -> None:
    tree, segment, _ = cut(weights, rows, lambda count: each * count)
    everything, full, _ = cut(weights, rows, None)
    best = sorted((worth(everything, [node]) for node in full), reverse=True)
    taken = sorted((worth(tree, [node]) for node in segment), reverse=True)
    assert len(taken) in SIZES or len(taken) == len(best)
    assert taken == best[: len(taken)], "the best rows, as without a price"


@given(
    WEIGHTS,
    st.integers(1, 12),
    st.lists(st.sampled_from((0.0, 0.02, 0.1, 0.4)), min_size=12, max_size=12),
)
def test_no_other_number_of_rows_brings_in_more_over_its_price(
    weights: list[float], rows: int, steps: list[float]
) -> None:
    prices = [0.0, *itertools.accumulate(steps)]
    tree, segment, _ = cut(weights, rows, prices.__getitem__)
    # A price may level off, so that profitable rows can follow unprofitable ones.
    growth = BestFirstGrowth(rows, 4, 0)
    (known,) = growth.segments(tree)
    order = sorted(known, key=lambda node: (-tree[node].score, node))
    tried = [count for count in range(1, len(order) + 1) if count in SIZES or count == len(order)]
    gains = [worth(tree, order[:count]) - prices[count] for count in tried]
    assert set(segment) <= set(order)
    assert math.isclose(worth(tree, segment) - prices[len(segment)], max(gains), abs_tol=1e-9)


@given(WEIGHTS, st.integers(1, 12), st.floats(0.0, 5.0))
def test_rows_that_cost_no_more_than_one_are_all_taken(
    weights: list[float], rows: int, price: float
) -> None:
    _, segment, passes = cut(weights, rows, lambda count: price)
    assert (len(segment), passes) == (rows, cut(weights, rows, None)[2])


@given(WEIGHTS, st.integers(1, 12))
def test_the_best_row_goes_whatever_it_costs_and_nothing_is_drafted_for_others(
    weights: list[float], rows: int
) -> None:
    tree, segment, passes = cut(weights, rows, lambda count: 9.0 * count)
    (node,) = segment
    assert tree[node].score == max(tree[child].score for child in tree[tree.root].children.values())
    assert passes == 1


@given(
    st.lists(st.floats(0.0, 0.15), min_size=3, max_size=9), st.integers(1, 12), st.floats(0.0, 1.0)
)
def test_a_segment_that_brings_next_to_nothing_is_not_sent(
    weights: list[float], rows: int, each: float
) -> None:
    tree = planted()
    growth = BestFirstGrowth(rows, 4, 1000, lambda count: each * count)
    weights = [max(weight, 1e-6) for weight in weights]
    passes = grow(tree, growth, weights)
    (free,) = BestFirstGrowth(rows, 4, 0).segments(tree)
    best = sorted((worth(tree, [node]) for node in free), reverse=True)
    gains = [sum(best[:count]) - each * count for count in range(1, len(best) + 1)]
    brought = sum(best[: gains.index(max(gains)) + 1])
    segments = growth.segments(tree)
    if abs(brought - LEAST_TOKENS) > 1e-6:
        assert bool(segments) == (brought > LEAST_TOKENS), (
            "the most profitable number of rows decides"
        )
    if not segments:
        assert passes <= 1, "nor is anything drafted below unprofitable rows"


def test_what_rows_are_worth_is_counted_from_the_root() -> None:
    """A root that was improbable before its acceptance does not lower its children's value."""
    tree = planted()
    tree.expand(tree.root, Expansion((1,), (math.log(0.01),)))
    root = tree.add(tree.root, 1, math.log(0.01))
    tree.mark_waiting([root])
    tree.advance(root)
    tree.expand(root, Expansion((1, 2, 3), tuple(map(math.log, (0.5, 0.3, 0.1)))))
    (segment,) = BestFirstGrowth(3, 4, 0, lambda count: 0.2 * count).segments(tree)
    assert [tree[node].token for node in segment] == [1, 2]


@given(st.floats(0.05, 0.9), st.floats(0.05, 0.95))
def test_a_lone_row_continues_the_chain_unless_another_is_much_more_probable(
    doubt: float, second: float
) -> None:
    """A chain of two in flight; its next row competes with the first node's sibling."""
    tree = planted()
    first = tree.root
    tree.expand(first, Expansion((1, 2), (math.log(0.9), math.log(0.9 * second))))
    chain = tree.add(first, 1, math.log(0.9))
    tree.mark_waiting([chain])
    tree.mark_sent([chain])
    tree.expand(chain, Expansion((3,), (math.log(doubt),)))
    for times in (1.7, ALTERNATIVE, 9.0):
        growth = BestFirstGrowth(1, 4, 4, lambda rows: 9.0 * rows, times)
        ((node,),) = growth.segments(tree)
        alternative = 0.9 * second > times * 0.9 * doubt
        assert tree[node].token == (2 if alternative else 3)


def test_the_chains_end_is_drafted_for_before_a_lone_row_is_chosen() -> None:
    tree = planted()
    tree.expand(tree.root, Expansion((1, 2), (math.log(0.1), math.log(0.05))))
    chain = tree.add(tree.root, 1, math.log(0.1))
    tree.mark_waiting([chain])
    tree.mark_sent([chain])
    growth = BestFirstGrowth(1, 4, 4, lambda rows: 9.0 * rows)
    assert growth.proceed(tree) == (chain,)
