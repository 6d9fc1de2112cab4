"""KV rows of ended runs, kept for runs that begin as those did."""

from __future__ import annotations

from typing import Protocol

import torch

from flowspec.core.protocol.work import Kept, Part
from flowspec.core.run.key import RunKey
from flowspec.errors import StateError
from flowspec.model.rows import Placement, settling


class KeepableCache(Protocol):
    """A job's KV rows, of one of the kinds of ``two_level.RowCache``."""

    def begin_pass(self, part: Part) -> Placement: ...

    def kept(self, rows: int) -> torch.Tensor: ...

    def resume(self, rows: torch.Tensor) -> None: ...


class KeptRows:
    """The first rows of ended runs' caches, by run, copied out of them."""

    def __init__(self) -> None:
        self._rows: dict[RunKey, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all kept rows."""
        return sum(rows.nbytes for rows in self._rows.values())

    @torch.inference_mode()
    def keep(self, run: RunKey, cache: KeepableCache, wanted: Kept) -> None:
        """Keep a copy of ``wanted``; StateError if ``cache`` has fewer context rows."""
        if not wanted.rows:
            return
        context = cache.begin_pass(settling(run, wanted.pruned)).context
        if context < wanted.rows:
            raise StateError(f"{wanted.rows} rows are to be kept of {context}")
        self.put(run, cache.kept(wanted.rows))

    def put(self, run: RunKey, rows: torch.Tensor) -> None:
        """Keep ``rows``, which are a copy of the cache's first ones."""
        self._rows[run] = rows

    @torch.inference_mode()
    def resume(self, cache: KeepableCache, source: RunKey, held: int) -> None:
        """Give ``cache``, a new one, the first ``held`` kept rows of ``source``.

        StateError if they are not kept.
        """
        if not held:
            return
        rows = self._rows.get(source)
        if rows is None or rows.shape[-2] < held:
            raise StateError(f"{held} rows of {source} are not kept here")
        cache.resume(rows[..., :held, :])

    def evict(self, run: RunKey) -> None:
        """Free the rows of ``run``, if there are any."""
        self._rows.pop(run, None)
