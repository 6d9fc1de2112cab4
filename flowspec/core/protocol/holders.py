"""Who holds a role: every claim of it by another process raises the role's generation.

A run is assigned to the workers that hold the pipeline's roles at that moment. A worker that was
paused, and whose role another one has taken meanwhile, has an older generation: what it writes is
refused, and runs that are not its own it ignores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: The generation of a worker without a lease, as in a simulation: it serves every run.
NO_LEASE = 0


class Holder(NamedTuple):
    """A holder of the lease on ``role`` (``draft``, ``verify-2``, ``scheduler`` ...)."""

    role: str
    generation: int

    def __str__(self) -> str:
        return f"{self.role}:{self.generation}"


def holders_text(generations: Mapping[str, int]) -> str:
    """Holders by role as the broker keeps them: ``' draft:2 verify-1:1 '``."""
    return f" {' '.join(str(Holder(*known)) for known in generations.items())} "


def read_holders(text: str) -> dict[str, int]:
    """The inverse of ``holders_text``; what is no holder is left out."""
    found = (part.rpartition(":") for part in text.split())
    return {role: int(number) for role, _, number in found if role and number.isdecimal()}


def names(generations: Sequence[int], worker: int, generation: int) -> bool:
    """Whether a run was assigned to this holder.

    ``generations``: the run's, in the order of ``worker_addresses``, in which ``worker`` is the
    position of the one that asks, under ``generation``.
    """
    if generation == NO_LEASE:
        return True
    return worker < len(generations) and generations[worker] == generation
