"""Deciding while a job runs how many rows a segment has, how long to draft for it, how many are in flight.

All from measured times and hits. A pass over w rows takes t(w) seconds in the slowest stage. Of w rows about
one in ``SPREAD`` is an alternative to the next token, the others continue it; so the next token is among
what was sent with probability acc(w), the share of tokens whose rank among the drafter's proposals was below
w / SPREAD. A miss costs the way through the n steps of the pipeline again. SpecPipe's expected time between
tokens (``algorithms.md`` 4.3), ``t(w) * (1 + (n - 1) * (1 - acc(w)))``, then says which w is best.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from flowspec.core.formulas import expected_tbt
from flowspec.core.messages import Result
from flowspec.core.tree import Tree

#: Rows of a segment to choose among.
ROWS = (1, 8, 16, 32, 64, 128)
#: Where to begin: wide enough that passes of one row and of many are both seen at once.
FIRST_ROWS = 64
#: Rows of a segment to one alternative of the next token.
SPREAD = 8
#: Verdicts after which the first decisions are made.
FIRST = (2, 4)
#: Verdicts between two decisions, ranks and times remembered, and what a change must promise to gain.
EVERY, SAMPLES, GAIN = 8, 64, 0.05
#: Ranks taken for granted before any were seen, so that the first decisions need not wait for many.
PRIOR = (0, 0, 0, 0, 1, 4)
#: Most passes of the drafter a free slot waits for.
PASSES = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """``rows`` of a segment, drafted in at most ``passes`` passes; ``in_flight`` segments on their way."""

    rows: int
    passes: int
    in_flight: int


class Controller:
    """One job's decisions, for a pipeline of ``stages``; ``rows`` fixes the rows where they are given."""

    def __init__(self, stages: int, rows: int = 0) -> None:
        self._stages, self._fixed = stages, rows
        self._rows = rows or FIRST_ROWS
        self._times: dict[int, deque[float]] = {}  # by the size of a pass, in powers of two
        self._ranks: deque[int] = deque(PRIOR, maxlen=SAMPLES)
        self._verdicts = 0
        #: What was decided, as (verdicts so far, rows).
        self.decisions: list[tuple[int, int]] = [(0, self._rows)]

    def hear(self, tree: Tree, result: Result, rows: int) -> None:
        """Learn from an answer to ``rows`` rows (0: unknown) that was not judged yet."""
        if result.seconds > 0 and rows:
            size = (rows - 1).bit_length()
            self._times.setdefault(size, deque(maxlen=8)).append(result.seconds)
        choices = dict(zip(result.ids, result.tokens, strict=True))
        expansion = tree[tree.root].expansion
        if tree.root in choices and expansion is not None:
            token = choices[tree.root]
            self._ranks.append(expansion.tokens.index(token) if token in expansion.tokens else len(expansion.tokens))
            self._verdicts += 1
            if not self._fixed and (self._verdicts % EVERY == 0 or self._verdicts in FIRST):
                self._decide()

    def plan(self, covering: int, draft_seconds: float) -> Plan:
        """What holds now. ``covering``: segments that hide the way (0: unknown); ``draft_seconds``: of a pass."""
        step = self._seconds(self._rows)
        passes = math.ceil(step / draft_seconds) if step and draft_seconds else 2
        return Plan(self._rows, max(1, min(PASSES, passes)), max(self._stages, covering - 2))

    def _decide(self) -> None:
        expected = {rows: self._expected(rows) for rows in ROWS}
        best = min(ROWS, key=lambda rows: (expected[rows], rows))
        if expected[best] < expected[self._rows] * (1 - GAIN):
            self._rows = best
            self.decisions.append((self._verdicts, best))

    def _expected(self, rows: int) -> float:
        reach = max(1, rows // SPREAD)
        accuracy = sum(rank < reach for rank in self._ranks) / len(self._ranks)
        return expected_tbt([self._seconds(rows)] * self._stages, accuracy, self._stages - 1)

    def _seconds(self, rows: int) -> float:
        """t(w): the median of passes of that size, else a straight line between sizes that were seen."""
        known = sorted((2**size, median(times)) for size, times in self._times.items())
        if not known:
            return 0.0
        below = [entry for entry in known if entry[0] <= rows] or known[:1]
        above = [entry for entry in known if entry[0] >= rows] or known[-1:]
        (low, fast), (high, slow) = below[-1], above[0]
        share = (rows - low) / (high - low) if high > low else 0.0
        return fast + max(0.0, slow - fast) * share
