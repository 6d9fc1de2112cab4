"""The devices and links that a pipeline emulates, and its nominal clock."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.work import Work
from flowspec.errors import ConfigError
from flowspec.rehearse.devices.profile import LinkShape, Profile, Times
from flowspec.rehearse.devices.way import Way

#: Entry of a pipeline's record that holds its ``Emulation``; absent: not emulated.
EMULATED = "emulated"
#: How long after its nominal time an event is held for inputs in transit, wall seconds.
GUARD_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Emulation:
    """The devices and links of ``profile`` as a pipeline of ``stages`` that drafts with ``source``.

    Nominal time t is wall time ``began + stretch * t`` (monotonic clock of one machine, seconds).
    Software is charged its CPU seconds, and ``hop`` seconds per write: the time of a bare message
    through the broker beyond the CPU time of its ends. ``free_software``: charge neither.
    """

    profile: Profile
    stages: int
    source: str
    stretch: float = 1.0
    free_software: bool = False
    hop: float = 0.0
    guard: float = GUARD_SECONDS
    began: float = 0.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.stretch <= 1e4:
            raise ConfigError(f"stretch is {self.stretch}; expected 1 to 10000")
        if self.profile.link.exclusive:
            raise ConfigError(
                f"profile {self.profile.name} has exclusive links, which only simulations have: "
                "use flowspec simulate or bench, or a profile without link.exclusive"
            )
        self.profile.check_source(self.source)
        self.profile.way.check(self.stages)

    def following(self, split: Sequence[int]) -> Emulation:
        """This emulation with the layers of every stage as in ``split``, which are the model's.

        A profile of a model with another number of layers keeps its own split. ConfigError if the
        profile gives the same layers another split.
        """
        profile = self.profile
        if sum(split) != profile.layers or profile.split == tuple(split):
            return self
        if profile.split:
            raise ConfigError(
                f"profile {profile.name} has {list(profile.split)} layers by stage, and the "
                f"pipeline {list(split)}; expected the same"
            )
        return dataclasses.replace(self, profile=dataclasses.replace(profile, split=tuple(split)))

    def wall(self, nominal: float) -> float:
        """The wall time from which an event at ``nominal`` may be processed."""
        return self.began + self.stretch * nominal + self.guard

    def nominal(self, wall: float) -> float:
        """The nominal time of ``wall``, without the guard."""
        return (wall - self.began) / self.stretch

    def work_seconds(self, worker: Address, work: Work) -> float:
        """Nominal seconds of ``work`` at ``worker``."""
        return self.profile.work_seconds(worker, work, self.stages, self.source)

    def text(self) -> str:
        """JSON for a pipeline's record."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Emulation:
        """The inverse of ``text``; ConfigError for anything else."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "profile": _profile(fields["profile"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"an emulated pipeline is described by {text[:60]!r}: {error}"
            ) from None


def _profile(fields: Mapping[str, Any]) -> Profile:
    return Profile(
        **{
            **fields,
            "layer": _times(fields["layer"]),
            "head": _times(fields["head"]),
            "drafters": {name: _times(times) for name, times in fields["drafters"].items()},
            "link": LinkShape(**fields["link"]),
            "way": Way(**fields["way"]),
            "stages": tuple(fields["stages"]),
            "speeds": tuple(fields["speeds"]),
            "split": tuple(fields["split"]),
            "blocks": tuple(_times(times) for times in fields["blocks"]),
            "middles": tuple(_times(times) for times in fields["middles"]),
        }
    )


def _times(fields: Mapping[str, Any]) -> Times:
    return Times(tuple((int(rows), float(seconds)) for rows, seconds in fields["points"]))
