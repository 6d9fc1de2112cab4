"""What FlowSpec's two variants share: its trees, merges and expansions."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from tests.reference.cases import Case, Options
from tests.reference.engine import Decoder
from tests.reference.growth import Beam
from tests.reference.tree import Node

TREE, MERGE, EXPANSION = range(3)


@dataclass(frozen=True, slots=True)
class Settings:
    """The paper's k, d0, L, L_max, d_exp, L_exp, d_se and L_se, the order, and what is on."""

    width: int
    loops: int
    nodes: int
    segment: int
    merge_loops: int
    merge_nodes: int
    expand_layers: int
    expand_nodes: int
    order: str
    merge: bool
    expand: bool

    @classmethod
    def of(cls, options: Options, *, additions: bool = True) -> Settings:
        """Without ``additions``: neither merges nor expansions."""

        def number(name: str) -> int:
            return int(options.get(name, 0))

        return cls(
            width=number("width"),
            loops=number("loops"),
            nodes=number("nodes"),
            segment=number("segment"),
            merge_loops=number("merge_loops"),
            merge_nodes=number("merge_nodes"),
            expand_layers=number("expand_layers"),
            expand_nodes=number("expand_nodes"),
            order=str(options.get("order", "score")),
            merge=additions and options.get("merge") == "on",
            expand=additions and options.get("expand") == "on",
        )


def cut(rows: list[Node], parts: int, limit: int) -> list[list[Node]]:
    """Consecutive near-equal parts, smaller first; of ``limit`` rows if the least is above it."""
    parts = min(parts, len(rows))
    if len(rows) // parts > limit:
        return [rows[at : at + limit] for at in range(0, len(rows), limit)]
    sizes = [(len(rows) + part) // parts for part in range(parts)]
    ends = [sum(sizes[: part + 1]) for part in range(parts)]
    return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class FlowSpec(Decoder):
    """Which nodes a growth adds, and what becomes of one that a verdict overtakes.

    A growth that is overtaken gives what was found so far and survives as its segment; an expansion
    of a base that has nothing left below the root finds nothing.
    """

    def __init__(self, case: Case, settings: Settings) -> None:
        super().__init__(case)
        self.settings = settings
        self.base = Beam(self.root, 0, 0, settings.order)
        self.kind = TREE

    def grow_beam(self, kind: int, loops: int) -> None:
        """Grow a new base from the root."""
        settings = self.settings
        self.base = Beam(self.root, settings.width, loops + 1, settings.order)
        self.kind, self.growth = kind, self.base

    def grow_expansion(self) -> None:
        """Grow the base deeper, or, if it was ended early, to its end."""
        self.base = copy(self.base)
        self.base.move(self.root)
        self.base.to_do = self.base.to_do or self.settings.expand_layers
        self.kind, self.growth = EXPANSION, self.base

    def growth_done(self) -> None:
        if self.kind == TREE:
            tree = [self.root, *self.base.chosen(self.settings.nodes)]
            for part in cut(tree, len(self.stages) + 1, self.settings.segment):
                self.wait(part)
        else:
            self.wait(self._found())
        self.growth = None

    def _found(self) -> list[Node]:
        """The growth's nodes that are not in the tree."""
        if self.kind == EXPANSION:
            return self.base.chosen_outside(self.settings.expand_nodes)
        chosen = self.base.chosen(self.settings.merge_nodes)
        return [node for node in chosen if not node.selected]

    def root_moved(self) -> None:
        if self.growth is not None:
            self.base.move(self.root)
            self.wait(self._found())
            self.growth = None
        if self.settings.merge:
            self.grow_beam(MERGE, self.settings.merge_loops)
