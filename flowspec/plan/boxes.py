"""The boxes of a cluster: described in a line of text, or measured; what their passes take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from flowspec.errors import ConfigError
from flowspec.rehearse.devices.profile import Times

#: What ``--boxes`` takes, for error messages.
EXPECTED = (
    "expected a name, memory and the memory's bandwidth, with units, "
    "like nano:4x8GiB@50GB/s,desk:24GiB@900GB/s+60TFLOPS"
)
_UNITS = {"mb": 1e6, "gb": 1e9, "mib": 2.0**20, "gib": 2.0**30}
_BOX = re.compile(
    r"(?P<name>[A-Za-z][\w-]*):(?:(?P<count>\d{1,3})x)?"
    r"(?P<memory>\d+(?:\.\d+)?)(?P<unit>MB|GB|MiB|GiB)"
    r"@(?P<bandwidth>\d+(?:\.\d+)?)GB/s(?:\+(?P<compute>\d+(?:\.\d+)?)TFLOPS)?",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class DescribedBox:
    """``memory`` in bytes, ``bandwidth`` of the memory in bytes/s, ``compute`` in FLOP/s; 0: free.

    Both rates are those that large matrices reach, not a data sheet's peak.
    """

    name: str
    memory: float
    bandwidth: float
    compute: float = 0.0


@dataclass(frozen=True, slots=True)
class TimedBox:
    """A box that may serve: its memory in bytes, and passes there by rows.

    ``layers``: each layer of the target. ``embedding``: before the first one. ``head``: norm and LM
    head after the last one. ``each``: once in any stage, whatever its layers. ``drafters``: by
    their names in a profile. ``shared``: how much longer passes take while a stage and the draft
    both compute on this box.
    """

    name: str
    memory: float
    layers: tuple[Times, ...]
    embedding: Times
    head: Times
    drafters: Mapping[str, Times] = field(default_factory=dict)
    shared: float = 2.0
    device: str = "auto"
    each: Times | None = None

    def alike(self, other: TimedBox) -> bool:
        """Whether the boxes differ in nothing but their names."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in self.__dataclass_fields__
            if name != "name"
        )


def parse_boxes(text: str) -> tuple[DescribedBox, ...]:
    """The boxes that ``text`` describes, as ``NAME:[COUNTx]MEMORY@BANDWIDTH[+COMPUTE]``, by commas.

    Several boxes of a name are numbered: ``nano-1``. ConfigError for anything else.
    """
    found: list[DescribedBox] = []
    for part in text.split(","):
        match = _BOX.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"--boxes has {part.strip()!r}; {EXPECTED}")
        count = int(match["count"] or 1)
        memory = float(match["memory"]) * _UNITS[match["unit"].lower()]
        bandwidth = float(match["bandwidth"]) * 1e9
        compute = float(match["compute"] or 0) * 1e12
        if not (count and memory and bandwidth):
            raise ConfigError(f"--boxes has {part.strip()!r} with a zero; {EXPECTED}")
        names = [match["name"]] if count == 1 else _numbered(match["name"], count)
        found += [DescribedBox(name, memory, bandwidth, compute) for name in names]
    names = [box.name for box in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"--boxes names {twice[0]} twice; give equal boxes one name and a count")
    return tuple(found)


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}-{number}" for number in range(1, count + 1)]
