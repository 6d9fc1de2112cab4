"""Growths: how the systems extend the draft tree, a draft pass at a time."""

from __future__ import annotations

from typing import Protocol

from tests.reference.tree import Node, below, best, live, selected_below


class Growth(Protocol):
    """``wanted``: the nodes of its next draft pass, none when it is complete."""

    def wanted(self) -> list[Node]: ...


class Beam:
    """EAGLE-2's beam: ``width`` children per node, and the ``width`` best of a layer go on.

    ``base``: all that was found, in the order of generation. ``to_do``: layers still to add.
    """

    def __init__(self, root: Node, width: int, layers: int, order: str) -> None:
        self.root, self._width, self._order = root, width, order
        self.base: list[Node] = []
        self.beam = [root]
        self.to_do = layers

    def wanted(self) -> list[Node]:
        while self.to_do:
            unknown = [node for node in self.beam if node.candidates is None]
            if unknown:
                return unknown
            layer = [child for node in self.beam for child in node.grown()[: self._width]]
            if not layer:
                self.to_do = 0
                break
            self.base.extend(layer)
            self.beam = best(layer, self._width)
            self.to_do -= 1
        return []

    def chosen(self, count: int) -> list[Node]:
        """The ``count`` best of the base, by score, depth and generation, in sending order."""
        return self._ordered(list(enumerate(self.base)), count)

    def chosen_outside(self, count: int) -> list[Node]:
        """The ``count`` best of the base that are not in the tree, in sending order."""
        outside = [(at, node) for at, node in enumerate(self.base) if not node.selected]
        return self._ordered(outside, count)

    def _ordered(self, entries: list[tuple[int, Node]], count: int) -> list[Node]:
        entries.sort(key=lambda entry: (-entry[1].score, entry[1].position, entry[0]))
        kept = entries[:count]
        if self._order == "generation":
            kept.sort(key=lambda entry: entry[0])
        return [node for _, node in kept]

    def move(self, root: Node) -> None:
        """Drop what is not below ``root``; a growth under way goes on from what its beam has left.

        That of a complete base would go on from the best of the deepest layer left.
        """
        self.root = root
        self.base = [node for node in self.base if node is not root and below(node, root)]
        if self.to_do:
            self.beam = live(self.beam, root)
        else:
            depth = max((node.position for node in self.base), default=0)
            self.beam = best([node for node in self.base if node.position == depth], self._width)


def bottom_layer(root: Node) -> list[Node]:
    """The deepest nodes of the tree."""
    tree = selected_below(root)
    return [node for node in tree if node.position == tree[-1].position]


class Levels:
    """PipeDec's next layers: of the bottom layer's ``children`` best candidates the ``width`` best.

    A layer is chosen when its draft pass is over, the last of the ``count`` layers when the segment
    is asked for, among the nodes alive then.
    """

    def __init__(self, bottom: list[Node], width: int, children: int, count: int = 1) -> None:
        self._bottom, self._width, self._children = bottom, width, children
        self._left = count - 1
        self._rows: list[Node] = []

    def wanted(self) -> list[Node]:
        while True:
            unknown = [node for node in self._bottom if node.candidates is None]
            if unknown or not self._left or not self._bottom:
                return unknown
            self._bottom = self._next_layer()
            self._rows.extend(self._bottom)
            self._left -= 1

    def rows(self) -> list[Node]:
        """The new layers, each by parent and then by rank."""
        return [*self._rows, *self._next_layer()]

    def _next_layer(self) -> list[Node]:
        found = [child for node in self._bottom for child in node.grown()[: self._children]]
        return best(found, self._width)
