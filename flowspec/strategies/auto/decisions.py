"""Reading the ``decisions`` that ``auto`` leaves in a job's ``stats``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from flowspec.strategies.auto.drafter_bandit import PLAIN
from flowspec.strategies.auto.segment_sizing import MOST_DECISIONS


def with_drafter_names(stats: Mapping[str, Any], drafters: Sequence[str]) -> dict[str, Any]:
    """A job's ``stats`` with the drafter numbers of its decisions replaced by names.

    A number beyond ``drafters`` is kept.
    """
    if "decisions" not in stats:
        return dict(stats)
    names = {PLAIN: "none", **dict[Any, str](enumerate(drafters))}
    decisions = [
        {**entry, "drafter": names.get(entry["drafter"], entry["drafter"])}
        if "drafter" in entry
        else entry
        for entry in stats["decisions"]
    ]
    return {**stats, "decisions": decisions}


def tokens_by_drafter(stats: Mapping[str, Any]) -> dict[Any, int]:
    """How many of a job's tokens after the first were decoded with each drafter.

    Keyed as in the job's ``decisions``; empty if the job had one drafter. If the list of decisions
    is full, the tokens after its last change are not counted.
    """
    decisions = stats.get("decisions") or ()
    changes = [(entry["tokens"], entry["drafter"]) for entry in decisions if "drafter" in entry]
    if changes and len(changes) < MOST_DECISIONS:
        changes.append((stats["tokens"] - 1, None))
    made: Counter[Any] = Counter()
    for (begin, drafter), (end, _) in pairwise(changes):
        made[drafter] += max(0, end - begin)
    return dict(made)
