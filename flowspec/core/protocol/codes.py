"""Result codes of changes to a pipeline's shared state."""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """The result of a script; ``lua/README.md`` has the table."""

    OK = 0
    DUP = 1
    GAP = 2
    STALE = 3
    FULL = 4
    HELD = 5
