"""The draft tree and the target's verdict over it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.reference.cases import EMPTY_PATH, Case, follow_path


@dataclass(eq=False, slots=True)
class Node:
    """A token at an absolute position, after its parent's path.

    ``score``: sum of log-probabilities on the path. ``candidates``: what the drafter said, or None
    before it was asked. ``selected``: the node is in the tree under verification.
    """

    token: int
    position: int
    path: int
    parent: Node | None = None
    score: float = 0.0
    selected: bool = False
    answered: bool = False
    candidates: tuple[tuple[int, float], ...] | None = None
    children: dict[int, Node] = field(default_factory=dict, repr=False)

    def child(self, token: int, value: float) -> Node:
        """The child labelled ``token``; made if there is none."""
        if token not in self.children:
            path, score = follow_path(self.path, token), self.score + value
            self.children[token] = Node(token, self.position + 1, path, self, score)
        return self.children[token]

    def grown(self) -> list[Node]:
        """A child for each candidate, best first; the drafter must have been asked."""
        assert self.candidates is not None
        return [self.child(token, value) for token, value in self.candidates]


def below(node: Node, root: Node) -> bool:
    """Whether ``node`` is ``root`` or descends from it."""
    above: Node | None = node
    while above is not None and above.position > root.position:
        above = above.parent
    return above is root


def live(rows: list[Node], root: Node) -> list[Node]:
    """Of ``rows`` those at or below ``root``."""
    return [row for row in rows if below(row, root)]


def selected_below(root: Node) -> list[Node]:
    """``root`` and the nodes of the tree below it, a layer at a time."""
    found = [root]
    for node in found:
        found.extend(child for child in node.children.values() if child.selected)
    return found


def best(nodes: list[Node], count: int) -> list[Node]:
    """The ``count`` nodes of the highest score, ties to the earlier, in the order given."""
    ranked = sorted(range(len(nodes)), key=lambda index: (-nodes[index].score, index))[:count]
    return [nodes[index] for index in sorted(ranked)]


def first_root(case: Case) -> Node:
    """The root after prefill: the target's first token, at the end of the prompt's path."""
    path = EMPTY_PATH
    for token in case.text[: case.prompt + 1]:
        path = follow_path(path, token)
    return Node(case.text[case.prompt], case.prompt, path, selected=True)


def plant(case: Case, accepted: Node) -> Node:
    """A new round's root: the target's token after ``accepted``, of which nothing is known."""
    token = case.text[accepted.position + 1]
    return Node(
        token, accepted.position + 1, follow_path(accepted.path, token), accepted, selected=True
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """``tokens``: how many are committed. ``root``: the next one, planted if ``missed``."""

    tokens: int
    root: Node
    missed: bool
    finished: bool


def judge(case: Case, root: Node, *, drafted: bool = False) -> Verdict | None:
    """Follow the target's tokens from ``root`` while nodes are answered; None if it is not.

    ``drafted``: a child that was drafted and is not in the tree counts as a hit.
    """
    if not root.answered:
        return None
    node, tokens = root, 0
    while True:
        tokens += 1
        finished = node.position + 2 == len(case.text)
        child = node.children.get(case.text[node.position + 1])
        hit = child is not None and (child.selected or drafted)
        if finished or child is None or not hit:
            return Verdict(tokens, plant(case, node), missed=True, finished=finished)
        if not child.answered:
            return Verdict(tokens, child, missed=False, finished=False)
        node = child
