"""FlowSpec's positional index sets, derived from node ids.

The wire carries ids; the papers prune by positions in the sequence S. This view exists so that
tests can hold the id-based rules against the papers' figures. Source:
docs/algorithms.md#index-sets.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexSets:
    """Positions in S before pruning: accepted nodes, and survivors (new root, descendants)."""

    accepted: tuple[int, ...]
    drafted: tuple[int, ...]

    @property
    def retained(self) -> tuple[int, ...]:
        """I_retain: rows whose keys and values survive, as context or as tree."""
        return tuple(sorted({*self.accepted, *self.drafted}))

    def in_cache(self, cached: int) -> tuple[int, ...]:
        """I_incache: retained positions among the first ``cached`` rows of S at a stage."""
        return tuple(at for at in self.retained if at < cached)

    def local(self, cached: int, pending: int) -> tuple[int, ...]:
        """I_local: retained ones of the stage's ``pending`` rows, relative to the first."""
        return tuple(at - cached for at in self.retained if cached <= at < cached + pending)


def index_sets(sequence: Sequence[int], accepted: Sequence[int], survivors: Set[int]) -> IndexSets:
    """The positional view of a prune.

    ``sequence``: ids of S in order, root first. ``survivors``: ids of the new root and its
    descendants.
    """
    place = {node: at for at, node in enumerate(sequence)}
    drafted = tuple(at for at, node in enumerate(sequence) if node in survivors)
    return IndexSets(tuple(place[node] for node in accepted), drafted)
