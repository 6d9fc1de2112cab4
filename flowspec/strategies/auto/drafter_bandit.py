"""Which of several drafters drafts a job: a bandit over measured tokens per second (UCB1).

Tokens per second is what counts, and it depends on everything: how long a pass of the drafter takes
relative to a stage's, how often its proposals are accepted on this text, what a miss costs on these
links. Rates of earlier jobs count, those of the job itself count more, and the exploration bonus is
larger the less is known of a drafter (UCB1, Auer et al. 2002): a slower one is retried ever more
rarely, but never dropped. A change costs little, since the new drafter catches up in one pass.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

#: Tokens between two decisions.
DECISION_INTERVAL = 24
#: Tokens after a change that count for no drafter: the one before has drafted them.
SETTLING_TOKENS = 8
#: Tokens of earlier jobs that count as much as the job's own.
PRIOR_TOKENS = 128
#: Tokens after which every count is halved, so that drafters are compared anew: pipelines change.
REMEMBERED_TOKENS = 2048
#: Tokens a drafter makes before it is compared; a pipeline's first job starts slowly.
TRIAL_TOKENS = 64
#: Exploration: after n of N tokens a drafter's rate is raised by this times sqrt(ln N / n) of it.
EXPLORATION = 1.0


@dataclass(slots=True)
class DrafterSpeed:
    """Tokens decoded with one drafter, and the seconds they took.

    ``tried``: there once were enough of them to compare it.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    tried: bool = False

    def add(self, tokens: float, seconds: float) -> None:
        """Count ``tokens`` more, decoded in ``seconds``."""
        self.tokens += tokens
        self.seconds += seconds
        self.tried |= self.tokens >= TRIAL_TOKENS


class DrafterBandit:
    """One job's choice among ``count`` drafters.

    ``history``: speeds measured in jobs like this one, by drafter number; it is added to.
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
        """``tokens`` are decoded by now, in ``seconds``; the drafter for what comes next."""
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
