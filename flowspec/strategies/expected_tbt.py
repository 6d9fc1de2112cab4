"""SpecPipe's expected time between tokens, and the level width that minimises it.

Times are seconds, shares plain numbers between 0 and 1. Every function raises ConfigError for a
value outside its range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flowspec.errors import ConfigError


def expected_tbt(
    step_seconds: Sequence[float], accuracy: float, refill: float | None = None
) -> float:
    """Expected seconds between tokens: the slowest step, and after a miss the pipeline's refill.

    ``step_seconds``: one entry per pipeline step. ``accuracy``: how often the next token is among
    the root's children. ``refill``: mean steps that a miss costs; None: all n, as in the paper
    (n - 1 is defensible). Source: SpecPipe, ``max(t) + (1 - accuracy) * sum(t)``.
    """
    check_all_seconds("step_seconds", step_seconds)
    check_fraction("accuracy", accuracy)
    steps = len(step_seconds)
    refill = steps if refill is None else refill
    check_at_least_0("refill", refill)
    return max(step_seconds) + (1 - accuracy) * refill * math.fsum(step_seconds) / steps


def best_width(
    step_seconds_by_width: Mapping[int, float],
    accuracy_by_width: Mapping[int, float],
    stages: int,
    refill: float | None = None,
) -> int:
    """The level width with the least expected time between tokens; the narrowest of equals.

    Both tables are keyed by width in rows and must have the same keys. ``stages``: pipeline
    steps, of equal length. ``refill`` as in ``expected_tbt``. Source: docs/algorithms.md#width.
    """
    if not step_seconds_by_width or step_seconds_by_width.keys() != accuracy_by_width.keys():
        raise ConfigError(
            "the two tables name different widths, or none; expected one entry per width in each"
        )
    if stages < 1:
        raise ConfigError(f"stages is {stages}; expected 1 or more")

    def expected(width: int) -> float:
        return expected_tbt(
            [step_seconds_by_width[width]] * stages, accuracy_by_width[width], refill
        )

    return min(sorted(step_seconds_by_width), key=expected)


def check_all_seconds(name: str, values: Sequence[float]) -> None:
    if not values:
        raise ConfigError(f"{name} is empty; expected at least one time")
    for value in values:
        check_seconds(name, value)


def check_seconds(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} has {value}; expected seconds, 0 or more")


def check_at_least_0(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value}; expected a number, 0 or more")


def check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value}; expected a share between 0 and 1")
