"""A drafter that remembers: strategies that are compared on one text draft every node of it once.

What a drafter proposes at a node follows from the tokens on the node's path, for one that drafts
from hidden rows also from which nodes' true rows it knew when it computed the path. So proposals
are kept in a trie whose edges are a token and whether its parent's true row was known. Nothing
else enters: the run, its strategy and what else was in a pass do not. (Their rounding does, in
the last bits of a value: two candidates closer than that may change places between a remembered
and a fresh proposal.)

A miss is computed by the drafter itself, over its own protocol, in a *lane*: a job of the
drafter's that holds only rows that misses needed. A row that was remembered and turns out to be
the ancestor of one that was not is fed then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.machine import Draft, DraftDone, Part
from flowspec.core.protocol.messages import Returns
from flowspec.core.run.sampling import Sampling
from flowspec.core.tree.slots import Moves
from flowspec.errors import StateError
from flowspec.model.base import DraftExecutor, RowArray
from flowspec.model.choice import ChoiceDrafter

#: Continuations computed and kept of every node: the most any strategy may ask for. The best ``w``
#: of them are what a pass of width ``w`` gives: every drafter ranks first and cuts then.
WIDTH = 64
#: Proposals held, about 1.2 kB each, beyond which a run begins from nothing.
MOST = 150_000


@dataclass(frozen=True, slots=True)
class _Answer:
    """A node's proposals, best first, ``[WIDTH]`` or as many as there are; ``sources`` may be
    empty.
    """

    tokens: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]
    sources: npt.NDArray[np.int8]


class _State:
    """A row the drafter may compute: its path, and at which of its steps the true row above was
    ``learnt``.

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
        """The state below by ``token``; ``row``: this node's true row, if it is known."""
        edge = (token, row is not None)
        found = self.below.get(edge)
        if found is None:
            found = self.below[edge] = _State(self, *edge)
            if self.row is None:
                self.row = row
        return found


#: A row of a lane: its state, and whether the drafter was told its true row before its children
#: came. A node with children of both kinds has two rows, since a drafter cannot be told to forget.
_Key = tuple[_State, bool]


def _parent(key: _Key) -> _Key | None:
    """The row above; None for the first of a text."""
    state = key[0]
    return (
        (state.above, state.learnt)
        if state.above is not None and state.above.above is not None
        else None
    )


@dataclass(slots=True)
class _Lane:
    """What the drafter holds for one run, by slot: ``context`` rows of one path first."""

    rows: list[_Key] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    places: dict[_Key, int] = field(default_factory=dict)
    context: int = 0
    next_id: int = 0

    def keep(self, context: Sequence[_Key], live: set[_State]) -> Moves | None:
        """Drop rows that are neither ``context`` nor ``live``, and find what has become context."""
        path = set(context)
        kept = [at for at, key in enumerate(self.rows) if key in path or key[0] in live]
        self.rows = [self.rows[at] for at in kept]
        self.ids = [self.ids[at] for at in kept]
        self.places = {key: at for at, key in enumerate(self.rows)}
        self.context = _common(self.rows, context)
        same = next((at for at, slot in enumerate(kept) if at != slot), len(kept))
        return Moves(same, tuple(kept[same:])) if same < len(kept) else None

    def missing(self, wanted: Iterable[_State]) -> list[_Key]:
        """Rows to feed so that all of ``wanted`` are computed, each after its parent."""
        fresh: dict[_Key, None] = {}
        for state in wanted:
            chain: list[_Key] = []
            key: _Key | None = (state, False)
            while key is not None and key not in self.places and key not in fresh:
                chain.append(key)
                key = _parent(key)
            fresh.update(dict.fromkeys(reversed(chain)))
        return list(fresh)

    def draft(
        self, job: str, fresh: Sequence[_Key], context: Sequence[_Key], moves: Moves | None
    ) -> Part:
        """The part that feeds ``fresh``; the first of them may go on with the context, all others
        answer.
        """
        held = len(self.rows)
        before = self.context
        leading = _common(fresh, context[held:]) if before == held else 0
        for key in fresh:
            self.places[key] = len(self.rows)
            self.rows.append(key)
            self.ids.append(self.next_id)
            self.next_id += 1
        parents = [_parent(key) for key in self.rows[before:]]
        offsets = (self.places[parent] - before if parent is not None else -1 for parent in parents)
        return Part(
            job=job,
            epoch=0,
            segment=-1,
            ids=tuple(self.ids[held:]),
            positions=tuple(state.position for state, _ in fresh),
            tokens=tuple(state.token for state, _ in fresh),
            offsets=(),
            context=before,
            held=held,
            moves=moves,
            parents=tuple(max(offset, -1) for offset in offsets),
            answers=tuple(range(leading, len(fresh))),
        )

    def parent_ids(self, fresh: Sequence[_Key]) -> tuple[int, ...]:
        """Ids of the rows above ``fresh``, which are held; -1: none."""
        parents = map(_parent, fresh)
        return tuple(-1 if parent is None else self.ids[self.places[parent]] for parent in parents)


def _common(one: Sequence[_Key], other: Sequence[_Key]) -> int:
    """How many keys both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


class _Run:
    """A job as its machine sees it: the states of its rows by slot, and the true rows
    it was told.
    """

    def __init__(self, root: _State, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self.capacity = capacity
        self.sampling = sampling
        self.returns = returns
        self.context = 0
        self.slots: list[_State] = []
        self.true: dict[int, RowArray] = {}
        self.lane: _Lane | None = None
        self._root = root
        self._ids: list[int] = []

    def carry_out(self, part: Part) -> None:
        """Move and add rows as the part's plan says."""
        slots = self.slots
        ids = self._ids
        if part.moves is not None:
            start = part.moves.start
            sources = part.moves.sources
            slots[start : start + len(sources)] = [slots[source] for source in sources]
            ids[start : start + len(sources)] = [ids[source] for source in sources]
        del slots[part.held :], ids[part.held :]
        above = part.parents[part.held - part.context :]
        for node, token, parent in zip(part.ids, part.tokens, above, strict=True):
            at = part.context + parent if parent >= 0 else part.context - 1
            slots.append(
                slots[at].child(token, self.true.get(ids[at]))
                if at >= 0
                else self._root.child(token, None)
            )
            ids.append(node)
        fresh = part.answers[0] if part.answers else len(part.ids)
        self.context = part.context + fresh
        if fresh:  # ids only grow: below the last context row there is no parent any more
            tip = ids[self.context - 1]
            self.true = {node: row for node, row in self.true.items() if node >= tip}

    def context_keys(self, state: _State) -> list[_Key]:
        """The context as rows of a lane, first to last; ``state`` lies below it."""
        path: list[_Key] = []
        key: _Key | None = (state, False)
        while key is not None:
            path.append(key)
            key = _parent(key)
        return path[::-1][: self.context]


class MemoDrafter:
    """``inner``, whose proposals for a path and a sampling are computed once; a drop-in for it.

    A target's true rows are taken to follow from path and sampling, so one memo serves one target.
    ``passes``: how many passes of ``inner`` there were.
    """

    def __init__(self, inner: DraftExecutor) -> None:
        """StateError if ``inner`` is a choice: what one of its drafters proposes is not another's
        answer.
        """
        if isinstance(inner, ChoiceDrafter):
            raise StateError(
                "one memo is around several drafters to choose from; put one around each of them"
            )
        self.passes = 0
        self._inner = inner
        self._texts: dict[Sampling, _State] = {}
        self._held = 0
        self._runs: dict[str, _Run] = {}

    @property
    def wants_hidden(self) -> bool:
        return self._inner.wants_hidden

    def forget(self) -> None:
        """Drop everything remembered; worth it when the next text begins. Runs under way go on."""
        self._texts.clear()
        self._held = 0

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        if self._held > MOST:
            self.forget()
        root = self._texts.setdefault(sampling, _State(None, -1, False))
        self._runs[job] = _Run(root, capacity, sampling, returns)

    def release(self, job: str) -> None:
        run = self._runs.pop(job, None)
        if run is not None and run.lane is not None:
            self._inner.release(job)

    def learn(self, job: str, ids: Sequence[int], rows: RowArray) -> None:
        """As ``DraftExecutor.learn``; StateError if ``inner`` does not draft from hidden rows."""
        if not self.wants_hidden:
            raise StateError("this drafter drafts from tokens alone")
        self._runs[job].true.update(zip(ids, rows.astype(np.float32, copy=True), strict=True))

    def run(self, work: Draft) -> DraftDone:
        """As ``DraftExecutor.run``; StateError if more than ``WIDTH`` continuations
        are asked for.
        """
        if work.width > WIDTH:
            raise StateError(
                f"a pass asks for {work.width} continuations; {WIDTH} of every node are remembered"
            )
        part = work.part
        run = self._runs[work.part.job]
        run.carry_out(part)
        asked = [run.slots[part.held + row] for row in part.answers]
        missing = [state for state in asked if state.answers[work.coupled] is None]
        if missing:
            self._compute(part.job, run, missing, work.coupled)
        return _cut([state.answers[work.coupled] for state in asked], work.width)

    def _compute(self, job: str, run: _Run, wanted: Sequence[_State], coupled: bool) -> None:
        """One pass of ``inner``, after which all of ``wanted`` have an answer."""
        if run.lane is None:
            run.lane = _Lane()
            self._inner.allocate(
                job, run.capacity * (1 + self.wants_hidden), run.sampling, run.returns
            )
        lane = run.lane
        context = run.context_keys(wanted[0])
        moves = lane.keep(context, set(run.slots[run.context :]))
        fresh = lane.missing(wanted)
        part = lane.draft(job, fresh, context, moves)
        told = [
            (node, state.row)
            for node, (state, learnt) in zip(part.ids, fresh, strict=True)
            if learnt
        ]
        if told:
            self._inner.learn(
                job,
                [node for node, _ in told],
                np.stack([row for _, row in told if row is not None]),
            )
        done = self._inner.run(Draft(part, WIDTH, parents=lane.parent_ids(fresh), coupled=coupled))
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
