"""Which ended runs' rows the pipeline keeps, so that later prompts need not be computed in full.

The draft worker alone knows all tokens, so it alone decides: a run's ``Close`` says how many of its
rows stages keep, and names all runs that are kept from then on, so that what they drop follows from
the log. A later run's ``Open`` names the run whose first rows it begins with, and a stage copies
them. A stage that lacks them says so (``PrefixLost``), and the prompt is sent in full. Opens and
closes reach a stage in the order in which they were sent, so rows are dropped only behind the last
Open that names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.job.prefix_tree import PrefixTree
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import BLOCK_ROWS

#: Fewest rows worth copying: below it a prompt's pass costs as much.
LEAST_ROWS = 16
#: Most runs kept, which bounds the list in a Close.
MOST_RUNS = 64


def most_blocks(rows: int) -> int:
    """Blocks that ``rows`` kept rows take at most: each run may have one that is not full."""
    return rows // BLOCK_ROWS + min(rows // LEAST_ROWS, MOST_RUNS)


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """What decides on how many kept rows a drafter can begin with.

    ``refreshed``: it drafts from the target's hidden rows. ``block``: it is a block drafter.
    """

    refreshed: bool = False
    block: bool = False


@dataclass(frozen=True, slots=True)
class Reuse:
    """The kept rows that a run begins with.

    ``rows`` of ``source`` at every stage, and ``drafted`` ones at each drafter.
    """

    source: RunKey
    rows: int
    drafted: tuple[int, ...] = ()


@dataclass(slots=True)
class _Kept:
    """A run whose rows are kept. ``drafted``: those of each drafter. ``ready``: by all stages."""

    salt: str
    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    ready: bool = False

    def covers(self, other: _Kept) -> bool:
        """Whether each drafter has as many rows here as in ``other``."""
        own = (*self.drafted, *(0,) * len(other.drafted))
        return all(mine >= theirs for mine, theirs in zip(own, other.drafted, strict=False))


class KeptPrefixes:
    """Kept runs, in the order of their last use; at most ``most_rows`` rows of all of them.

    Jobs share rows only if they have the same *salt*, a text that the submitter chooses.
    """

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._kept: dict[RunKey, _Kept] = {}
        self._trees: dict[str, PrefixTree[RunKey]] = {}
        self._dropped: list[RunKey] = []

    @property
    def runs(self) -> tuple[RunKey, ...]:
        """The kept runs, those used last at the end."""
        return tuple(self._kept)

    @property
    def rows(self) -> int:
        """Rows of all kept runs."""
        return sum(len(kept.tokens) for kept in self._kept.values())

    # ---- a run's beginning -----------------------------------------------------------------------

    def find(self, salt: str, text: Sequence[int], drafters: Sequence[DrafterKind]) -> Reuse | None:
        """The most rows that a run over ``text`` can begin with; None: too few are worth it.

        ``drafters``: those that the run may use.
        """
        best: Reuse | None = None
        for run, shared in self._shared(salt, text).items():
            kept = self._kept[run]
            if not kept.ready:
                continue
            found = _reuse(run, kept, min(shared, len(text) - 1), drafters)
            if found.rows >= LEAST_ROWS and (best is None or found.rows > best.rows):
                best = found
        if best is not None:
            self._touch(best.source)
        return best

    # ---- a run's end -----------------------------------------------------------------------------

    def close(
        self, run: RunKey, salt: str, text: Sequence[int], drafted: Sequence[int]
    ) -> tuple[int, tuple[RunKey, ...]]:
        """Keep the rows of ``run``, which ends with all of ``text`` computed.

        ``drafted``: rows of the text that each drafter has computed. Returns how many rows to keep,
        0: none, and all runs that are kept from then on. Rows become usable with ``confirm``.
        """
        rows = min(len(text), self._most_rows)
        if rows < LEAST_ROWS:
            return 0, ()
        tokens = tuple(text[:rows])
        kept = _Kept(salt, tokens, tuple(min(count, rows) for count in drafted))
        for other, shared in self._shared(salt, tokens).items():
            known = self._kept[other]
            if known.ready and shared == rows and known.covers(kept):
                self._touch(other)
                return 0, ()
            if shared == len(known.tokens) and kept.covers(known):
                self.drop(other)
        while self._kept and (self.rows + rows > self._most_rows or len(self._kept) >= MOST_RUNS):
            self.drop(next(iter(self._kept)))
        self._kept[run] = kept
        self._trees.setdefault(salt, PrefixTree()).insert(run, tokens)
        return rows, self.runs

    def confirm(self, run: RunKey) -> int:
        """All stages have closed ``run``: its rows may be used. Returns how many are kept."""
        kept = self._kept.get(run)
        if kept is None:
            return 0
        kept.ready = True
        return len(kept.tokens)

    def drop(self, run: RunKey) -> None:
        """Keep ``run`` no longer, if it is kept."""
        kept = self._kept.pop(run, None)
        if kept is None:
            return
        self._dropped.append(run)
        tree = self._trees[kept.salt]
        tree.remove(run)
        if not len(tree):
            del self._trees[kept.salt]

    def take_dropped(self) -> tuple[RunKey, ...]:
        """The runs dropped since the last call."""
        taken = tuple(self._dropped)
        self._dropped = []
        return taken

    def _shared(self, salt: str, tokens: Sequence[int]) -> dict[RunKey, int]:
        tree = self._trees.get(salt)
        return tree.shared(tokens) if tree is not None else {}

    def _touch(self, run: RunKey) -> None:
        self._kept[run] = self._kept.pop(run)


def _reuse(run: RunKey, kept: _Kept, most: int, drafters: Sequence[DrafterKind]) -> Reuse:
    """How much of ``kept``, whose first ``most`` rows fit, a run with ``drafters`` begins with.

    A drafter that drafts from hidden rows needs the target's row at the end of its own, which is
    not kept: the stages leave that row out and compute it again, and so it is returned. A head has
    computed the row itself, from the row before it; a block drafter computes it from its own.
    """
    held = (*kept.drafted, *(0,) * len(drafters))
    refreshed = [own for own, kind in zip(held, drafters, strict=False) if kind.refreshed]
    rows = max(0, min(most, *refreshed) - 1) if refreshed else most
    drafted = [
        (rows if kind.block else rows + 1) if kind.refreshed else min(own, most)
        for own, kind in zip(held, drafters, strict=False)
    ]
    return Reuse(run, rows, tuple(drafted))
