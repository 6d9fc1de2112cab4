"""Prompts by set, split into a half for tuning and a half for measuring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from flowspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its ``set``: the name of its file or kind."""

    set: str
    text: str


def halve(prompts: Iterable[Prompt], half: str) -> list[Prompt]:
    """Of each set, prompts 1, 3, ... for ``tuning``, the others for ``measuring``; or ``all``."""
    if half not in ("tuning", "measuring", "all"):
        raise ConfigError(f"the half is {half!r}; expected tuning, measuring or all")
    seen: dict[str, int] = defaultdict(int)
    kept = []
    for prompt in prompts:
        if half == "all" or seen[prompt.set] % 2 == (half == "measuring"):
            kept.append(prompt)
        seen[prompt.set] += 1
    return kept
