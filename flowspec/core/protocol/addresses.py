"""Addresses of a pipeline's workers, and of two further senders: scheduler and task graph."""

from __future__ import annotations

import enum
from functools import lru_cache
from typing import NamedTuple

from flowspec.errors import WireError


class Role(enum.StrEnum):
    """A role in a pipeline; its value is the prefix of its addresses on the wire."""

    DRAFT = "d"
    VERIFY = "s"
    MIDDLE = "m"
    SCHEDULER = "scheduler"
    GRAPH = "graph"

    # Addresses are keys that every message looks up; Enum's own hash is a Python function.
    __hash__ = str.__hash__


#: Roles with several processes per pipeline, numbered from 1.
_NUMBERED = (Role.VERIFY, Role.MIDDLE)


class Address(NamedTuple):
    """A sender or receiver: its role, and its number if the role is numbered.

    As text: ``d0`` the draft worker, ``s1`` .. ``sN`` the verify stages, ``m1`` .. the middle
    models, ``scheduler``, and ``graph`` for envelopes that the task graph held back.
    """

    role: Role
    number: int = 0

    def __str__(self) -> str:
        if self.role is Role.DRAFT or self.number:
            return f"{self.role}{self.number}"
        return str(self.role)

    @staticmethod
    @lru_cache(maxsize=256)  # every message names its sender
    def parse(text: str) -> Address:
        """The inverse of ``str``; WireError for anything else."""
        known = _WELL_KNOWN.get(text)
        if known is not None:
            return known
        number = text[1:]
        if number.isascii() and number.isdigit() and not number.startswith("0"):
            for role in _NUMBERED:
                if text[0] == role.value and len(number) <= 6:
                    return Address(role, int(number))
        raise WireError(f"an address is {text[:20]!r}; expected one like d0, s1, m1 or scheduler")


DRAFT = Address(Role.DRAFT)
SCHEDULER = Address(Role.SCHEDULER)
#: Sender of the envelopes that the task graph held; it numbers them when it releases them.
GRAPH = Address(Role.GRAPH)

_WELL_KNOWN = {str(address): address for address in (DRAFT, SCHEDULER, GRAPH)}


def stage_address(stage: int) -> Address:
    """Verify stage ``stage``, counted from 1."""
    return Address(Role.VERIFY, stage)


def middle_address(model: int) -> Address:
    """Middle model ``model``, counted from 1, between the drafter and the target."""
    return Address(Role.MIDDLE, model)


def worker_addresses(stages: int, middles: int) -> tuple[Address, ...]:
    """Every process that works on a pipeline's jobs: draft worker, verify stages, middle models."""
    return (
        DRAFT,
        *map(stage_address, range(1, stages + 1)),
        *map(middle_address, range(1, middles + 1)),
    )
