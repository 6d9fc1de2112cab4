"""A segment's round trip through the pipeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """The answer to ``rows`` rows arrived ``seconds`` after they were sent.

    ``alone``: no other segment of the job was in flight when it was sent.
    """

    rows: int
    seconds: float
    alone: bool
