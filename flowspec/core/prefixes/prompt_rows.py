"""The rows that one run begins with, of runs before it, and those that it leaves for others."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.prefixes.kept_prefixes import DrafterKind, KeptPrefixes, Reuse
from flowspec.core.protocol.messages import Close, Prefix, Retain
from flowspec.core.run.key import RunKey


class PromptRows:
    """The shared rows of ``run``, whose text begins with ``prefix``; of jobs with its ``salt``.

    ``prefixes``: what the pipeline keeps of runs; None: the run takes no kept rows, and leaves
    none. ``drafters``: those that the run may use; None: it computes the whole text, and leaves its
    rows. ``rows``: of the prefix without its last token.
    """

    def __init__(
        self,
        run: RunKey,
        salt: str,
        prefix: Sequence[int],
        prefixes: KeptPrefixes | None,
        drafters: Sequence[DrafterKind] | None,
    ) -> None:
        self.rows = len(prefix) - 1
        self._run = run
        self._salt = salt
        self._prompt = tuple(prefix[:-1])
        self._prefixes = prefixes
        self._reuse: Reuse | None = None
        self._shared_drafts = 0  # drafters whose rows of all of these are shared
        if prefixes is not None and drafters is not None:
            self._reuse = prefixes.find(salt, prefix, drafters)

    # ---- what the run begins with ----------------------------------------------------------------

    @property
    def reused(self) -> int:
        """Rows that the stages have from the start."""
        return self._reuse.rows if self._reuse is not None else 0

    @property
    def drafted(self) -> tuple[int, ...]:
        """Rows that each drafter has from the start; empty: none."""
        return self._reuse.drafted if self._reuse is not None else ()

    @property
    def source(self) -> Prefix | None:
        """Whose rows the stages begin with, and how many."""
        return Prefix(self._reuse.source, self._reuse.rows) if self._reuse is not None else None

    @property
    def computes(self) -> int:
        """Rows of the prompt that are not kept of another run."""
        return self.rows - self.reused

    def lose(self) -> bool:
        """A stage lacks the rows to begin with; whether there were any."""
        if self._reuse is None:
            return False
        assert self._prefixes is not None
        self._prefixes.drop(self._reuse.source)
        self._reuse = None
        return True

    # ---- what it leaves --------------------------------------------------------------------------

    @property
    def are_shared(self) -> bool:
        """Whether other runs may begin with them."""
        return self._prefixes is not None

    def common(self, text: Sequence[int]) -> int:
        """How many tokens ``text`` and the prompt begin with alike."""
        pairs = zip(self._prompt, text, strict=False)
        differs = (at for at, (one, other) in enumerate(pairs) if one != other)
        return next(differs, min(len(self._prompt), len(text)))

    def retain(self, drafters: int) -> Retain | None:
        """What has the stages, which have computed the prompt, keep its rows from now on.

        ``drafters``: that the run has.
        """
        if self._prefixes is None:
            return None
        # A run that computed all of it found no drafter's rows, where it has any.
        wanted = 0 if self.reused else drafters
        rows, kept = self._prefixes.share(self._run, self._salt, self._prompt, wanted)
        return Retain(self._run, rows, kept) if rows else None

    def drafts_are_new(self, computed: Sequence[int]) -> bool:
        """Whether another drafter has the whole prompt now, of rows ``computed`` by each."""
        if self._prefixes is None or self._run not in self._prefixes:
            return False
        whole = sum(rows >= self.rows for rows in computed)
        if whole <= self._shared_drafts:
            return False
        self._shared_drafts = whole
        return True

    def share_drafted(self, rows: Sequence[int]) -> None:
        """By now each drafter keeps ``rows`` of the run."""
        assert self._prefixes is not None
        self._prefixes.share_drafted(self._run, rows)

    def close(self, text: Sequence[int], drafted: Sequence[int]) -> Close:
        """The end of the run, whose ``text`` is kept; ``drafted``: rows of it at each drafter."""
        if self._prefixes is None:
            return Close(self._run)
        return Close(self._run, *self._prefixes.close(self._run, self._salt, text, drafted))
