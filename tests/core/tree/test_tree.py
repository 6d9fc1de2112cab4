"""The tree against a naive model: a set of token paths."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowspec.core.tree.accept import follow
from flowspec.core.tree.tree import Expansion, Tree
from flowspec.errors import StateError
from tests.core.tree.index_sets import index_sets

TOKENS = st.integers(0, 3)
VALUES = st.sampled_from([0.0, -0.25, -1.0])

Path = tuple[int, ...]


class TreeAgainstPaths(RuleBasedStateMachine):
    """Grow, merge, select and prune at random; the naive model is paths from the absolute start."""

    @initialize(position=st.integers(0, 100))
    def plant(self, position: int) -> None:
        self.tree = Tree(position)
        self.context: Path = tuple(9 for _ in range(position))
        root = self.tree.plant(7, position, position - 1)
        self.paths: dict[Path, int] = {(*self.context, 7): root}
        self.selected: set[Path] = {(*self.context, 7)}
        self.seen_ids: set[int] = {root}
        self.sequence: list[int] = [root]

    def path_of(self, node: int) -> Path:
        return next(path for path, known in self.paths.items() if known == node)

    @rule(data=st.data(), token=TOKENS, value=VALUES)
    def grow_or_merge(self, data: st.DataObject, token: int, value: float) -> None:
        parent = data.draw(st.sampled_from(sorted(self.paths.values())))
        path = (*self.path_of(parent), token)
        node = self.tree.add(parent, token, value)
        if path in self.paths:
            assert node == self.paths[path], "merging keeps the node that is there"
        else:
            assert node not in self.seen_ids, "ids are never reused"
            self.paths[path] = node
            self.seen_ids.add(node)

    @rule(data=st.data())
    def select_closed_set(self, data: st.DataObject) -> None:
        top = data.draw(st.sampled_from(sorted(self.paths.values())))
        new = [node for node in self.tree.path(top) if not self.tree[node].selected]
        self.tree.select(new)
        self.sequence += new
        self.selected |= {self.path_of(node) for node in new}

    @precondition(lambda self: len(self.tree) > 1)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        root = data.draw(
            st.sampled_from(
                sorted(node for node in self.paths.values() if self.tree[node].selected)
            )
        )
        accepted = self.tree.path(root)[:-1]
        keep = self.path_of(root)
        self.paths = {path: node for path, node in self.paths.items() if path[: len(keep)] == keep}
        self.selected = {path for path in self.selected if path in self.paths}
        survivors = {self.paths[path] for path in self.selected}
        before = list(self.sequence)
        sets = index_sets(before, accepted, survivors)
        self.tree.advance(root)
        self.context = keep[:-1]
        self.sequence = [node for node in before if node in survivors]
        # I_retain keeps exactly the accepted rows and the survivors, in order, accepted ones first.
        assert [before[at] for at in sets.retained] == [*accepted, *self.sequence]
        for cached in range(len(before) + 1):
            local = sets.local(cached, 3)
            in_cache = sets.in_cache(cached)
            window = before[cached : cached + 3]
            assert [before[at] for at in in_cache] + [window[at] for at in local] == [
                node for node in before[: cached + 3] if node in survivors or node in accepted
            ]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        assert {node.id for node in self.tree} == set(self.paths.values())
        assert set(self.tree.selected()) == {self.paths[path] for path in self.selected}
        for path, node in self.paths.items():
            assert self.tree.tokens(node) == path[len(self.context) :]
            assert self.tree[node].position == len(path) - 1
        order = sorted(
            self.paths.values(),
            key=lambda node: (-self.tree[node].score, self.tree[node].depth, node),
        )
        place = {node: at for at, node in enumerate(order)}
        for node in order[1:]:
            assert place[self.tree[node].parent] < place[node], (
                "equal scores never put a child first"
            )
        self.check_mask(order)

    def check_mask(self, order: list[int]) -> None:
        mask = self.tree.mask(order)
        paths = {node: path for path, node in self.paths.items()}
        for row, u in enumerate(order):
            for column, v in enumerate(order):
                assert mask[row, column] == (paths[u][: len(paths[v])] == paths[v])


TestTreeAgainstPaths = TreeAgainstPaths.TestCase
TestTreeAgainstPaths.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_worked_example_of_the_pruning_figure() -> None:
    """FlowSpec's figure of a prune: with S = n0..n8 verified up to n1 and the target's choice at
    n3, I_acc = {0, 1} and I_draft = {3, 6, 7}.
    """
    tree = Tree(0)
    tree.plant(0, 0, -1)
    parents = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 3, 7: 3, 8: 4}
    for node, parent in parents.items():
        assert tree.add(parent, token=node, value=-1.0) == node
    tree.select(range(9))
    verdict = follow(tree, {0: 1, 1: 3}, budget=10, eos=frozenset())
    assert verdict is not None
    assert (verdict.accepted, verdict.successor, verdict.tokens) == ((0, 1), 3, (1, 3))
    tree.advance(3)
    sets = index_sets(range(9), verdict.accepted, set(tree.selected()))
    assert set(sets.accepted) == {0, 1}
    assert set(sets.drafted) == {3, 6, 7}
    assert sets.retained == (0, 1, 3, 6, 7)
    assert sets.in_cache(4) == (0, 1, 3)
    assert sets.local(4, 3) == (2,)  # of the pending rows n4, n5, n6 the last one stays


def test_a_selected_child_needs_a_selected_parent() -> None:
    tree = Tree(0)
    root = tree.plant(0, 0, -1)
    child = tree.add(tree.add(root, 1, -1.0), 2, -1.0)
    with pytest.raises(StateError, match="before its parent"):
        tree.select([child])


def test_positive_values_are_refused() -> None:
    tree = Tree(0)
    with pytest.raises(StateError, match="above 0"):
        tree.add(tree.plant(0, 0, -1), 1, 0.1)


def test_expansions_die_with_their_nodes() -> None:
    tree = Tree(0)
    root = tree.plant(0, 0, -1)
    left = tree.add(root, 1, -1.0)
    right = tree.add(root, 2, -1.0)
    tree.expand(left, Expansion((5,), (-1.0,)))
    tree.advance(right)
    assert left not in tree
    assert tree[right].expansion is None


@pytest.mark.parametrize("damage", ["score", "position", "child", "number"])
def test_check_finds_damage(damage: str) -> None:
    tree = Tree(0)
    root = tree.plant(0, 0, -1)
    node = tree[tree.add(root, 1, -1.0)]
    if damage == "score":
        node.score = 1.0
    elif damage == "position":
        node.position += 1
    elif damage == "child":
        tree[root].children[5] = 77
    else:
        tree.next_id = 1
    with pytest.raises(StateError):
        tree.check()


def test_a_child_added_again_with_another_value_takes_its_descendants_along() -> None:
    """A drafter that saw more may think otherwise; no node may then outrank its parent."""
    tree = Tree(0)
    root = tree.plant(1, 0, -1)
    child = tree.add(root, 5, -0.1)
    leaf = tree.add(tree.add(child, 6, -0.2), 7, -0.3)
    assert tree.add(root, 5, -2.0) == child
    assert tree[child].value == -2.0
    assert tree[leaf].score == pytest.approx(-2.5)
    tree.check()
