"""Runs of two sides in turn, and their times compared prompt by prompt.

A noisy machine drifts while it is measured. The sides therefore alternate run by run, and a time is
compared with the other side's in the same repeat of the same prompt only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flowspec.rehearse.compare.report import Estimate
from ops.peer.llama import LlamaRun
from ops.peer.prompts import PeerPrompt

#: Decodes a prompt.
System = Callable[[PeerPrompt], LlamaRun]


@dataclass(frozen=True, slots=True)
class Sides:
    """Equally many systems of either side, by name. Names differ between the sides."""

    ours: Mapping[str, System]
    theirs: Mapping[str, System]

    def only(self, ours: Iterable[str], theirs: Iterable[str]) -> Sides:
        """The sides reduced to the named systems."""
        return Sides(
            {name: self.ours[name] for name in ours}, {name: self.theirs[name] for name in theirs}
        )


@dataclass(slots=True)
class Runs:
    """``seconds`` per token by system, prompt and repeat; ``same``: the text was the target's."""

    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    same: dict[str, list[bool]] = field(default_factory=dict)

    def add(self, system: str, prompt: int, run: LlamaRun, expected: str) -> None:
        """Add a run; a side may decode slightly more tokens than ``expected`` has."""
        times = self.seconds.setdefault(system, [])
        if len(times) <= prompt:
            times.append([])
        times[prompt].append(run.tbt)
        self.same.setdefault(system, []).append(run.text.startswith(expected))

    def medians(self, system: str) -> list[float]:
        """Seconds per token by prompt, the median over the repeats."""
        return [statistics.median(times) for times in self.seconds[system]]

    def mean(self, system: str) -> float:
        """Seconds per token: the geometric mean over prompts, so that slow ones weigh no more."""
        return statistics.geometric_mean(self.medians(system))

    def ranked(self, systems: Iterable[str]) -> list[str]:
        """``systems``, the fastest first."""
        return sorted(systems, key=self.mean)

    def ratio(self, ours: str, theirs: str) -> Estimate:
        """Their time over ours; above 1, ours is faster.

        The median over prompts of the median over repeats, with the 95% interval over prompts.
        """
        found = Estimate.of(
            [
                statistics.median(b / a for a, b in zip(*repeats, strict=True))
                for repeats in zip(self.seconds[ours], self.seconds[theirs], strict=True)
            ]
        )
        assert found is not None
        return found


def word(ratio: Estimate) -> str:
    """What the interval of their time over ours supports; nothing if there is no interval."""
    if ratio.low is not None and ratio.low > 1:
        return "faster"
    if ratio.high is not None and ratio.high < 1:
        return "slower"
    return "not distinguished"


def turns(ours: Sequence[str], theirs: Sequence[str], turn: int) -> list[str]:
    """Every system once, the sides in turn.

    With ``turn`` the side that begins changes, then the first of both, then who follows whom.
    """
    count = len(ours)
    half, begins = divmod(turn, 2)
    one = _rotated(ours, half)
    other = _rotated(theirs, half + half // count)
    pairs = zip(other, one, strict=True) if begins else zip(one, other, strict=True)
    return [name for pair in pairs for name in pair]


def _rotated(names: Sequence[str], by: int) -> list[str]:
    at = by % len(names)
    return [*names[at:], *names[:at]]


def run(
    sides: Sides,
    prompts: Sequence[PeerPrompt],
    repeats: int,
    tell: Callable[[str], None] = lambda line: None,
) -> Runs:
    """Decode every prompt ``repeats`` times with every system; ``tell`` hears of each prompt."""
    systems = {**sides.ours, **sides.theirs}
    runs = Runs({system: [] for system in systems})
    for at, prompt in enumerate(prompts):
        tell(f"prompt {at + 1} of {len(prompts)}")
        for repeat in range(repeats):
            for system in turns([*sides.ours], [*sides.theirs], at * repeats + repeat):
                runs.add(system, at, systems[system](prompt), prompt.expected)
    return runs
