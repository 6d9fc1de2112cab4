"""Nominal times of an emulated run, which travel beside its messages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowspec.core.protocol.addresses import Address
from flowspec.errors import WireError


@dataclass(frozen=True, slots=True)
class Stamp:
    """The nominal time at which a message was in the box ``source``, in seconds.

    That is the last box before its receiver's, or the receiver's; without a broker that is charged,
    its sender's. A message that the task graph held has the latest of its creation's and its
    dependencies' stamps.
    """

    at: float
    source: Address

    def text(self) -> str:
        """The stamp as text, as it travels beside an envelope."""
        return f"{self.at!r} {self.source}"

    @classmethod
    def read(cls, text: str) -> Stamp:
        """The inverse of ``text``; WireError for anything else."""
        seconds, _, source = text.partition(" ")
        try:
            at = float(seconds)
        except ValueError:
            at = math.nan
        if not math.isfinite(at):
            raise WireError(f"a stamp is {text[:40]!r}; expected seconds and an address")
        return cls(at, Address.parse(source))


def later(one: Stamp | None, other: Stamp | None) -> Stamp | None:
    """The later of two stamps, the second if they are equal; None: no stamp."""
    if one is None or (other is not None and other.at >= one.at):
        return other
    return one
