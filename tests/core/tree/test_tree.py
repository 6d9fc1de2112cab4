"""The tree against a naive model: token paths and their statuses."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowspec.core.tree.accept import follow
from flowspec.core.tree.tree import Expansion, Status, Tree
from flowspec.errors import StateError
from tests.core.tree.index_sets import index_sets
from tests.core.tree.views import answer, path_tokens, selected
from tests.marks import examples

TOKENS = st.integers(0, 3)
VALUES = st.sampled_from([0.0, -0.25, -1.0])

Path = tuple[int, ...]


class TreeAgainstPaths(RuleBasedStateMachine):
    """Random grow, merge, select, send, answer and prune; the model is paths from the start."""

    @initialize(position=st.integers(0, 100))
    def plant(self, position: int) -> None:
        self.tree = Tree(position)
        self.context: Path = tuple(9 for _ in range(position))
        root = self.tree.plant(7, position, position - 1)
        self.paths: dict[Path, int] = {(*self.context, 7): root}
        self.statuses: dict[Path, Status] = {(*self.context, 7): Status.WAITING}
        self.choices: dict[Path, int] = {}
        self.seen_ids: set[int] = {root}
        self.sequence: list[int] = [root]

    def path_of(self, node: int) -> Path:
        return next(path for path, known in self.paths.items() if known == node)

    def with_status(self, *wanted: Status) -> list[int]:
        return sorted(self.paths[path] for path, found in self.statuses.items() if found in wanted)

    @rule(data=st.data(), token=TOKENS, value=VALUES)
    def grow_or_merge(self, data: st.DataObject, token: int, value: float) -> None:
        parent = data.draw(st.sampled_from(sorted(self.paths.values())))
        path = (*self.path_of(parent), token)
        node = self.tree.add(parent, token, value)
        if path in self.paths:
            assert node == self.paths[path], "merging keeps the existing node"
        else:
            assert node not in self.seen_ids, "ids are never reused"
            self.paths[path] = node
            self.statuses[path] = Status.DRAFTED
            self.seen_ids.add(node)

    @rule(data=st.data())
    def select_closed_set(self, data: st.DataObject) -> None:
        top = data.draw(st.sampled_from(sorted(self.paths.values())))
        new = [node for node in self.tree.path(top) if not self.tree[node].selected]
        self.tree.mark_waiting(new)
        self.sequence += new
        self.statuses |= {self.path_of(node): Status.WAITING for node in new}

    @rule(data=st.data())
    def send_some_that_wait(self, data: st.DataObject) -> None:
        waiting = self.with_status(Status.WAITING)
        sent = data.draw(st.lists(st.sampled_from(waiting), unique=True)) if waiting else []
        self.tree.mark_sent(sent)
        self.statuses |= {self.path_of(node): Status.SENT for node in sent}

    @rule(data=st.data(), token=TOKENS)
    def answer_any(self, data: st.DataObject, token: int) -> None:
        node = data.draw(st.sampled_from(sorted(self.seen_ids)))
        self.tree.record_choice(node, token)
        if node in self.with_status(Status.SENT, Status.ANSWERED):
            self.statuses[self.path_of(node)] = Status.ANSWERED
            self.choices[self.path_of(node)] = token

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
        self.statuses = {path: self.statuses[path] for path in self.paths}
        self.choices = {path: at for path, at in self.choices.items() if path in self.paths}
        survivors = {
            self.paths[path]
            for path, status in self.statuses.items()
            if status is not Status.DRAFTED
        }
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
        assert selected(self.tree) == self.with_status(Status.WAITING, Status.SENT, Status.ANSWERED)
        assert sorted(self.tree.sent) == self.with_status(Status.SENT, Status.ANSWERED)
        for node in self.seen_ids - set(self.paths.values()):
            assert self.tree.status(node) is Status.GONE
        for path, node in self.paths.items():
            assert path_tokens(self.tree, node) == path[len(self.context) :]
            assert self.tree[node].position == len(path) - 1
            assert self.tree.status(node) is self.statuses[path]
            assert self.tree[node].choice == self.choices.get(path)
        order = sorted(
            self.paths.values(),
            key=lambda node: (-self.tree[node].score, self.tree[node].depth, node),
        )
        place = {node: at for at, node in enumerate(order)}
        for node in order[1:]:
            assert place[self.tree[node].parent] < place[node], (
                "equal scores never put a child first"
            )
        self.check_ancestors()

    def check_ancestors(self) -> None:
        for path, node in self.paths.items():
            ancestors = set(self.tree.path(node))
            for above, other in self.paths.items():
                assert (other in ancestors) == (path[: len(above)] == above)


TestTreeAgainstPaths = TreeAgainstPaths.TestCase
TestTreeAgainstPaths.settings = settings(
    max_examples=examples(60), stateful_step_count=25, deadline=None
)


def test_worked_example_of_the_pruning_figure() -> None:
    """FlowSpec's figure of a prune.

    S = n0..n8 is verified up to n1 and the target's choice at n3 is in S: I_acc = {0, 1}, I_draft =
    {3, 6, 7}.
    """
    tree = Tree(0)
    tree.plant(0, 0, -1)
    parents = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 3, 7: 3, 8: 4}
    for node, parent in parents.items():
        assert tree.add(parent, token=node, value=-1.0) == node
    tree.mark_waiting(range(9))
    answer(tree, {0: 1, 1: 3})
    verdict = follow(tree, budget=10, eos=frozenset())
    assert verdict is not None
    assert (verdict.accepted, verdict.successor, verdict.tokens) == ((0, 1), 3, (1, 3))
    tree.advance(3)
    sets = index_sets(range(9), verdict.accepted, set(selected(tree)))
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
        tree.mark_waiting([child])


def with_a_node_in_every_status() -> tuple[Tree, dict[Status, int]]:
    """A tree and one node per status; the GONE one was pruned."""
    tree = Tree(0)
    old = tree.plant(0, 0, -1)
    gone = tree.add(old, 1, -1.0)
    root = tree.add(old, 2, -1.0)
    tree.mark_waiting([root])
    tree.advance(root)
    nodes = {Status.GONE: gone}
    nodes[Status.DRAFTED] = tree.add(root, 1, -1.0)
    for token, status in enumerate((Status.WAITING, Status.SENT, Status.ANSWERED), 2):
        nodes[status] = tree.add(root, token, -1.0)
        tree.mark_waiting([nodes[status]])
    tree.mark_sent([root, nodes[Status.SENT], nodes[Status.ANSWERED]])
    tree.record_choice(nodes[Status.ANSWERED], 5, ((5, -0.1),))
    tree.check()
    return tree, nodes


@pytest.mark.parametrize("status", Status)
def test_every_status_has_its_node(status: Status) -> None:
    tree, nodes = with_a_node_in_every_status()
    assert tree.status(nodes[status]) is status


@pytest.mark.parametrize("status", [Status.DRAFTED, Status.SENT, Status.ANSWERED])
def test_only_what_waits_can_be_sent(status: Status) -> None:
    tree, nodes = with_a_node_in_every_status()
    with pytest.raises(StateError, match=f"is to be sent and is {status.value}"):
        tree.mark_sent([nodes[status]])
    assert tree.status(nodes[status]) is status
    tree.check()


def test_what_is_gone_can_neither_be_selected_nor_sent() -> None:
    tree, nodes = with_a_node_in_every_status()
    for put in (tree.mark_waiting, tree.mark_sent):
        with pytest.raises((StateError, KeyError)):
            put([nodes[Status.GONE]])
    assert tree.status(nodes[Status.GONE]) is Status.GONE
    tree.check()


def test_what_waits_is_sent_once() -> None:
    tree, nodes = with_a_node_in_every_status()
    waiting = nodes[Status.WAITING]
    tree.mark_sent([waiting])
    assert tree.status(waiting) is Status.SENT
    with pytest.raises(StateError):
        tree.mark_sent([waiting])


@pytest.mark.parametrize("status", [Status.GONE, Status.DRAFTED, Status.WAITING])
def test_an_answer_for_what_was_not_sent_changes_nothing(status: Status) -> None:
    tree, nodes = with_a_node_in_every_status()
    tree.record_choice(nodes[status], 7)
    assert tree.status(nodes[status]) is status
    assert status is Status.GONE or tree[nodes[status]].choice is None
    tree.check()


def test_an_answer_is_kept_with_its_node() -> None:
    tree, nodes = with_a_node_in_every_status()
    answered = tree[nodes[Status.ANSWERED]]
    assert (answered.choice, answered.top) == (5, ((5, -0.1),))
    tree.record_choice(nodes[Status.SENT], 6)
    assert tree.status(nodes[Status.SENT]) is Status.ANSWERED
    assert (tree[nodes[Status.SENT]].choice, tree[nodes[Status.SENT]].top) == (6, ())


@pytest.mark.parametrize("status", [Status.WAITING, Status.SENT, Status.ANSWERED])
def test_selecting_again_leaves_a_node_where_it_is(status: Status) -> None:
    tree, nodes = with_a_node_in_every_status()
    tree.mark_waiting([nodes[status]])
    assert tree.status(nodes[status]) is status


@pytest.mark.parametrize("again", ["clear", "plant"])
def test_dropping_everything_leaves_nothing_sent(again: str) -> None:
    tree, nodes = with_a_node_in_every_status()
    if again == "clear":
        tree.clear()
        assert len(tree) == 0
    else:
        root = tree.plant(0, 5, nodes[Status.ANSWERED])
        assert root > max(nodes.values()), "ids are never reused"
        assert tree.status(root) is Status.WAITING
    assert set(tree.sent) == set()
    assert {tree.status(node) for node in nodes.values()} == {Status.GONE}
    tree.check()


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


@pytest.mark.parametrize("damage", ["score", "position", "child", "number", "choice", "sent"])
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
    elif damage == "choice":
        node.choice = 3
    elif damage == "sent":
        node.status = Status.SENT
    else:
        tree.next_id = 1
    with pytest.raises(StateError):
        tree.check()


def test_a_child_added_again_with_another_value_takes_its_descendants_along() -> None:
    """A later draft may change a value; no node may then outrank its parent."""
    tree = Tree(0)
    root = tree.plant(1, 0, -1)
    child = tree.add(root, 5, -0.1)
    leaf = tree.add(tree.add(child, 6, -0.2), 7, -0.3)
    assert tree.add(root, 5, -2.0) == child
    assert tree[child].value == -2.0
    assert tree[leaf].score == pytest.approx(-2.5)
    tree.check()
