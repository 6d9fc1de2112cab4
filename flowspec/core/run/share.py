"""What a run may use of a pipeline that it shares with other runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunShare:
    """Limits of a run beside others; 0: no limit.

    ``rows``: of a segment. ``in_flight``: segments. ``together``: rows of a pass that its segments
    share with other runs'. ``jobs``: how many decode.
    """

    rows: int = 0
    in_flight: int = 0
    together: int = 0
    jobs: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether the run decodes without a tree."""
        return self.rows == self.in_flight == 1


#: The share of a run that decodes alone.
ALONE = RunShare()
