"""Sample and follow: the target's token is drawn first, then looked up among the node's children.

Lossless by construction: every emitted token is the target's own choice given the true prefix;
the tree only decides whether the next row is already computed. Source: ``algorithms.md`` 2.6 and
7, rule 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flowspec.core.tree.tree import Tree


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verification decided.

    ``accepted`` node ids, the root first, become context; ``tokens`` are as many new output
    tokens: those of the accepted nodes after the root, then the target's choice at the last one.
    ``successor`` is that choice's node if the tree has it in T, else None. ``hits`` of the
    choices had a node in T. ``finish`` is ``""``, ``"eos"`` or ``"length"``; the tokens end
    there exactly.
    """

    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    successor: int | None
    hits: int
    finish: str


def _as_chosen(node: int, token: int) -> int:
    return token


def follow(
    tree: Tree,
    choices: Mapping[int, int],
    *,
    budget: int,
    eos: frozenset[int],
    candidates: bool = False,
    decide: Callable[[int, int], int] = _as_chosen,
) -> Verdict | None:
    """Walk from the root through the nodes whose rows were answered; None if the root's was not.

    ``choices``: target token by node id. ``budget``: tokens that may still be emitted, at least
    1. ``candidates``: a child counts even if it was never sent. ``decide(node, token)`` is the
    token to emit where the target chose ``token``; anything but the token itself is lossy.
    """
    if tree.root not in choices:
        return None
    node = tree.root
    accepted = [tree.root]
    tokens = []
    hits = 0
    while True:
        token = decide(node, choices[node])
        child = tree.child(node, token)
        if child is not None and not (candidates or tree[child].selected):
            child = None
        tokens.append(token)
        hits += child is not None
        finish = "eos" if token in eos else "length" if len(tokens) == budget else ""
        if finish or child is None or child not in choices:
            return Verdict(tuple(accepted), tuple(tokens), child, hits, finish)
        node = child
        accepted.append(node)
