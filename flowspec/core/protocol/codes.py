"""What a change of a pipeline's shared state is answered with."""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """What a script answers; ``lua/README.md`` has the table."""

    OK = 0
    DUP = 1
    GAP = 2
    STALE = 3
    FULL = 4
    HELD = 5
