"""Which nodes a block drafter gets a block for: the best ones, and others that stand for the rest.

A block below a node proposes for several levels at once, whatever the tokens between, so a block
below an ancestor also answers for its descendants, only with less knowledge of their paths. A layer
of a wide tree would need as many blocks as it has nodes; most of them are improbable.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.tree.tree import Tree

#: Nodes of a pass that get a block of their own.
BLOCKS = 8


def block_stems(tree: Tree, wanted: Sequence[int], levels: int) -> list[int]:
    """The nodes to compute a block below, ascending, so that all of ``wanted`` are answered.

    ``levels``: of a block. The best ``BLOCKS`` of ``wanted`` by score are among them. The others
    share blocks with those that have an ancestor in common, not further up than a block reaches.
    """
    ranked = sorted(wanted, key=lambda node: (-tree[node].score, node))
    stems = set(ranked[:BLOCKS])
    groups: dict[int, set[int]] = {}
    for node in ranked[BLOCKS:]:
        path = tree.path(node)[-levels:]
        group = groups.setdefault(path[0], set(path))
        group.intersection_update(path)
    stems.update(max(common) for common in groups.values())  # ids grow along a path
    return sorted(stems)
