"""The features of this machine's CPU. Needs no torch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

_FACTS = Path("/proc/cpuinfo")


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Features of this CPU by their names in ``/proc/cpuinfo``; empty where there is none."""
    try:
        return flags_in(_FACTS.read_text(encoding="utf-8"))
    except OSError:
        return frozenset()


def flags_in(text: str) -> frozenset[str]:
    """The features of the first processor in the text of ``/proc/cpuinfo``."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
