"""Sample and follow: the target's token is drawn first, then looked up among the node's children.

Lossless by construction: every emitted token is the target's own choice given the true prefix; the
tree only decides whether the next row is already computed. Source:
docs/algorithms.md#sample-and-follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowspec.core.tree.tree import Node, Tree


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one verification.

    ``accepted``: ids of the nodes that become context, the root first. ``tokens``: the same number
    of new output tokens: those of the accepted nodes after the root, then the target's choice at
    the last one. ``successor``: that choice's node if it is in T, else None. ``hits``: the number
    of choices with a node in T. ``finish``: ``""``, ``"eos"`` or ``"length"``; ``tokens`` ends
    exactly there.
    """

    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    successor: int | None
    hits: int
    finish: str


def _as_chosen(node: Node, token: int) -> int:
    return token


def follow(
    tree: Tree,
    *,
    budget: int,
    eos: frozenset[int],
    accepts_unsent: bool = False,
    decide: Callable[[Node, int], int] = _as_chosen,
) -> Verdict | None:
    """Walk from the root along the target's choices; None if the root has no answer.

    ``budget``: tokens that may still be emitted, at least 1. ``accepts_unsent``: a child counts
    even if it was never put into a segment. ``decide(node, token)``: the token to emit where the
    target chose ``token``; any other token is lossy.
    """
    node = tree[tree.root]
    if node.choice is None:
        return None
    accepted = [tree.root]
    tokens: list[int] = []
    hits = 0
    while True:
        assert node.choice is not None
        token = decide(node, node.choice)
        child = tree.child(node.id, token)
        if child is not None and not (accepts_unsent or tree[child].selected):
            child = None
        tokens.append(token)
        hits += child is not None
        finish = "eos" if token in eos else "length" if len(tokens) == budget else ""
        if finish or child is None or tree[child].choice is None:
            return Verdict(tuple(accepted), tuple(tokens), child, hits, finish)
        node = tree[child]
        accepted.append(child)
