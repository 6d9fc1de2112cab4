"""Prompts decoded by so many at once that a next one begins when one ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ops.peer.prompts import PeerPrompt
from ops.peer.server import Completion

#: Decodes a prompt; called by several threads at once.
Serve = Callable[[PeerPrompt], Completion]


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over the prompts: ``rate`` tokens per second of all, prefill included; ``same``: how
    many of the ``prompts`` texts were the target's own.
    """

    rate: float
    same: int
    prompts: int


def closed_loop(serve: Serve, prompts: Sequence[PeerPrompt], at_once: int) -> Round:
    """Decode ``prompts``, ``at_once`` at any time until none is left to begin."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(serve, prompts))
    seconds = time.perf_counter() - begun
    same = sum(
        one.text.startswith(prompt.expected) for one, prompt in zip(found, prompts, strict=True)
    )
    return Round(sum(one.tokens for one in found) / seconds, same, len(prompts))
