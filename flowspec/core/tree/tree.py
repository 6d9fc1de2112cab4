"""The token tree of one run: drafted continuations of a root that the target has chosen.

Every node has one status:

    DRAFTED    proposed by the drafter, not in a segment
    WAITING    in a segment that has not been sent, or a new root that has yet to be
    SENT       in a segment that was sent to the stages
    ANSWERED   the target has chosen the token after it
    GONE       pruned, or never in the tree

Nodes that are WAITING, SENT or ANSWERED are *selected*: they are the tree T of the papers, the only
nodes that a verdict can follow. A drafter's proposals wait as ``Node.expansion`` until a growth
makes nodes of them.

Rules:
- Ids increase within a run and are never reused; a parent's id is lower than its children's.
- Siblings have distinct tokens, so a path of tokens identifies a node.
- ``value`` is the log of a node's expected acceptance given its parent, at most 0; ``score`` is its
  sum along the path. A child's score is therefore never above its parent's.
- A node is sent after its parent has been selected, and answered after it was sent.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from flowspec.errors import StateError

Top = Sequence[tuple[int, float]]


class Status(enum.Enum):
    """The status of a node; see the module's docstring."""

    DRAFTED = "drafted"
    WAITING = "waiting"
    SENT = "sent"
    ANSWERED = "answered"
    GONE = "gone"


_DRAFTED = Status.DRAFTED  # looking up an enum's member is slow, and trees are walked often


@dataclass(frozen=True, slots=True)
class Expansion:
    """A drafter's best next tokens at a node, best first, and the value of each (log, at most 0).

    ``cells``: the cell of each calibrated value (``core.drafting.calibration``); empty if the
    values are the drafter's own. ``raw``: the drafter's own values, if ``values`` are scaled ones.
    ``below``: what a block drafter proposes below every child of the node, whichever it is.
    """

    tokens: tuple[int, ...]
    values: tuple[float, ...]
    cells: tuple[int, ...] = ()
    raw: tuple[float, ...] = ()
    below: Expansion | None = None


@dataclass(slots=True)
class Node:
    """A node; ``position`` is absolute (prompt + output), ``depth`` counts from the planted root.

    ``choice``: the target's token after it. ``top``, if requested: the target's best tokens, and
    its choice, with their log-probabilities. Both are set with status ANSWERED.
    """

    id: int
    parent: int
    token: int
    position: int
    value: float
    score: float
    depth: int
    status: Status = Status.DRAFTED
    expansion: Expansion | None = None
    children: dict[int, int] = field(default_factory=dict)  # token -> id
    choice: int | None = None
    top: Top = ()

    @property
    def selected(self) -> bool:
        """Whether the node is in T."""
        return self.status is not _DRAFTED


class Tree:
    """Nodes by id; see the module's rules."""

    def __init__(self, next_id: int) -> None:
        self.nodes: dict[int, Node] = {}
        self.root = -1
        self.next_id = next_id
        self._sent: set[int] = set()  # ids of the nodes that are SENT or ANSWERED

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, node: int) -> bool:
        return node in self.nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __getitem__(self, node: int) -> Node:
        return self.nodes[node]

    # ---- growing ---------------------------------------------------------------------------------

    def plant(self, token: int, position: int, parent: int) -> int:
        """Drop all nodes and make ``token``, which the target has chosen, the root; WAITING.

        ``parent``: the last context id.
        """
        self.clear()
        root = Node(self.next_id, parent, token, position, 0.0, 0.0, 0, status=Status.WAITING)
        self.root = self._new(root)
        return self.root

    def clear(self) -> None:
        """Drop all nodes."""
        self.nodes.clear()
        self._sent.clear()

    def _new(self, node: Node) -> int:
        self.nodes[node.id] = node
        self.next_id = node.id + 1
        return node.id

    def add(self, parent: int, token: int, value: float) -> int:
        """The id of ``parent``'s child for ``token``, with its value set; a new one is DRAFTED."""
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
            expansion=None if above.expansion is None else above.expansion.below,
        )
        above.children[token] = node.id
        return self._new(node)

    def _revalue(self, top: int, value: float) -> None:
        """Set the value of ``top`` and update the scores of its subtree."""
        self.nodes[top].value = value
        for node in self.subtree(top):
            entry = self.nodes[node]
            entry.score = self.nodes[entry.parent].score + entry.value

    def child(self, parent: int, token: int) -> int | None:
        """The id of ``parent``'s child for ``token``, of any status; None: there is none."""
        return self.nodes[parent].children.get(token)

    def expand(self, node: int, expansion: Expansion) -> None:
        """Set the drafter's proposals below ``node``; no child is created yet.

        Descendants that exist and have no proposals get those of their level.
        """
        self.nodes[node].expansion = expansion
        level = [node]
        while (below := expansion.below) is not None and level:
            level = [child for above in level for child in self.nodes[above].children.values()]
            for child in level:
                if self.nodes[child].expansion is None:
                    self.nodes[child].expansion = below
            expansion = below

    # ---- status ----------------------------------------------------------------------------------

    def status(self, node: int) -> Status:
        """The status of ``node``; GONE if it is not in the tree."""
        found = self.nodes.get(node)
        return Status.GONE if found is None else found.status

    def selected(self) -> list[Node]:
        """T's nodes, in the order of their creation."""
        return [node for node in self.nodes.values() if node.status is not _DRAFTED]

    @property
    def sent(self) -> Set[int]:
        """Ids of the nodes that are SENT or ANSWERED."""
        return self._sent

    def mark_waiting(self, ids: Iterable[int]) -> None:
        """Mark DRAFTED nodes as WAITING; parents must come before their children."""
        for node in ids:
            entry = self.nodes[node]
            if node != self.root and self.nodes[entry.parent].status is Status.DRAFTED:
                raise StateError(f"node {node} was selected before its parent {entry.parent}")
            if entry.status is Status.DRAFTED:
                entry.status = Status.WAITING

    def mark_sent(self, ids: Sequence[int]) -> None:
        """Mark WAITING nodes as SENT; StateError for any other node."""
        for node in ids:
            entry = self.nodes[node]
            if entry.status is not Status.WAITING:
                raise StateError(
                    f"node {node} is to be sent and is {entry.status.value}; "
                    "segments hold only nodes that were not selected before"
                )
            entry.status = Status.SENT
        self._sent.update(ids)

    def record_choice(self, node: int, token: int, top: Top = ()) -> None:
        """Record the target's choice after ``node``; no effect if it was not sent, or is gone."""
        if node in self._sent:
            entry = self.nodes[node]
            entry.status = Status.ANSWERED
            entry.choice = token
            entry.top = top

    # ---- pruning ---------------------------------------------------------------------------------

    def advance(self, root: int) -> None:
        """Make ``root`` the root and drop all nodes outside its subtree."""
        self.nodes = {node: self.nodes[node] for node in self.subtree(root)}
        self._sent &= self.nodes.keys()
        self.root = root

    def subtree(self, top: int) -> list[int]:
        """``top`` and its descendants, ascending by id, so parents come first."""
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

    # ---- invariants ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise StateError if any rule of the module is broken."""
        for node in self:
            self._check_node(node)
        for node in self:
            for token, child in node.children.items():
                if child not in self.nodes or self.nodes[child].token != token:
                    raise StateError(f"node {node.id} has a child {child} that is not in the tree")
        sent = {node.id for node in self if node.status in (Status.SENT, Status.ANSWERED)}
        if sent != self._sent:
            raise StateError(f"nodes {sent ^ self._sent} differ between status and sent set")

    def _check_node(self, node: Node) -> None:
        if node.id >= self.next_id:
            raise StateError(f"node {node.id} was not numbered by this tree")
        if (node.choice is not None) != (node.status is Status.ANSWERED):
            raise StateError(f"node {node.id} is {node.status.value} with choice {node.choice}")
        if node.id == self.root:
            return
        above = self.nodes.get(node.parent)
        if above is None or above.children.get(node.token) != node.id:
            raise StateError(f"node {node.id} and its parent {node.parent} do not name each other")
        follows = node.position == above.position + 1 and node.depth == above.depth + 1
        if node.id <= above.id or not follows:
            raise StateError(f"node {node.id} is out of order or place below {above.id}")
        if node.score > above.score or (node.selected and not above.selected):
            raise StateError(f"node {node.id} outranks its parent {above.id}")
