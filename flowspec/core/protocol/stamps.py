"""Nominal times of an emulated run, as they travel beside its messages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowspec.errors import WireError


@dataclass(frozen=True, slots=True)
class Stamp:
    """When, in nominal seconds, ``source`` let a message of an emulated run go; its link's time
    comes on top.

    A message the task graph held goes with the latest stamp of its creation and of what it
    waited for.
    """

    at: float
    source: str

    def text(self) -> str:
        """As it travels beside an envelope."""
        return f"{self.at!r} {self.source}"

    @classmethod
    def read(cls, text: str) -> Stamp:
        """The inverse of ``text``; WireError for anything else."""
        at, _, source = text.partition(" ")
        try:
            stamp = cls(float(at), source)
        except ValueError:
            stamp = cls(math.nan, source)
        if not math.isfinite(stamp.at) or not source:
            raise WireError(f"a stamp is {text[:40]!r}; expected seconds and a node")
        return stamp
