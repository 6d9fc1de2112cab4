"""Sample and follow on small trees, and against plain decoding on random ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.tree.accept import follow
from flowspec.core.tree.tree import Tree

NONE: frozenset[int] = frozenset()


def chain(*tokens: int) -> Tree:
    tree = Tree(0)
    node = tree.plant(tokens[0], 0, -1)
    for token in tokens[1:]:
        node = tree.add(node, token, -0.5)
        tree.select([node])
    return tree


def test_nothing_without_the_roots_answer() -> None:
    assert follow(chain(5, 6), {1: 7}, budget=9, eos=NONE) is None


def test_a_child_still_in_flight_becomes_the_next_root() -> None:
    verdict = follow(chain(5, 6, 7), {0: 6, 1: 7}, budget=9, eos=NONE)
    assert verdict is not None
    assert (verdict.accepted, verdict.tokens, verdict.successor, verdict.hits) == (
        (0, 1),
        (6, 7),
        2,
        2,
    )


def test_a_miss_emits_the_targets_token_and_has_no_successor() -> None:
    verdict = follow(chain(5, 6), {0: 9}, budget=9, eos=NONE)
    assert verdict is not None
    assert (verdict.accepted, verdict.tokens, verdict.successor, verdict.hits) == (
        (0,),
        (9,),
        None,
        0,
    )


def test_a_candidate_outside_the_tree_is_a_miss() -> None:
    tree = chain(5)
    tree.add(0, 6, -0.1)
    verdict = follow(tree, {0: 6}, budget=9, eos=NONE)
    assert verdict is not None
    assert verdict.successor is None


@pytest.mark.parametrize(
    ("budget", "eos", "tokens", "finish"),
    [
        (1, NONE, (6,), "length"),
        (9, frozenset({7}), (6, 7), "eos"),
        (2, frozenset({7}), (6, 7), "eos"),
    ],
)
def test_ends_are_exact(
    budget: int, eos: frozenset[int], tokens: tuple[int, ...], finish: str
) -> None:
    verdict = follow(chain(5, 6, 7, 8), {0: 6, 1: 7, 2: 8, 3: 9}, budget=budget, eos=eos)
    assert verdict is not None
    assert (verdict.tokens, verdict.finish) == (tokens, finish)
    assert len(verdict.accepted) == len(verdict.tokens)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), max_size=40), st.data())
def test_emits_the_targets_own_text_whatever_is_in_the_tree(
    grown: list[tuple[int, int]], data: st.DataObject
) -> None:
    tree = Tree(0)
    tree.plant(0, 0, -1)
    for parent, token in grown:
        if parent in tree:
            tree.select([tree.add(parent, token, -1.0)])
    target = {node.id: data.draw(st.integers(0, 2), label=f"choice at {node.id}") for node in tree}
    answered = data.draw(st.integers(1, len(tree)))
    answers = {node: target[node] for node in sorted(target)[:answered]}
    verdict = follow(tree, answers, budget=100, eos=NONE)
    assert verdict is not None
    node = tree.root
    for at, token in enumerate(verdict.tokens):
        assert token == target[node]
        child = tree.child(node, token)
        if at + 1 < len(verdict.tokens):
            assert child is not None
            node = child
    assert tree.child(node, verdict.tokens[-1]) == verdict.successor
    assert verdict.successor not in answers
