"""What ``auto`` chose while a job ran, as the job's ``stats`` hold it under ``decisions``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from flowspec.strategies.auto.segment_sizing import MOST_DECISIONS


def with_drafter_names(stats: Mapping[str, Any], drafters: Sequence[str]) -> dict[str, Any]:
    """A job's ``stats`` with names from ``drafters`` where its decisions have drafter numbers.

    Numbers beyond ``drafters`` stay as they are.
    """
    if "decisions" not in stats:
        return dict(stats)
    names = dict[Any, str](enumerate(drafters))
    decisions = [
        {**entry, "drafter": names.get(entry["drafter"], entry["drafter"])}
        if "drafter" in entry
        else entry
        for entry in stats["decisions"]
    ]
    return {**stats, "decisions": decisions}


def tokens_by_drafter(stats: Mapping[str, Any]) -> dict[Any, int]:
    """How many of a job's tokens after the first were made with each drafter.

    Drafters are named as in the job's ``decisions``; empty where there was nothing to choose.
    Tokens after the last change there was room to write down are counted for none.
    """
    decisions = stats.get("decisions") or ()
    changes = [(entry["tokens"], entry["drafter"]) for entry in decisions if "drafter" in entry]
    if changes and len(changes) < MOST_DECISIONS:
        changes.append((stats["tokens"] - 1, None))
    made: Counter[Any] = Counter()
    for (begin, drafter), (end, _) in pairwise(changes):
        made[drafter] += max(0, end - begin)
    return dict(made)
