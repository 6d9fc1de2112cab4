"""How rows may travel between workers."""

from __future__ import annotations

from flowspec.errors import ConfigError

#: Decided per link, through the control broker, or straight even on one machine.
AUTO = "auto"
BROKER = "broker"
STRAIGHT = "straight"
ROWS = (AUTO, BROKER, STRAIGHT)


def check_rows(rows: str) -> str:
    """``rows``; ConfigError unless it is one of ROWS."""
    if rows not in ROWS:
        raise ConfigError(f"is {rows!r}; expected one of {', '.join(ROWS)}", "rows")
    return rows
