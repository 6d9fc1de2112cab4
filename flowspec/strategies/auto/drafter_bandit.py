"""Which of several drafters drafts a job, if any: a bandit over measured tokens per second (UCB1).

The reward is the job's tokens per second: it includes how long a drafter's pass takes relative to a
stage's, how often its candidates are accepted on this text, what a miss costs on these links, and
what speculation takes from a machine that several stages or a drafter share. Rates of earlier jobs
count, the job's own rates count more, and a drafter with fewer samples gets a larger exploration
bonus (UCB1, Auer et al. 2002), so that a slower drafter is retried ever more rarely but never
dropped. A change costs little: the new drafter catches up in one pass.

Plain decoding is one of the choices. It needs no trial: lone rows have shown what a token takes.
"""

from __future__ import annotations

import math
from collections import defaultdict
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
#: First tokens decoded with a drafter, which are not counted: costs and values are not known yet.
WARMUP_TOKENS = 32
#: Further tokens decoded with it before it is compared.
TRIAL_TOKENS = 32
#: The choice to draft nothing: the text is decoded plainly.
PLAIN = -1
#: Tokens that the fastest round trip of a lone row counts for until some are decoded plainly.
ESTIMATE_TOKENS = 128
#: Longest time that tokens count for, relative to the mean time of so many by the same choice: what
#: takes longer is an outage, of the broker or a worker, and no drafter's doing.
MOST_TIMES = 32.0
#: Weight of the exploration bonus: a rate after n of N tokens is raised by this * sqrt(ln N / n).
EXPLORATION = 1.0


@dataclass(slots=True)
class DrafterSpeed:
    """Tokens decoded with one drafter, and the seconds they took.

    ``warm``: the first tokens are over, and are not among them. ``tried``: so is the trial, the
    drafter takes part in the comparison; of plain decoding: these are tokens, and no estimate.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    warm: bool = False
    tried: bool = False

    def add(self, tokens: float, seconds: float) -> None:
        """Add ``tokens`` tokens, decoded in ``seconds``."""
        self.tokens += tokens
        self.seconds += seconds
        if not self.warm and self.tokens >= WARMUP_TOKENS:
            self.tokens = self.seconds = 0.0
            self.warm = True
        self.tried |= self.tokens >= TRIAL_TOKENS


class DrafterBandit:
    """One job's choice among ``count`` drafters and, if it ``may_be_plain``, plain decoding.

    ``history``: speeds by drafter number, measured in jobs like this one; updated in place.
    """

    def __init__(
        self,
        count: int,
        history: MutableMapping[int, DrafterSpeed],
        *,
        may_be_plain: bool = True,
    ) -> None:
        self._history = history
        for drafter in range(count):
            history.setdefault(drafter, DrafterSpeed())
        self._own = defaultdict[int, DrafterSpeed](DrafterSpeed)
        self._tokens = 0  # decoded at the last update
        self._seconds = 0.0
        self._decided_at = 0  # tokens when the drafter was chosen
        self._counts_from = 0  # tokens from which on it is credited
        self._may_be_plain = may_be_plain
        #: The drafter's number, or ``PLAIN``.
        self.choice = self._best()

    def note_lone_row(self, seconds: float) -> None:
        """A row alone in the pipeline was answered after ``seconds``, as in plain decoding."""
        plain = self._history.setdefault(PLAIN, DrafterSpeed())
        if not plain.tried and (not plain.tokens or seconds * plain.tokens < plain.seconds):
            plain.tokens = ESTIMATE_TOKENS
            plain.seconds = ESTIMATE_TOKENS * seconds

    def update(self, tokens: int, seconds: float) -> int:
        """The choice for the next growth, after ``tokens`` tokens in ``seconds`` in all."""
        if tokens != self._tokens:
            self._credit(tokens, seconds)
        if tokens - self._decided_at >= DECISION_INTERVAL:
            self._decide(tokens)
        return self.choice

    def resume(self, tokens: int, seconds: float) -> None:
        """Go on after ``tokens`` tokens in ``seconds`` in all; others decoded the last of them."""
        self._tokens = tokens
        self._seconds = seconds
        self._counts_from = tokens + SETTLING_TOKENS

    def _credit(self, tokens: int, seconds: float) -> None:
        """Count what was decoded since the last update for the choice that decoded it."""
        if self._tokens >= self._counts_from:
            if self.choice == PLAIN and not self._history[PLAIN].tried:
                self._history[PLAIN] = DrafterSpeed(warm=True, tried=True)
            count, took = tokens - self._tokens, seconds - self._seconds
            known = self._history[self.choice]
            if known.tried and known.tokens:
                took = min(took, MOST_TIMES * count * known.seconds / known.tokens)
            for speed in (self._own[self.choice], known):
                speed.add(count, took)
            self._halve_when_full()
        self._tokens = tokens
        self._seconds = seconds

    @property
    def _remembered(self) -> float:
        return sum(speed.tokens for speed in self._history.values())

    def _halve_when_full(self) -> None:
        if self._remembered > REMEMBERED_TOKENS:
            for speed in self._history.values():
                speed.tokens /= 2
                speed.seconds /= 2

    def _decide(self, tokens: int) -> None:
        before = self.choice
        self._decided_at = tokens
        self.choice = self._best()
        if self.choice != before:
            self._counts_from = tokens + SETTLING_TOKENS

    def _best(self) -> int:
        untried = {
            drafter: speed.tokens
            for drafter, speed in self._history.items()
            if not speed.tried and drafter != PLAIN
        }
        if untried:
            return min(untried, key=untried.__getitem__)
        known = [one for one in self._history if one != PLAIN or self._may_be_plain]
        return max(known, key=self._upper_bound)

    def _upper_bound(self, drafter: int) -> float:
        """Tokens per second of ``drafter``, plus the exploration bonus."""
        history = self._history[drafter]
        own = self._own[drafter]
        share = min(1.0, PRIOR_TOKENS / history.tokens)
        rate = (share * history.tokens + own.tokens) / (share * history.seconds + own.seconds)
        bonus = EXPLORATION * math.sqrt(math.log(self._remembered) / history.tokens)
        return rate * (1 + bonus)
