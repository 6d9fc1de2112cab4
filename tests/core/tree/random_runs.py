"""Random runs as read by a stage: ordered segments and prunes, computed with delays."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from flowspec.core.protocol.work import Part
from flowspec.core.run.key import RunKey
from flowspec.core.tree.live_rows import LiveRows
from flowspec.core.tree.tree import Tree

RUN = RunKey("job", 1)
#: Prompt rows 0, 1 and 2; the last one is the first root.
PROMPT = 3


@dataclass(frozen=True)
class Sent:
    """A segment; its columns are parallel."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """A prune."""

    accepted: tuple[int, ...]
    root: int


class RandomRun:
    """A run at the draft worker: its messages in order, and its final state."""

    def __init__(self, data: st.DataObject) -> None:
        self.tree = Tree(PROMPT - 1)
        self.tree.plant(0, PROMPT - 1, PROMPT - 2)
        self.context = [0, 1]
        self.events: list[Sent | Verdict] = [Sent((0, 1, 2), (-1, 0, 1), (0, 1, 2))]
        self.sent = {2}
        for _ in range(data.draw(st.integers(1, 12))):
            if data.draw(st.booleans()):
                self._send(data)
            else:
                self._commit(data)

    def _send(self, data: st.DataObject) -> None:
        new = []
        if self.tree.root not in self.sent:
            new.append(self.tree.root)
        for _ in range(data.draw(st.integers(1, 4))):
            parents = sorted(self.sent | set(new))
            parent = data.draw(st.sampled_from(parents))
            node = self.tree.add(parent, data.draw(st.integers(0, 3)), -1.0)
            if node not in self.sent and node not in new:
                new.append(node)
        self.sent |= set(new)
        self.tree.mark_waiting(new)
        nodes = [self.tree[node] for node in new]
        parents_of_new = tuple(node.parent for node in nodes)
        positions = tuple(node.position for node in nodes)
        self.events.append(Sent(tuple(new), parents_of_new, positions))

    def _commit(self, data: st.DataObject) -> None:
        if self.tree.root not in self.sent:
            return
        last = data.draw(st.sampled_from(sorted(self.sent)))
        accepted = self.tree.path(last)
        self.context += accepted
        children = [child for child in self.tree[last].children.values() if child in self.sent]
        if children and data.draw(st.booleans()):
            self.tree.advance(data.draw(st.sampled_from(children)))
        else:
            self.tree.plant(0, self.tree[last].position + 1, last)
        self.sent = {node.id for node in self.tree if node.id in self.sent}
        self.events.append(Verdict(tuple(accepted), self.tree.root))

    def lateness(self, data: st.DataObject) -> list[int]:
        """Per segment, the number of events between reading and computing it."""
        return [data.draw(st.integers(0, 4), label="lateness") for _ in self.events]


class RandomStage:
    """A stage that has read all of ``run``; it computed each segment ``late`` events after it.

    ``key``: the run's key in ``parts``, its passes. A row's token is its id.
    """

    def __init__(self, run: RandomRun, late: list[int], key: RunKey = RUN) -> None:
        self._key = key
        self.rows = LiveRows(PROMPT)
        self.parts: list[Part] = []
        self._seen: set[int] = set()
        waiting: list[tuple[int, Sent]] = []
        for number, event in enumerate(run.events):
            if isinstance(event, Sent):
                waiting.append((number + late[number], event))
            else:
                # A verdict exists only once its rows were computed.
                while waiting and not set(event.accepted) <= self._seen:
                    self._compute(waiting.pop(0)[1])
                self.rows.prune(event.accepted, event.root)
            while waiting and waiting[0][0] <= number:
                self._compute(waiting.pop(0)[1])
        for _, sent in waiting:
            self._compute(sent)

    def _compute(self, sent: Sent) -> None:
        kept = self.rows.live(sent.ids, sent.parents)
        alive: set[int] = set()
        for node, parent in zip(sent.ids, sent.parents, strict=True):
            if parent in alive or self.rows.live((node,), (parent,)):
                alive.add(node)
        left = Sent(
            tuple(sent.ids[at] for at in kept),
            tuple(sent.parents[at] for at in kept),
            tuple(sent.positions[at] for at in kept),
        )
        assert set(left.ids) == alive, "a segment's rows are judged as one after the other would be"
        if left.ids:
            self._pass(left)

    def empty_pass(self) -> Part:
        """A pass without rows, which must still prune."""
        self._pass(Sent((), (), ()))
        return self.parts[-1]

    def _pass(self, sent: Sent) -> None:
        context = sum(node < PROMPT - 1 for node in sent.ids)
        pruned = self.rows.begin_pass(sent.ids, sent.parents, context)
        self.parts.append(
            Part(
                run=self._key,
                segment=len(self.parts),
                ids=sent.ids,
                parents=sent.parents,
                positions=sent.positions,
                tokens=sent.ids,
                offsets=(),
                context=context,
                pruned=pruned,
                answers=tuple(range(context, len(sent.ids))),
            )
        )
        self._seen.update(sent.ids)
