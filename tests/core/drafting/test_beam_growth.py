"""Beam growth against a naive version of the published pseudo-code; ties."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.drafting.beam_growth import BeamSearch
from flowspec.core.tree.tree import Expansion, Tree
from tests.core.tree.views import path_tokens, selected

VOCABULARY = 6


def proposals(seed: int, path: tuple[int, ...], ties: bool) -> Expansion:
    """A drafter by a hash of the path.

    ``ties``: most log-probabilities are exactly equal or 0.
    """
    rng = random.Random(f"{seed}{path}")
    tokens = rng.sample(range(VOCABULARY), VOCABULARY)
    values = [rng.choice([0.0, 0.0, -0.5]) if ties else -rng.random() for _ in tokens]
    return Expansion(tuple(tokens), tuple(sorted(values, reverse=True)))


@dataclass(frozen=True)
class Entry:
    path: tuple[int, ...]
    score: float
    generation: int


def published_growth(seed: int, ties: bool, width: int, loops: int) -> list[Entry]:
    """T_base of FlowSpec 3.2 in generation order, as paths below the root."""
    base: list[Entry] = []

    def children(path: tuple[int, ...], score: float) -> list[Entry]:
        expansion = proposals(seed, path, ties)
        pairs = list(zip(expansion.tokens, expansion.values, strict=True))[:width]
        start = len(base)
        base.extend(
            Entry((*path, token), score + value, start + at)
            for at, (token, value) in enumerate(pairs)
        )
        return base[start:]

    layer = children((), 0.0)
    for _ in range(loops):
        beam = sorted(layer, key=lambda entry: (-entry.score, entry.generation))[:width]
        layer = [
            child
            for entry in sorted(beam, key=lambda e: e.generation)
            for child in children(entry.path, entry.score)
        ]
    return base


def grow(tree: Tree, growth: BeamSearch, seed: int, ties: bool) -> int:
    """Drive a growth to its end; the number of nodes drafted."""
    drafted = 0
    while missing := growth.proceed(tree):
        for node in missing:
            assert tree[node].expansion is None
            tree.expand(node, proposals(seed, path_tokens(tree, node)[1:], ties))
            drafted += 1
    return drafted


def best_paths(entries: list[Entry], count: int) -> list[tuple[int, ...]]:
    ranked = sorted(entries, key=lambda e: (-e.score, len(e.path), e.generation))
    return [entry.path for entry in ranked[:count]]


CASES = given(
    seed=st.integers(0, 10_000),
    ties=st.booleans(),
    width=st.integers(1, 5),
    loops=st.integers(0, 4),
    count=st.integers(1, 60),
)


@CASES
@settings(deadline=None)
def test_cut_and_order_are_the_published_ones(
    seed: int, ties: bool, width: int, loops: int, count: int
) -> None:
    tree = Tree(0)
    tree.plant(99, 0, -1)
    growth = BeamSearch(tree, width, loops)
    grow(tree, growth, seed, ties)
    expected = best_paths(published_growth(seed, ties, width, loops), count)
    nodes = growth.best(tree, count)
    assert [path_tokens(tree, node)[1:] for node in nodes] == expected
    tree.mark_waiting(nodes)  # raises if a node were separated from its parent
    tree.check()


@CASES
@settings(deadline=None)
def test_equal_scores_never_separate_a_node_from_its_parent(
    seed: int, ties: bool, width: int, loops: int, count: int
) -> None:
    for by_score in (True, False):
        tree = Tree(0)
        tree.plant(99, 0, -1)
        growth = BeamSearch(tree, width, loops)
        grow(tree, growth, seed, ties=True)
        chosen = growth.best(tree, count, by_score=by_score)
        seen = {tree.root}
        for node in chosen:
            assert tree[node].parent in seen
            seen.add(node)


def test_generation_order_is_the_same_set_layer_by_layer() -> None:
    tree = Tree(0)
    tree.plant(99, 0, -1)
    growth = BeamSearch(tree, 4, 3)
    grow(tree, growth, seed=1, ties=False)
    by_score = growth.best(tree, 20)
    by_generation = growth.best(tree, 20, by_score=False)
    assert set(by_score) == set(by_generation)
    depths = [tree[node].depth for node in by_generation]
    assert depths == sorted(depths)
    assert [tree[node].depth for node in by_score] != depths


@given(seed=st.integers(0, 10_000), ties=st.booleans())
@settings(deadline=None)
def test_growing_again_below_a_child_gives_the_fresh_growth_and_drafts_less(
    seed: int, ties: bool
) -> None:
    tree = Tree(0)
    tree.plant(99, 0, -1)
    first = BeamSearch(tree, 3, 3)
    grow(tree, first, seed, ties)
    tree.mark_waiting(first.best(tree, 30))
    root = selected(tree)[1]
    prefix = path_tokens(tree, root)[1:]
    tree.advance(root)

    fresh_tree = Tree(0)
    fresh_tree.plant(98, 0, -1)
    fresh = BeamSearch(fresh_tree, 3, 3)
    drafted_fresh = 0
    while missing := fresh.proceed(fresh_tree):
        for node in missing:
            path = (*prefix, *path_tokens(fresh_tree, node)[1:])
            fresh_tree.expand(node, proposals(seed, path, ties))
            drafted_fresh += 1

    again = BeamSearch(tree, 3, 3)
    drafted_again = 0
    while missing := again.proceed(tree):
        for node in missing:
            tree.expand(node, proposals(seed, (*prefix, *path_tokens(tree, node)[1:]), ties))
            drafted_again += 1
    assert drafted_again < drafted_fresh
    paths = [path_tokens(tree, node)[1:] for node in again.best(tree, 20)]
    expected = [path_tokens(fresh_tree, node)[1:] for node in fresh.best(fresh_tree, 20)]
    if ties:
        # Values of 0 and -0.5 add up exactly, so equal scores stay equal above another root.
        assert paths == expected
    else:
        # Scores carry the old root's prefix, whose last bit may reorder nearly equal ones.
        assert sorted(paths) == sorted(expected)


@given(seed=st.integers(0, 10_000), ties=st.booleans(), layers=st.integers(1, 3))
@settings(deadline=None)
def test_extension_goes_deeper_and_offers_only_what_is_not_in_the_tree(
    seed: int, ties: bool, layers: int
) -> None:
    tree = Tree(0)
    tree.plant(99, 0, -1)
    growth = BeamSearch(tree, 3, 1)
    grow(tree, growth, seed, ties)
    tree.mark_waiting(growth.best(tree, 5))
    before = set(selected(tree))
    growth.extend(tree, layers)
    grow(tree, growth, seed, ties)
    offered = growth.best(tree, 12, unselected=True)
    assert len(offered) == 12
    assert not set(offered) & before
    tree.mark_waiting(offered)
    tree.check()
    assert max(node.depth for node in tree) <= 2 + layers


def test_rebase_forgets_what_was_pruned() -> None:
    tree = Tree(0)
    tree.plant(99, 0, -1)
    growth = BeamSearch(tree, 3, 2)
    grow(tree, growth, seed=3, ties=False)
    nodes = growth.best(tree, 20)
    tree.mark_waiting(nodes)
    tree.advance(nodes[0])
    growth.rebase(tree)
    below = growth.best(tree, 50)
    assert below
    assert all(tree.path(node)[0] == nodes[0] for node in below)


@pytest.mark.parametrize("loops", [0, 6])
def test_base_has_the_published_size(loops: int) -> None:
    """k + d0 * k * k entries of depth d0 + 1; with k = 10 and d0 = 6, 610 and 7."""
    width = 10
    tree = Tree(0)
    tree.plant(0, 0, -1)
    growth = BeamSearch(tree, width, loops)
    while missing := growth.proceed(tree):
        for node in missing:
            tree.expand(
                node, Expansion(tuple(range(width)), tuple(-0.1 * (at + 1) for at in range(width)))
            )
    nodes = growth.best(tree, 10_000)
    assert len(nodes) == width + loops * width * width
    assert max(tree[node].depth for node in nodes) == loops + 1
