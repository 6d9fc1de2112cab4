"""Sample and follow on small trees, and on random ones against plain decoding."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.tree.accept import Verdict, follow
from flowspec.core.tree.tree import Node, Tree
from tests.core.tree.views import answer

NONE: frozenset[int] = frozenset()


def chain(*tokens: int) -> Tree:
    tree = Tree(0)
    node = tree.plant(tokens[0], 0, -1)
    for token in tokens[1:]:
        node = tree.add(node, token, -0.5)
        tree.mark_waiting([node])
    return tree


def judged(
    tree: Tree, choices: Mapping[int, int], budget: int = 9, eos: frozenset[int] = NONE
) -> Verdict | None:
    """The verdict once the target has made ``choices``, by node id."""
    answer(tree, choices)
    return follow(tree, budget=budget, eos=eos)


def test_nothing_without_the_roots_answer() -> None:
    assert judged(chain(5, 6), {1: 7}) is None


def test_a_child_still_in_flight_becomes_the_next_root() -> None:
    verdict = judged(chain(5, 6, 7), {0: 6, 1: 7})
    assert verdict is not None
    assert (verdict.accepted, verdict.tokens, verdict.successor, verdict.hits) == (
        (0, 1),
        (6, 7),
        2,
        2,
    )


def test_a_miss_emits_the_targets_token_and_has_no_successor() -> None:
    verdict = judged(chain(5, 6), {0: 9})
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
    verdict = judged(tree, {0: 6})
    assert verdict is not None
    assert verdict.successor is None


def test_a_candidate_never_sent_is_a_hit_where_those_count() -> None:
    tree = chain(5)
    candidate = tree.add(0, 6, -0.1)
    answer(tree, {0: 6})
    verdict = follow(tree, budget=9, eos=NONE, accepts_unsent=True)
    assert verdict == Verdict((0,), (6,), candidate, hits=1, finish="")


def test_the_token_decided_on_takes_the_place_of_the_targets_choice() -> None:
    asked = []

    def decide(node: Node, token: int) -> int:
        asked.append((node.id, token))
        return 6 if node.id == 0 else token

    tree = chain(5, 6, 7)
    answer(tree, {0: 9, 1: 8})
    verdict = follow(tree, budget=9, eos=NONE, decide=decide)
    assert verdict == Verdict((0, 1), (6, 8), None, hits=1, finish="")
    assert asked == [(0, 9), (1, 8)]


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
    verdict = judged(chain(5, 6, 7, 8), {0: 6, 1: 7, 2: 8, 3: 9}, budget, eos)
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
            tree.mark_waiting([tree.add(parent, token, -1.0)])
    target = {node.id: data.draw(st.integers(0, 2), label=f"choice at {node.id}") for node in tree}
    answered = data.draw(st.integers(1, len(tree)))
    answers = {node: target[node] for node in sorted(target)[:answered]}
    verdict = judged(tree, answers, budget=100)
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
