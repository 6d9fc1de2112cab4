"""Which of several drafters drafts a job: a bandit over measured tokens per second (UCB1).

The reward is the job's tokens per second: it includes how long a drafter's pass takes relative to a
stage's, how often its candidates are accepted on this text, and what a miss costs on these links.
Rates of earlier jobs count, the job's own rates count more, and a drafter with fewer samples gets
a larger exploration bonus (UCB1, Auer et al. 2002), so that a slower drafter is retried ever more
rarely but never dropped. A change costs little: the new drafter catches up in one pass.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

#: Tokens between two decisions.
DECISION_INTERVAL = 24
#: Tokens after a change that count for neither drafter: the previous one has drafted them.
SETTLING_TOKENS = 8
#: Most tokens of earlier jobs that are weighed against the job's own.
PRIOR_TOKENS = 128
#: Total tokens above which every count is halved, so that old measurements fade.
REMEMBERED_TOKENS = 2048
#: Tokens decoded with a drafter before it is compared; a pipeline's first job starts slowly.
TRIAL_TOKENS = 64
#: Weight of the exploration bonus: a rate after n of N tokens is raised by this * sqrt(ln N / n).
EXPLORATION = 1.0


@dataclass(slots=True)
class DrafterSpeed:
    """Tokens decoded with one drafter, and the seconds they took.

    ``tried``: the trial is over, the drafter takes part in the comparison.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    tried: bool = False

    def add(self, tokens: float, seconds: float) -> None:
        """Add ``tokens`` tokens, decoded in ``seconds``."""
        self.tokens += tokens
        self.seconds += seconds
        self.tried |= self.tokens >= TRIAL_TOKENS


class DrafterBandit:
    """One job's choice among ``count`` drafters.

    ``history``: speeds by drafter number, measured in jobs like this one; updated in place.
    """

    def __init__(self, count: int, history: MutableMapping[int, DrafterSpeed]) -> None:
        self._history = history
        for drafter in range(count):
            history.setdefault(drafter, DrafterSpeed())
        self._own = [DrafterSpeed() for _ in range(count)]
        self._tokens = 0  # decoded at the last update
        self._seconds = 0.0
        self._decided_at = 0  # tokens when the drafter was chosen
        self._counts_from = 0  # tokens from which on it is credited
        self.has_choice = count > 1
        self.drafter = self._best() if self.has_choice else 0

    def update(self, tokens: int, seconds: float) -> int:
        """The drafter for the next growth, after ``tokens`` tokens in ``seconds`` in all."""
        if not self.has_choice or tokens == self._tokens:
            return self.drafter
        if self._tokens >= self._counts_from:
            for speed in (self._own[self.drafter], self._history[self.drafter]):
                speed.add(tokens - self._tokens, seconds - self._seconds)
            self._halve_when_full()
        self._tokens = tokens
        self._seconds = seconds
        if tokens - self._decided_at >= DECISION_INTERVAL:
            self._decide(tokens)
        return self.drafter

    @property
    def _remembered(self) -> float:
        return sum(speed.tokens for speed in self._history.values())

    def _halve_when_full(self) -> None:
        if self._remembered > REMEMBERED_TOKENS:
            for speed in self._history.values():
                speed.tokens /= 2
                speed.seconds /= 2

    def _decide(self, tokens: int) -> None:
        before = self.drafter
        self._decided_at = tokens
        self.drafter = self._best()
        if self.drafter != before:
            self._counts_from = tokens + SETTLING_TOKENS

    def _best(self) -> int:
        untried = {
            drafter: speed.tokens for drafter, speed in self._history.items() if not speed.tried
        }
        if untried:
            return min(untried, key=untried.__getitem__)
        return max(self._history, key=self._upper_bound)

    def _upper_bound(self, drafter: int) -> float:
        """Tokens per second of ``drafter``, plus the exploration bonus."""
        history = self._history[drafter]
        own = self._own[drafter]
        share = min(1.0, PRIOR_TOKENS / history.tokens)
        rate = (share * history.tokens + own.tokens) / (share * history.seconds + own.seconds)
        bonus = EXPLORATION * math.sqrt(math.log(self._remembered) / history.tokens)
        return rate * (1 + bonus)
