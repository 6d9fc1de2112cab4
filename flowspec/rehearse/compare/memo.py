"""A drafter with a memo: strategies compared on one text draft each of its nodes once.

A drafter's proposals at a node depend on the tokens of the node's path and, if it drafts from
hidden rows, on which nodes' true rows it had when it computed the path. So proposals are kept in a
trie whose edges are a token and whether its parent's true row was known. The run, its strategy and
the rest of a pass have no influence, except on the rounding of a value: candidates that differ by
less may change places between a remembered and a new proposal.

The drafter itself computes a miss, over its own protocol, in a *lane*: a job of the drafter that
holds only the rows that misses needed. A remembered row is computed there once it turns out to be
an ancestor of a missing one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Part, Pruned
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import StateError
from flowspec.model.base import DraftExecutor, DraftsAlone, DraftsBlocks, RowArray
from flowspec.model.drafters.drafter_choice import ChoiceDrafter

#: Continuations computed and kept per node, the largest width of any strategy. The best ``w`` of
#: them equal those of a pass of width ``w``, because every drafter ranks first and then cuts.
WIDTH = 64
#: Nodes with proposals, about 2 kB each, beyond which the next run starts with an empty memo. A
#: dozen texts of 64 tokens, tuned over all strategies and profiles, stay below it.
MOST = 1_000_000


@dataclass(frozen=True, slots=True)
class _Answer:
    """A node's proposals, best first, at most ``WIDTH``; ``sources`` may be empty."""

    tokens: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]
    sources: npt.NDArray[np.int8]


class _State:
    """A row the drafter may compute: its path, and where on it the parent's true row was learnt.

    ``row``: the target's hidden row of this node, once a child was drafted from it. ``answers``:
    uncoupled, coupled.
    """

    __slots__ = ("above", "answers", "below", "learnt", "position", "row", "token")

    def __init__(self, above: _State | None, token: int, learnt: bool) -> None:
        self.above = above
        self.token = token
        self.learnt = learnt
        self.position: int = above.position + 1 if above is not None else -1
        self.below: dict[tuple[int, bool], _State] = {}
        self.row: RowArray | None = None
        self.answers: list[_Answer | None] = [None, None]

    def child(self, token: int, row: RowArray | None) -> _State:
        """The child by ``token``; ``row``: this node's true row; None: unknown."""
        edge = (token, row is not None)
        found = self.below.get(edge)
        if found is None:
            found = self.below[edge] = _State(self, *edge)
            if self.row is None:
                self.row = row
        return found


#: A row of a lane: its state, and whether the drafter learnt its true row before its children. A
#: node with children of both kinds has two rows, because a drafter's true row cannot be removed.
_Key = tuple[_State, bool]


def _parent(key: _Key) -> _Key | None:
    """The parent's row; None for the first of a text."""
    state = key[0]
    return (
        (state.above, state.learnt)
        if state.above is not None and state.above.above is not None
        else None
    )


class _Lane:
    """The inner drafter's rows for one run: first the context rows of one path, then tree rows."""

    def __init__(self, run: RunKey) -> None:
        self.run = run
        self._ids: dict[_Key, int] = {}  # in the order they were computed
        self._context: list[_Key] = []
        self._next_id = 0
        self._pruned: Pruned | None = None

    def keep(self, context: Sequence[_Key], live: set[_State]) -> None:
        """Drop rows that are neither ``context`` nor ``live``; the held prefix becomes context."""
        path = set(context)
        ids = {key: node for key, node in self._ids.items() if key in path or key[0] in live}
        before = len(self._context)
        self._context = list(context[: _common(list(ids), context)])
        accepted = self._context[before:]
        rest = list(ids)[len(self._context) :]
        self._pruned = Pruned(tuple(ids[key] for key in accepted), tuple(ids[key] for key in rest))
        self._ids = ids

    def missing(self, wanted: Iterable[_State]) -> list[_Key]:
        """Rows to feed so that all of ``wanted`` are computed, each after its parent."""
        fresh: dict[_Key, None] = {}
        for state in wanted:
            chain: list[_Key] = []
            key: _Key | None = (state, False)
            while key is not None and key not in self._ids and key not in fresh:
                chain.append(key)
                key = _parent(key)
            fresh.update(dict.fromkeys(reversed(chain)))
        return list(fresh)

    def draft(self, fresh: Sequence[_Key], context: Sequence[_Key]) -> Part:
        """The part with rows ``fresh``; those first that continue the context do not answer."""
        held = len(self._ids)
        only_context = held == len(self._context)
        leading = _common(fresh, context[held:]) if only_context else 0
        self._context += fresh[:leading]
        for key in fresh:
            self._ids[key] = self._next_id
            self._next_id += 1
        pruned = self._pruned
        self._pruned = None
        return Part(
            run=self.run,
            segment=-1,
            ids=tuple(self._ids[key] for key in fresh),
            parents=tuple(self._parent_id(key) for key in fresh),
            positions=tuple(state.position for state, _ in fresh),
            tokens=tuple(state.token for state, _ in fresh),
            offsets=(),
            context=leading,
            pruned=pruned,
            answers=tuple(range(leading, len(fresh))),
        )

    def _parent_id(self, key: _Key) -> int:
        parent = _parent(key)
        return -1 if parent is None else self._ids[parent]


def _common(one: Sequence[_Key], other: Sequence[_Key]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


class _MemoRun:
    """A run as its machine sees it: the states of its rows by id, and the true rows it learnt."""

    def __init__(self, root: _State, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self.capacity = capacity
        self.sampling = sampling
        self.returns = returns
        self.context = 0
        self.tree: dict[int, _State] = {}  # live tree rows
        self.true: dict[int, RowArray] = {}
        self.lane: _Lane | None = None
        self._tip = (-1, root)  # the last context row: its id and its state

    def begin_pass(self, part: Part) -> None:
        """Apply the part's prune and add its rows."""
        if part.pruned is not None:
            for node in part.pruned.accepted:
                self._extend(node, self.tree[node])
            self.tree = {node: self.tree[node] for node in part.pruned.live}
        rows = zip(part.ids, part.parents, part.tokens, strict=True)
        for at, (node, parent, token) in enumerate(rows):
            above = self.tree.get(parent, self._tip[1])
            state = above.child(token, self.true.get(parent))
            if at < part.context:
                self._extend(node, state)
            else:
                self.tree[node] = state
        tip = self._tip[0]
        # Ids only grow, so no further row has a parent before the last context row.
        if part.context:
            self.true = {node: row for node, row in self.true.items() if node >= tip}

    def _extend(self, node: int, state: _State) -> None:
        self._tip = (node, state)
        self.context += 1

    def context_keys(self, state: _State) -> list[_Key]:
        """The context as rows of a lane, first to last; ``state`` is a descendant of it."""
        path: list[_Key] = []
        key: _Key | None = (state, False)
        while key is not None:
            path.append(key)
            key = _parent(key)
        return path[::-1][: self.context]


class MemoDrafter(DraftsAlone):
    """A drop-in for ``inner`` that computes the proposals for a path and a sampling only once.

    True rows are assumed to follow from path and sampling, so a memo serves one target. ``passes``:
    number of passes of ``inner`` so far.
    """

    def __init__(self, inner: DraftExecutor) -> None:
        """StateError if ``inner`` is a choice, whose drafters' proposals must not be mixed.

        Or if it is a block drafter, whose proposals depend on which blocks a pass has.
        """
        if isinstance(inner, DraftsBlocks):
            raise StateError("a memo cannot keep a block drafter's proposals")
        if isinstance(inner, ChoiceDrafter):
            raise StateError(
                "one memo wraps several drafters to choose from; wrap each of them in its own"
            )
        self.passes = 0
        self._inner = inner
        self._texts: dict[Sampling, _State] = {}
        self._held = 0
        self._runs: dict[RunKey, _MemoRun] = {}

    @property
    def wants_hidden(self) -> bool:
        return self._inner.wants_hidden

    def forget(self) -> None:
        """Drop all remembered proposals, as before a new text; does not affect current runs."""
        self._texts.clear()
        self._held = 0

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        if self._held > MOST:
            self.forget()
        root = self._texts.setdefault(sampling, _State(None, -1, False))
        self._runs[run] = _MemoRun(root, capacity, sampling, returns)

    def release(self, run: RunKey) -> None:
        known = self._runs.pop(run, None)
        if known is not None and known.lane is not None:
            self._inner.release(run)

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        """As ``DraftExecutor.learn``; StateError if ``inner`` does not draft from hidden rows."""
        if not self.wants_hidden:
            raise StateError("this drafter drafts from tokens alone")
        self._runs[run].true.update(zip(ids, rows.astype(np.float32, copy=True), strict=True))

    def run(self, work: Draft) -> DraftDone:
        """As ``DraftExecutor.run``; StateError for a width above ``WIDTH``."""
        if work.width > WIDTH:
            raise StateError(
                f"a pass asks for {work.width} continuations; {WIDTH} of every node are remembered"
            )
        part = work.part
        known = self._runs[part.run]
        known.begin_pass(part)
        asked = [known.tree[part.ids[row]] for row in part.answers]
        missing = [state for state in asked if state.answers[work.coupled] is None]
        if missing:
            self._compute(part.run, known, missing, work.coupled)
        return _cut([state.answers[work.coupled] for state in asked], work.width)

    def _compute(
        self, run: RunKey, known: _MemoRun, wanted: Sequence[_State], coupled: bool
    ) -> None:
        """Run one pass of ``inner`` that answers all of ``wanted``."""
        if known.lane is None:
            known.lane = _Lane(run)
            capacity = known.capacity * (1 + self.wants_hidden)
            self._inner.allocate(run, capacity, known.sampling, known.returns)
        lane = known.lane
        context = known.context_keys(wanted[0])
        lane.keep(context, set(known.tree.values()))
        fresh = lane.missing(wanted)
        part = lane.draft(fresh, context)
        told = [
            (node, state.row)
            for node, (state, learnt) in zip(part.ids, fresh, strict=True)
            if learnt
        ]
        if told:
            rows = np.stack([row for _, row in told if row is not None])
            self._inner.learn(run, [node for node, _ in told], rows)
        done = self._inner.run(Draft(part, WIDTH, coupled=coupled))
        self.passes += 1
        for at, row in enumerate(part.answers):
            state = fresh[row][0]
            if state.answers[coupled] is None:
                sources = done.sources[at] if done.sources else ()
                state.answers[coupled] = _Answer(
                    np.array(done.tokens[at], np.int32),
                    np.array(done.values[at]),
                    np.array(sources, np.int8),
                )
                self._held += 1


def _cut(answers: Sequence[_Answer | None], width: int) -> DraftDone:
    known = [answer for answer in answers if answer is not None]
    sources = [tuple(answer.sources[:width].tolist()) for answer in known if answer.sources.size]
    return DraftDone(
        tuple(tuple(answer.tokens[:width].tolist()) for answer in known),
        tuple(tuple(answer.values[:width].tolist()) for answer in known),
        tuple(sources),
    )
