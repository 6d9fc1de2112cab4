"""Calibrated values: how likely a drafter's candidates are to be accepted, learnt online.

A drafter's log-probabilities do not estimate acceptance: small models are unsure of a best
candidate that a greedy target takes nearly always, a drafter that sees the target's noise returns
score gaps, and the values of merged drafters are not comparable. So the candidates of a node are
the classes of a conditional logit model. A candidate of source s with rank r there and value v has
the utility ``slope[s] * v + bias[s, r]``, the event that none of them is the target's token has the
utility ``miss``, and the acceptance probabilities are the softmax of all utilities. Every accepted
node is one observation, and one step of gradient descent on its log loss
(docs/algorithms.md#calibration).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.tree.tree import Expansion

#: Number of ranks told apart; the last stands for all further ranks.
RANKS = 16
#: Ranks after which a bias has fallen to 1/e of the first one's, before anything was observed.
BIAS_DECAY = 3.0
#: Size of a step: a parameter moves by RATE * gradient / sqrt(its weight).
RATE = 0.3
#: The weight of a parameter at first: for slopes and the miss, and for biases, each of which has
#: fewer observations. It grows by the gradient squared.
WEIGHT = 20.0
BIAS_WEIGHT = 2.0
#: Largest weight, so that recent jobs outweigh old ones.
MOST_WEIGHT = 100.0
#: Range of a slope: candidates never change their order by value, and steps stay stable.
SLOPES = (0.1, 4.0)
#: Upper bound of a probability: one of 1 has log 0, and every descendant would score like its
#: ancestor.
MOST = 0.98

_TOP = math.log(MOST)


@dataclass(frozen=True, slots=True)
class Prior:
    """Parameters before anything was observed; ``bias`` is that of the first rank."""

    slope: float
    bias: float
    miss: float


#: A greedy target takes a small model's best candidate more often than its probability says.
GREEDY = Prior(slope=1.3, bias=0.7, miss=-4.5)
#: A target with a temperature draws from its distribution, of which the drafter's is an estimate.
SAMPLED = Prior(slope=1.0, bias=0.0, miss=-4.0)
#: The values of coupled candidates are gaps: the source's best has 0.
COUPLED = Prior(slope=1.0, bias=1.1, miss=-1.7)


@dataclass(slots=True)
class _Parameter:
    """One parameter with its weight, the sum of its squared gradients (AdaGrad)."""

    value: float
    weight: float

    def step(self, gradient: float) -> None:
        self.weight = min(MOST_WEIGHT, self.weight + gradient * gradient)
        self.value += RATE * gradient / math.sqrt(self.weight)


class Calibration:
    """The model of one or more jobs' candidates; ``coupled``: the drafters see the target's noise,
    and values are gaps to the source's best.
    """

    def __init__(self, prior: Prior = GREEDY, *, coupled: bool = False) -> None:
        self._prior = prior
        self._coupled = coupled
        self._slopes: dict[int, _Parameter] = {}  # by source
        self._biases: dict[int, _Parameter] = {}  # by cell: source * RANKS + rank
        self._miss = _Parameter(prior.miss, WEIGHT)

    def expansion(
        self, tokens: Sequence[int], values: Sequence[float], sources: Sequence[int] = ()
    ) -> Expansion:
        """The candidates with calibrated values, best first; ``values`` are the drafter's own."""
        cells = self._cells(values, sources)
        logs = [log if log < _TOP else _TOP for log in self._log_shares(values, cells)]
        if len(logs) < 2:
            return Expansion(tuple(tokens), tuple(logs), tuple(cells), tuple(values))
        best_first = sorted(range(len(logs)), key=logs.__getitem__, reverse=True)
        pick = operator.itemgetter(*best_first)
        return Expansion(pick(tokens), pick(logs), pick(cells), pick(values))

    def observe(self, expansion: Expansion | None, token: int) -> None:
        """The target chose ``token`` after the node of ``expansion``; None: it had none."""
        if expansion is None or not expansion.cells:
            return
        slopes: dict[int, float] = {}
        expected = 0.0
        logs = self._log_shares(expansion.raw, expansion.cells)
        for candidate, cell, value, log in zip(
            expansion.tokens, expansion.cells, expansion.raw, logs, strict=True
        ):
            share = math.exp(log)
            expected += share
            gradient = (candidate == token) - share
            slopes[cell // RANKS] = slopes.get(cell // RANKS, 0.0) + gradient * value
            self._biases[cell].step(gradient)
        for source, gradient in slopes.items():
            slope = self._slopes[source]
            slope.step(gradient)
            slope.value = min(SLOPES[1], max(SLOPES[0], slope.value))
        self._miss.step((token not in expansion.tokens) - (1 - expected))

    def _log_shares(self, values: Sequence[float], cells: Sequence[int]) -> list[float]:
        """Log of every candidate's acceptance probability."""
        utilities = [
            self._slope(cell // RANKS) * value + self._bias(cell)
            for value, cell in zip(values, cells, strict=True)
        ]
        miss = self._miss.value
        top = max((miss, *utilities))
        total = math.fsum(math.exp(utility - top) for utility in utilities) + math.exp(miss - top)
        log_total = top + math.log(total)
        return [utility - log_total for utility in utilities]

    def _slope(self, source: int) -> float:
        slope = self._slopes.get(source)
        if slope is None:
            slope = self._slopes[source] = _Parameter(self._prior.slope, WEIGHT)
        return slope.value

    def _bias(self, cell: int) -> float:
        bias = self._biases.get(cell)
        if bias is None:
            first = self._prior.bias * math.exp(-(cell % RANKS) / BIAS_DECAY)
            bias = self._biases[cell] = _Parameter(first, BIAS_WEIGHT)
        return bias.value

    def _cells(self, values: Sequence[float], sources: Sequence[int]) -> list[int]:
        """The cell of every candidate: its source, and its rank among that source's candidates."""
        ranks: dict[int, int] = {}
        cells = []
        for value, source in zip(values, sources or (0,) * len(values), strict=True):
            rank = ranks.get(source)
            if rank is None:
                # The best of a coupled source has value 0, unless it was credited to another one.
                rank = 1 if self._coupled and value < 0 else 0
            cells.append(source * RANKS + min(rank, RANKS - 1))
            ranks[source] = rank + 1
        return cells


class Calibrations:
    """A pipeline's models: coupled, sampled and greedy jobs have different acceptance rates."""

    def __init__(self) -> None:
        self._models: dict[tuple[bool, bool], Calibration] = {}

    def model(self, *, coupled: bool, sampled: bool) -> Calibration:
        """The model of jobs with a temperature (``sampled``), or of those among them whose drafter
        sees the target's noise (``coupled``).
        """
        key = (coupled, sampled)
        if key not in self._models:
            prior = COUPLED if coupled else SAMPLED if sampled else GREEDY
            self._models[key] = Calibration(prior, coupled=coupled)
        return self._models[key]
