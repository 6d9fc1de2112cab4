"""Which of several drafters drafts a job: the fastest by what is known, and now and then one that
might be.

What counts is what comes out in the end, tokens a second, which depends on everything: how long
a pass of the drafter takes beside one of a stage, how often it is right on this text, what a
miss costs on these links. Rates of jobs before count, those of the job itself count more, and
the less is known of a drafter the more is hoped of it (UCB1, Auer et al. 2002), so that a slower
one is asked ever less often and never not at all. Changing costs little: a drafter whose turn it
is computes in one pass what it owes.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

#: Tokens between two decisions; the first ones after a change count for nobody: the drafter before
#: has drafted them.
SLICE = 24
SETTLING = 8
#: Tokens of jobs before that count as much as the job's own.
PRIOR = 128
#: Tokens after which all that is known counts half, so that more is hoped of who lost: pipelines
#: change.
REMEMBERED = 2048
#: Tokens a drafter makes before it is compared; of a pipeline's first job its first ones are slow.
TRIED = 64
#: What is hoped of a drafter beyond its rate after n of N tokens: this times sqrt(ln N / n) of it.
HOPE = 1.0


@dataclass(slots=True)
class Speed:
    """Tokens decoded, and the seconds it took; ``tried``: there once were enough of them to
    compare.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    tried: bool = False

    def add(self, tokens: float, seconds: float) -> None:
        """Count more of them."""
        self.tokens += tokens
        self.seconds += seconds
        self.tried |= self.tokens >= TRIED


class Contest:
    """One job's choice among ``count`` drafters; ``known`` is what jobs like it have shown, and is
    added to.
    """

    def __init__(self, count: int, known: MutableMapping[int, Speed]) -> None:
        self._known = known
        for drafter in range(count):
            known.setdefault(drafter, Speed())
        self._own = [Speed() for _ in range(count)]
        self._tokens = 0
        self._seconds = 0.0  # decoded when last heard
        self._decided = self._settled = (
            0  # tokens when the drafter was chosen; from where on it counts
        )
        self.several = count > 1
        self.drafter = self._best() if self.several else 0

    def decoded(self, tokens: int, seconds: float) -> int:
        """By now ``tokens`` tokens were decoded in ``seconds``; the drafter for what comes next."""
        if not self.several or tokens == self._tokens:
            return self.drafter
        if self._tokens >= self._settled:
            for speed in (self._own[self.drafter], self._known[self.drafter]):
                speed.add(tokens - self._tokens, seconds - self._seconds)
            self._forget()
        self._tokens = tokens
        self._seconds = seconds
        if tokens - self._decided >= SLICE:
            self._decide(tokens)
        return self.drafter

    @property
    def _remembers(self) -> float:
        return sum(speed.tokens for speed in self._known.values())

    def _forget(self) -> None:
        if self._remembers > REMEMBERED:
            for speed in self._known.values():
                speed.tokens = speed.tokens / 2
                speed.seconds = speed.seconds / 2

    def _decide(self, tokens: int) -> None:
        before = self.drafter
        self._decided = tokens
        self.drafter = self._best()
        if self.drafter != before:
            self._settled = tokens + SETTLING

    def _best(self) -> int:
        untried = {
            drafter: speed.tokens for drafter, speed in self._known.items() if not speed.tried
        }
        if untried:
            return min(untried, key=untried.__getitem__)
        return max(self._known, key=self._hoped)

    def _hoped(self, drafter: int) -> float:
        """The rate of ``drafter``, tokens a second, and what is hoped of it beyond."""
        known = self._known[drafter]
        own = self._own[drafter]
        share = min(1.0, PRIOR / known.tokens)
        rate = (share * known.tokens + own.tokens) / (share * known.seconds + own.seconds)
        return rate * (1 + HOPE * math.sqrt(math.log(self._remembers) / known.tokens))
