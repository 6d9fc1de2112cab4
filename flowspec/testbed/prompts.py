"""Prompts by set, and the halves they are split into: one to tune with, one to measure with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from flowspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the ``set`` it belongs to: its file's or its kind's name."""

    set: str
    text: str


def halve(prompts: Iterable[Prompt], half: str) -> list[Prompt]:
    """Every other prompt of each set: ``tuning`` is the first, third, ..., ``measuring`` the
    others; or ``all``.
    """
    if half not in ("tuning", "measuring", "all"):
        raise ConfigError(f"the half is {half!r}; expected tuning, measuring or all")
    seen: dict[str, int] = defaultdict(int)
    kept = []
    for prompt in prompts:
        if half == "all" or seen[prompt.set] % 2 == (half == "measuring"):
            kept.append(prompt)
        seen[prompt.set] += 1
    return kept
