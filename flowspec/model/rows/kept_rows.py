"""KV rows of runs, which outlast them for runs that begin as those did."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch

from flowspec.core.protocol.work import Kept, Part
from flowspec.core.run.key import RunKey
from flowspec.errors import StateError
from flowspec.model.rows.placement import Placement, settling


class FirstRows(Protocol):
    """The first rows of a job's cache, which outlast it: copies of them, or their blocks."""

    @property
    def count(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def free(self) -> None: ...


S = TypeVar("S", bound=FirstRows)


class KeepableCache(Protocol[S]):
    """A job's KV rows, of one of the kinds of ``paged.RowCache``."""

    def begin_pass(self, part: Part) -> Placement: ...

    def kept(self, rows: int) -> S: ...

    def resume(self, rows: S, held: int) -> None: ...


class KeptRows(Generic[S]):
    """The first rows of caches, by run; all caches are of one kind."""

    def __init__(self) -> None:
        self._rows: dict[RunKey, S] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all kept rows."""
        return sum(rows.nbytes for rows in self._rows.values())

    @torch.inference_mode()
    def keep(self, run: RunKey, cache: KeepableCache[S], wanted: Kept) -> None:
        """Keep ``wanted``; StateError if ``cache`` has fewer context rows."""
        if not wanted.rows:
            return
        context = cache.begin_pass(settling(run, wanted.pruned)).context
        if context < wanted.rows:
            raise StateError(f"{wanted.rows} rows are to be kept of {context}")
        self.put(run, cache.kept(wanted.rows))

    def put(self, run: RunKey, rows: S) -> None:
        """Keep ``rows``, which are the cache's first ones, and none that were kept of ``run``."""
        self.evict(run)
        self._rows[run] = rows

    @torch.inference_mode()
    def resume(self, cache: KeepableCache[S], source: RunKey, held: int) -> None:
        """Give ``cache``, a new one, the first ``held`` kept rows of ``source``.

        StateError if they are not kept.
        """
        if not held:
            return
        rows = self._rows.get(source)
        if rows is None or rows.count < held:
            raise StateError(f"{held} rows of {source} are not kept here")
        cache.resume(rows, held)

    def evict(self, run: RunKey) -> None:
        """Free the rows of ``run``, if there are any."""
        rows = self._rows.pop(run, None)
        if rows is not None:
            rows.free()
