"""The token tree of one job: speculated continuations below a root the target has already decided.

Two kinds of nodes share it. *Candidates* exist only at the drafter: the target may never see
them. *Selected* nodes were put into a segment, sent or waiting: they are the tree T of the
papers.

Rules:
- Ids only grow within a job and are never reused; a parent's id is below its children's.
- Siblings have distinct tokens, so a path of tokens names a node.
- ``value`` is the log of a node's expected acceptance given its parent, at most 0; ``score`` is
  its sum along the path. A child's score is therefore never above its parent's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flowspec.errors import StateError


@dataclass(frozen=True, slots=True)
class Expansion:
    """A drafter's best next tokens at a node, best first, and the value of each (log, at most 0).

    ``cells``: where a calibrated value came from (``core.calibrate``); empty if it is the
    drafter's own. ``raw``: what the drafter itself said, where values were scaled from that.
    """

    tokens: tuple[int, ...]
    values: tuple[float, ...]
    cells: tuple[int, ...] = ()
    raw: tuple[float, ...] = ()


@dataclass(slots=True)
class Node:
    """One node; ``position`` is absolute (prompt + output), ``depth`` counts from the
    planted root.
    """

    id: int
    parent: int
    token: int
    position: int
    value: float
    score: float
    depth: int
    selected: bool = False
    expansion: Expansion | None = None
    children: dict[int, int] = field(default_factory=dict)  # token -> id


class Tree:
    """Nodes by id; see the module's rules."""

    def __init__(self, next_id: int) -> None:
        self.nodes: dict[int, Node] = {}
        self.root = -1
        self.next_id = next_id

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, node: int) -> bool:
        return node in self.nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __getitem__(self, node: int) -> Node:
        return self.nodes[node]

    def plant(self, token: int, position: int, parent: int) -> int:
        """Drop everything and start from one decided token; ``parent`` is the last context id."""
        self.nodes.clear()
        self.root = self._new(
            Node(self.next_id, parent, token, position, 0.0, 0.0, 0, selected=True)
        )
        return self.root

    def _new(self, node: Node) -> int:
        self.nodes[node.id] = node
        self.next_id = node.id + 1
        return node.id

    def add(self, parent: int, token: int, value: float) -> int:
        """The child of ``parent`` labelled ``token``, worth ``value``: the existing one, or a new
        candidate.
        """
        if not value <= 0:
            raise StateError(f"node value {value} is above 0 (log of an acceptance)")
        above = self.nodes[parent]
        known = above.children.get(token)
        if known is not None:
            if self.nodes[known].value != value:
                self._revalue(known, value)
            return known
        node = Node(
            self.next_id,
            parent,
            token,
            above.position + 1,
            value,
            above.score + value,
            above.depth + 1,
        )
        above.children[token] = node.id
        return self._new(node)

    def _revalue(self, top: int, value: float) -> None:
        """A drafter thinks otherwise of ``top`` by now: its score and those below it follow."""
        self.nodes[top].value = value
        for node in self.subtree(top):
            entry = self.nodes[node]
            entry.score = self.nodes[entry.parent].score + entry.value

    def child(self, parent: int, token: int) -> int | None:
        """The id of ``parent``'s child labelled ``token``, candidate or selected, if
        there is one.
        """
        return self.nodes[parent].children.get(token)

    def expand(self, node: int, expansion: Expansion) -> None:
        """Remember what the drafter proposes below ``node``; no child is created yet."""
        self.nodes[node].expansion = expansion

    def select(self, ids: Iterable[int]) -> None:
        """Put nodes into T; parents must come before their children."""
        for node in ids:
            entry = self.nodes[node]
            if node != self.root and not self.nodes[entry.parent].selected:
                raise StateError(f"node {node} was selected before its parent {entry.parent}")
            entry.selected = True

    def advance(self, root: int) -> None:
        """Keep the subtree of ``root`` and make it the root; all else is gone."""
        kept = self.subtree(root)
        self.nodes = {node: self.nodes[node] for node in kept}
        self.root = root

    def subtree(self, top: int) -> list[int]:
        """``top`` and its descendants, ascending by id, hence parents first."""
        found = [top]
        for node in found:
            found.extend(self.nodes[node].children.values())
        return sorted(found)

    def path(self, node: int) -> list[int]:
        """Ids from the root to ``node``, both included."""
        steps = [node]
        while steps[-1] != self.root:
            steps.append(self.nodes[steps[-1]].parent)
        return steps[::-1]

    def tokens(self, node: int) -> tuple[int, ...]:
        """Tokens from the root to ``node``, both included."""
        return tuple(self.nodes[step].token for step in self.path(node))

    def selected(self) -> list[int]:
        """The nodes of T, ascending by id, the root included."""
        return sorted(node.id for node in self if node.selected)

    def mask(self, order: Sequence[int]) -> npt.NDArray[np.bool_]:
        """``[n, n]``: entry (u, v) says that v is u itself or an ancestor of u, both
        in ``order``.
        """
        column = {node: at for at, node in enumerate(order)}
        mask = np.zeros((len(order), len(order)), dtype=np.bool_)
        for row, node in enumerate(order):
            for step in self.path(node):
                if step in column:
                    mask[row, column[step]] = True
        return mask

    def check(self) -> None:
        """Raise if any rule of the module is broken."""
        for node in self:
            if node.id >= self.next_id:
                raise StateError(f"node {node.id} was not numbered by this tree")
            if node.id == self.root:
                continue
            above = self.nodes.get(node.parent)
            if above is None or above.children.get(node.token) != node.id:
                raise StateError(
                    f"node {node.id} and its parent {node.parent} do not name each other"
                )
            if not (
                node.id > above.id
                and node.position == above.position + 1
                and node.depth == above.depth + 1
            ):
                raise StateError(f"node {node.id} is out of order or place below {above.id}")
            if node.score > above.score or (node.selected and not above.selected):
                raise StateError(f"node {node.id} outranks its parent {above.id}")
        for node in self:
            for token, child in node.children.items():
                if child not in self.nodes or self.nodes[child].token != token:
                    raise StateError(f"node {node.id} names a child {child} that is not there")
