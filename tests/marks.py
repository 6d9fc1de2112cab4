"""Which cases of a parametrised test run in ``make test``, and which in ``make test-all`` only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest


def heavy(*values: object) -> Any:
    """A case of ``make test-all`` only."""
    return pytest.param(*values, marks=pytest.mark.heavy)


def crossed(*columns: Iterable[object], keep: int = 2) -> list[Any]:
    """All combinations of a value of each column.

    ``make test`` runs those whose places add up to a multiple of ``keep``: every value of every
    column, if another column has ``keep`` values or more.
    """
    numbered = [list(enumerate(column)) for column in columns]
    found = []
    for case in itertools.product(*numbered):
        values = [value for _, value in case]
        light = sum(place for place, _ in case) % keep == 0
        found.append(pytest.param(*values) if light else heavy(*values))
    return found


def every(keep: int, cases: Iterable[tuple[object, ...]]) -> list[Any]:
    """``cases``, of which ``make test`` runs every ``keep``-th."""
    return [
        pytest.param(*case) if at % keep == 0 else heavy(*case) for at, case in enumerate(cases)
    ]


def examples(count: int) -> int:
    """``count`` examples of a property in ``make test-all``, a quarter in ``make test``."""
    return count if hypothesis.settings.get_current_profile_name() == "thorough" else count // 4
