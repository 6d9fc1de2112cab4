"""Growing a tree by beam search, as EAGLE-2 does, over any drafter's expansions.

The caller drives a search: ``proceed(tree)`` names the nodes that need an expansion next, the
caller has them drafted and calls again, until it names none. Expansions stay with the tree's
nodes, so growing again from a new root drafts only nodes that have none. Source: FlowSpec section
3.2 (docs/algorithms.md#beam-growth), with a total order of the nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flowspec.core.drafting.layered_growth import missing
from flowspec.core.tree.tree import Tree

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Base:
    """Candidates in generation order, as columns of equal length: the paper's T_base, without root.

    An entry is a proposed child (``parent``, ``token``); it becomes a node of the tree when the
    beam or a segment takes it.
    """

    parent: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    token: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    value: Floats = field(default_factory=lambda: np.empty(0, np.float64))
    score: Floats = field(default_factory=lambda: np.empty(0, np.float64))
    depth: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def append(self, other: _Base) -> None:
        for column in ("parent", "token", "value", "score", "depth"):
            setattr(self, column, np.concatenate((getattr(self, column), getattr(other, column))))

    def keep(self, mask: npt.NDArray[np.bool_]) -> _Base:
        return _Base(
            self.parent[mask],
            self.token[mask],
            self.value[mask],
            self.score[mask],
            self.depth[mask],
        )

    def ranked(self) -> Ints:
        """Indices in the order (score descending, depth ascending, generation ascending).

        Every prefix of it contains the ancestors of its entries.
        """
        return np.lexsort((np.arange(self.score.size), self.depth, -self.score))


class BeamSearch:
    """Breadth-first beam: the best ``width`` nodes of the last layer get ``width`` children each.

    ``loops`` further layers follow the first, so the base holds up to ``width + loops * width**2``
    entries of depth up to ``loops + 1``.
    """

    def __init__(self, tree: Tree, width: int, loops: int) -> None:
        self.width = width
        self._layers_left = loops + 1
        self._base = _Base()
        self._beam: list[int] = [tree.root]

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        """Nodes that need an expansion before the growth can go on; empty when it is complete."""
        while self._layers_left:
            wanted = missing(tree, self._beam)
            if wanted:
                return wanted
            self._add_layer(tree)
        return ()

    def _add_layer(self, tree: Tree) -> None:
        layer = _children(tree, self._beam, self.width)
        self._base.append(layer)
        self._layers_left -= 1
        if self._layers_left:
            best = np.lexsort((np.arange(layer.score.size), -layer.score))[: self.width]
            self._beam = _materialise(tree, layer, np.sort(best))
            if not self._beam:
                self._layers_left = 0

    def extend(self, tree: Tree, layers: int) -> None:
        """Ask for ``layers`` more layers below the last one (score-aware expansion)."""
        if self._base.parent.size and not self._layers_left:
            depth = self._base.depth.max(initial=0)
            last = self._base.keep(self._base.depth == depth)
            best = np.lexsort((np.arange(last.score.size), -last.score))[: self.width]
            self._beam = _materialise(tree, last, np.sort(best))
            self._layers_left = layers if self._beam else 0

    def rebase(self, tree: Tree) -> None:
        """Drop entries that are no longer below the tree's root."""
        if self._base.parent.size:
            self._base = self._base.keep(
                np.isin(self._base.parent, np.fromiter(tree.nodes, np.int64))
            )
        self._beam = [node for node in self._beam if node in tree]

    def best(
        self, tree: Tree, count: int, *, by_score: bool = True, unselected: bool = False
    ) -> list[int]:
        """The ``count`` entries of the highest scores as nodes, without the root.

        The result is in order of score, or of generation with ``by_score`` False. With
        ``unselected``, entries already in T are skipped.
        """
        ranked = self._base.ranked()
        if unselected:
            fresh = (entry for entry in ranked.tolist() if not self._is_selected(tree, entry))
            ranked = np.fromiter(itertools.islice(fresh, count), np.int64)
        chosen = ranked[:count]
        return _materialise(tree, self._base, chosen if by_score else np.sort(chosen))

    def _is_selected(self, tree: Tree, entry: int) -> bool:
        child = tree.child(int(self._base.parent[entry]), int(self._base.token[entry]))
        return child is not None and tree[child].selected


def _children(tree: Tree, parents: list[int], width: int) -> _Base:
    layer: list[tuple[int, int, float, float, int]] = []
    for parent in parents:
        node = tree[parent]
        if node.expansion is None:
            continue
        for token, value in zip(
            node.expansion.tokens[:width], node.expansion.values[:width], strict=True
        ):
            layer.append((parent, token, value, node.score + value, node.depth + 1))
    if not layer:
        return _Base()
    parent_ids, tokens, values, scores, depths = zip(*layer, strict=True)
    return _Base(
        np.array(parent_ids, np.int64),
        np.array(tokens, np.int64),
        np.array(values, np.float64),
        np.array(scores, np.float64),
        np.array(depths, np.int64),
    )


def _materialise(tree: Tree, base: _Base, entries: Ints) -> list[int]:
    """Nodes for ``entries``, in their order; parents exist because they were in an earlier beam."""
    return [
        tree.add(parent, token, value)
        for parent, token, value in zip(
            base.parent[entries].tolist(),
            base.token[entries].tolist(),
            base.value[entries].tolist(),
            strict=True,
        )
    ]


class BeamGrowth:
    """A growth by beam search; ``finish(tree)`` makes its segments from the search's entries."""

    def __init__(self, search: BeamSearch, finish: Callable[[Tree], list[list[int]]]) -> None:
        self._search = search
        self._finish = finish

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        return self._search.proceed(tree)

    def segments(self, tree: Tree) -> list[list[int]]:
        return self._finish(tree)

    def rebase(self, tree: Tree) -> None:
        self._search.rebase(tree)
