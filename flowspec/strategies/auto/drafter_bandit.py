"""Which of several drafters drafts a job, if any: a bandit over measured tokens per second (UCB1).

The reward is the job's tokens per second: it includes how long a drafter's pass takes relative to a
stage's, how often its candidates are accepted on this text, what a miss costs on these links, and
what speculation takes from a machine that several stages or a drafter share. Rates of earlier jobs
count, the job's own rates count more, and a drafter with fewer samples gets a larger exploration
bonus (UCB1, Auer et al. 2002), so that a slower drafter is retried ever more rarely but never
dropped. A change costs little: the new drafter catches up in one pass.

Plain decoding is one of the choices. It needs no trial: lone rows have shown what a token takes.
So is synchronous speculation by a drafter: the root and a chain of its candidates are the only
segment in flight, and nothing is drafted meanwhile. Where stages and drafter share a machine, more
segments in flight gain nothing and cost its time. What it promises follows from lone rows and from
how often the drafter's best candidate below a root is right, so that it is tried only where that is
more than the drafter makes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import MutableMapping
from dataclasses import dataclass

#: Tokens between two decisions, unless an untried drafter promises more synchronously.
DECISION_INTERVAL = 24
#: Tokens after a change that count for neither choice: the previous one has drafted them.
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
#: Candidates of known fate from which on synchronous speculation is estimated.
LEAST_CANDIDATES = 8
#: Tokens that the fastest round trip of a lone row counts for until some are decoded plainly.
ESTIMATE_TOKENS = 128
#: Most candidates that a drafter's share of right ones is averaged over.
REMEMBERED_CANDIDATES = 64
#: Longest time that tokens count for, relative to the mean time of so many by the same choice: what
#: takes longer is an outage, of the broker or a worker, and no drafter's doing.
MOST_TIMES = 32.0
#: Weight of the exploration bonus: a rate after n of N tokens is raised by this * sqrt(ln N / n).
EXPLORATION = 1.0


def synchronous(drafter: int) -> int:
    """The choice of synchronous speculation by ``drafter``; of such a choice, the drafter."""
    return PLAIN - 1 - drafter


@dataclass(slots=True)
class DrafterSpeed:
    """Tokens decoded with one drafter, and the seconds they took.

    ``warm``: the first tokens are over, and are not among them. ``tried``: so is the trial, the
    drafter takes part in the comparison; of plain and synchronous choices: these are tokens,
    and no estimate. ``candidates``: its best ones below roots, of which ``right`` were.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    warm: bool = False
    tried: bool = False
    candidates: float = 0.0
    right: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Add ``tokens`` tokens, decoded in ``seconds``."""
        self.tokens += tokens
        self.seconds += seconds
        if not self.warm and self.tokens >= WARMUP_TOKENS:
            self.tokens = self.seconds = 0.0
            self.warm = True
        self.tried |= self.tokens >= TRIAL_TOKENS

    def estimate(self, seconds: float) -> None:
        """Until it is tried: a token takes ``seconds``."""
        self.tokens = ESTIMATE_TOKENS
        self.seconds = ESTIMATE_TOKENS * seconds


class DrafterBandit:
    """One job's choice among ``count`` drafters and, if it ``may_be_plain``, plain decoding.

    And synchronous speculation by each of them then. ``history``: speeds by choice, measured in
    jobs like this one; updated in place.
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
        #: A drafter's number, ``PLAIN``, or a ``synchronous`` one.
        self.choice = self._best()

    def note_lone_row(self, seconds: float) -> None:
        """A row alone in the pipeline was answered after ``seconds``, as in plain decoding."""
        plain = self._history.setdefault(PLAIN, DrafterSpeed())
        if not plain.tried and (not plain.tokens or seconds * plain.tokens < plain.seconds):
            plain.estimate(seconds)

    def note_candidate(self, drafter: int, *, right: bool, seconds: float) -> None:
        """The best candidate below a root was ``right``.

        ``seconds``: that drafting it takes, and a further row in the pipeline.
        """
        speed = self._history[drafter]
        kept = 1 - 1 / REMEMBERED_CANDIDATES
        speed.candidates = kept * speed.candidates + 1
        speed.right = kept * speed.right + right
        plain = self._history.get(PLAIN)
        if plain is None or speed.candidates < LEAST_CANDIDATES:
            return
        waiting = self._history.setdefault(synchronous(drafter), DrafterSpeed())
        if not waiting.tried:
            surely = (speed.right - math.sqrt(speed.right)) / speed.candidates
            waiting.estimate((plain.seconds / plain.tokens + seconds) / (1 + max(0.0, surely)))

    def update(self, tokens: int, seconds: float) -> int:
        """The choice for the next growth, after ``tokens`` tokens in ``seconds`` in all."""
        if tokens != self._tokens:
            self._credit(tokens, seconds)
        tries = self.choice >= 0 and not self._history[self.choice].tried
        outdone = tries and self._is_outdone(self.choice)
        if tokens - self._decided_at >= (SETTLING_TOKENS if outdone else DECISION_INTERVAL):
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
            if self.choice < 0 and not self._history[self.choice].tried:
                self._history[self.choice] = DrafterSpeed(warm=True, tried=True)
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
            if drafter >= 0 and not speed.tried
        }
        if untried:
            drafter = min(untried, key=untried.__getitem__)
            return synchronous(drafter) if self._is_outdone(drafter) else drafter
        known = [one for one in self._history if one >= 0 or self._may_be_plain]
        return max(known, key=self._upper_bound)

    def _is_outdone(self, drafter: int) -> bool:
        """Whether it promises more synchronously than it has made, and than plain decoding.

        Its first tokens decide that, so its trial goes on once it has made some synchronously.
        """
        made, promised = self._history[drafter], self._history.get(synchronous(drafter))
        if promised is None or not self._may_be_plain or made.tokens < SETTLING_TOKENS:
            return False
        if promised.tried and promised.tokens > ESTIMATE_TOKENS:
            return False
        others = (made, self._history.get(PLAIN, DrafterSpeed()))
        return all(
            promised.tokens * other.seconds > other.tokens * promised.seconds for other in others
        )

    def _upper_bound(self, choice: int) -> float:
        """Tokens per second of ``choice``, plus the exploration bonus."""
        history = self._history[choice]
        own = self._own[choice]
        share = min(1.0, PRIOR_TOKENS / history.tokens)
        rate = (share * history.tokens + own.tokens) / (share * history.seconds + own.seconds)
        bonus = EXPLORATION * math.sqrt(math.log(self._remembered) / history.tokens)
        return rate * (1 + bonus)
