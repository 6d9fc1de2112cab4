"""Which runs' rows the pipeline keeps, so that other prompts need not be computed in full.

The draft worker alone knows all tokens, so it alone decides. A run's ``Retain``, at its first
token, has the stages keep its prompt's rows, and its ``Close`` those of the whole text; both name
all runs that are kept from then on, so that what stages drop follows from the log. Another run's
``Open`` names the run whose first rows it begins with. A stage that lacks them says so
(``PrefixLost``), and the prompt is sent in full. These messages reach a stage in the order in which
they were sent, so rows are dropped only behind the last Open that names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.prefixes.prefix_tree import PrefixTree
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
    """A run whose rows are kept, or will be once all stages have closed it.

    ``drafted``: those of each drafter. ``usable``, ``usable_drafted``: what is kept by now.
    """

    salt: str
    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    usable: int = 0
    usable_drafted: tuple[int, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether all that will be kept is kept by now."""
        return self.usable == len(self.tokens)

    def covers(self, other: _Kept) -> bool:
        """Whether each drafter has as many rows here as in ``other``."""
        own = (*self.drafted, *(0,) * len(other.drafted))
        return all(mine >= theirs for mine, theirs in zip(own, other.drafted, strict=False))


class KeptPrefixes:
    """Kept runs, some of which go on, by their last use; at most ``most_rows`` rows of all.

    Jobs share rows only if they have the same *salt*, a text that the submitter chooses.
    """

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
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
            most = min(shared, len(text) - 1, kept.usable)
            found = _reuse(run, kept.usable_drafted, most, drafters)
            if found.rows >= LEAST_ROWS and (best is None or found.rows > best.rows):
                best = found
        if best is not None:
            self._touch(best.source)
        return best

    # ---- a run that goes on ----------------------------------------------------------------------

    def share(
        self, run: RunKey, salt: str, prompt: Sequence[int], drafters: int = 0
    ) -> tuple[int, tuple[RunKey, ...]]:
        """Keep the rows of ``prompt``, which all stages have computed for ``run``.

        ``drafters``: that will have computed them, too, and whose rows others want. Returns what
        ``close`` does. The rows are usable at once: who begins with them is opened after that at
        every stage.
        """
        found = self._keep(run, _Kept(salt, tuple(prompt), ()), drafters)
        self.confirm(run)
        return found

    def share_drafted(self, run: RunKey, drafted: Sequence[int]) -> None:
        """By now the drafters keep ``drafted`` rows of ``run``, which is kept."""
        kept = self._kept[run]
        kept.drafted = kept.usable_drafted = tuple(drafted)

    def revert(self, run: RunKey) -> None:
        """``run`` has ended without ``confirm``: keep what was kept of it before, if anything."""
        kept = self._kept.get(run)
        if kept is None or kept.ready:
            return
        if not kept.usable:
            self.drop(run)
            return
        kept.tokens = kept.tokens[: kept.usable]
        kept.drafted = kept.usable_drafted
        self._trees[kept.salt].insert(run, kept.tokens)

    # ---- a run's end -----------------------------------------------------------------------------

    def close(
        self, run: RunKey, salt: str, text: Sequence[int], drafted: Sequence[int]
    ) -> tuple[int, tuple[RunKey, ...]]:
        """Keep the rows of ``run``, which ends with all of ``text`` computed.

        ``drafted``: rows of the text that each drafter has computed. Returns how many rows to keep,
        0: none, and all runs that are kept from then on. Rows become usable with ``confirm``; what
        was shared of the run stays so until then.
        """
        return self._keep(run, _Kept(salt, tuple(text), tuple(drafted)))

    def _keep(self, run: RunKey, kept: _Kept, drafters: int = 0) -> tuple[int, tuple[RunKey, ...]]:
        """Keep ``kept`` of ``run``, unless another one's text begins with it.

        Unless that one lacks rows of one of the first ``drafters`` drafters.
        """
        rows = min(len(kept.tokens), self.most_rows)
        if rows < LEAST_ROWS:
            return 0, ()
        salt = kept.salt
        tokens = kept.tokens = kept.tokens[:rows]
        kept.drafted = tuple(min(count, rows) for count in kept.drafted)
        wanted = _Kept(salt, tokens, (rows,) * drafters or kept.drafted)
        before = self._kept.pop(run, None)
        if before is not None:
            kept.usable = before.usable
            kept.usable_drafted = before.usable_drafted
            self._leave_tree(run, salt)
        for other, shared in self._shared(salt, tokens).items():
            known = self._kept[other]
            if known.ready and shared == rows and known.covers(wanted):
                self._touch(other)
                if before is not None:
                    self._dropped.append(run)
                return 0, ()
            if shared == len(known.tokens) and kept.covers(known):
                self.drop(other)
        while self._kept and (self.rows + rows > self.most_rows or len(self._kept) >= MOST_RUNS):
            self.drop(next(iter(self._kept)))
        self._kept[run] = kept
        self._trees.setdefault(salt, PrefixTree()).insert(run, tokens)
        return rows, self.runs

    def __contains__(self, run: RunKey) -> bool:
        return run in self._kept

    def confirm(self, run: RunKey) -> int:
        """All stages have closed ``run``: its rows may be used. Returns how many are kept."""
        kept = self._kept.get(run)
        if kept is None:
            return 0
        kept.usable = len(kept.tokens)
        kept.usable_drafted = kept.drafted
        return kept.usable

    def drop(self, run: RunKey) -> None:
        """Keep ``run`` no longer, if it is kept."""
        kept = self._kept.pop(run, None)
        if kept is None:
            return
        self._dropped.append(run)
        self._leave_tree(run, kept.salt)

    def _leave_tree(self, run: RunKey, salt: str) -> None:
        tree = self._trees[salt]
        tree.remove(run)
        if not len(tree):
            del self._trees[salt]

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


def _reuse(
    run: RunKey, drafted: Sequence[int], most: int, drafters: Sequence[DrafterKind]
) -> Reuse:
    """How much of ``run``, whose first ``most`` rows fit, another with ``drafters`` begins with.

    ``drafted``: rows of it that each drafter keeps.

    A drafter that drafts from hidden rows needs the target's row at the end of its own, which is
    not kept: the stages leave that row out and compute it again, and so it is returned. A head has
    computed the row itself, from the row before it; a block drafter computes it from its own.
    """
    held = (*drafted, *(0,) * len(drafters))
    refreshed = [own for own, kind in zip(held, drafters, strict=False) if kind.refreshed]
    rows = max(0, min(most, *refreshed) - 1) if refreshed else most
    begins = [
        (rows if kind.block else rows + 1) if kind.refreshed else min(own, most)
        for own, kind in zip(held, drafters, strict=False)
    ]
    return Reuse(run, rows, tuple(begins))
