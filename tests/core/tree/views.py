"""Views of a tree that only tests use."""

from __future__ import annotations

from collections.abc import Mapping

from flowspec.core.tree.tree import Status, Tree


def path_tokens(tree: Tree, node: int) -> tuple[int, ...]:
    """Tokens from the root to ``node``, both included."""
    return tuple(tree[step].token for step in tree.path(node))


def selected(tree: Tree) -> list[int]:
    """The nodes of T, ascending by id, the root included."""
    return sorted(node.id for node in tree if node.selected)


def send_waiting(tree: Tree) -> None:
    """Send every waiting node to the stages."""
    tree.mark_sent([node for node in selected(tree) if tree.status(node) is Status.WAITING])


def answer(tree: Tree, choices: Mapping[int, int]) -> None:
    """Send every node of T and answer it with ``choices``, by node id."""
    send_waiting(tree)
    for node, token in choices.items():
        tree.record_choice(node, token)
