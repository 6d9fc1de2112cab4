"""How the jobs that decode at once share a pipeline's passes: rows, segments in flight, company.

A stage's time t(w) is a staircase in the rows w of its pass: up to a step, further rows cost
nothing. A lone job has all of them. Several jobs share them, so that their trees narrow as jobs
come, in the end to plain rows: one row and one segment in flight, no tree.

``best_plan`` compares ways of sharing by the tokens per second that they should make. With n jobs
on N stages, each with k segments of w rows in flight, and m segments in a pass:

    segments per second    min(m / t(m w), n k / (N t(m w)))
    tokens per segment     1 / (1 + (k - 1) miss(w))

The first is limited by a stage that is always busy, or by the segments there are to compute. In the
second, a miss voids what follows the missed segment, which is k - 1 segments. With w = k = 1 this
is plain decoding in batches of m rows, whose best size is that of micro-batching: plain rows share
a pass only where that is faster. Where a second row costs several times the first, and the pipeline
has a row for every stage without batches, they stay alone.

All jobs get the same: which of them could use a further row best is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from flowspec.core.job.pass_times import PassTimes
from flowspec.core.protocol.bundles import MOST_ROWS
from flowspec.core.protocol.messages import Answer
from flowspec.core.run.key import RunKey
from flowspec.core.run.share import ALONE, RunShare

#: How often a level of one row lacks the target's token, and the power of its rows by which that
#: falls: the packaged pair's with its head (``ops/bench/many.py``). Only the comparison of plans
#: depends on them.
MISS = 0.35
MISS_POWER = 0.4
#: Rows of a segment to choose from, when jobs share passes.
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96)
#: Rows of a pass that are planned for. A stage bounds a pass by the rows that wait, among them some
#: that a prune has made void: without room for these, passes are never full of live rows.
PLANNED_ROWS = 3 * MOST_ROWS // 4
#: Answers after which the plan is made anew.
REPLAN = 64
#: How much better than the present plan another has to be.
ADVANTAGE = 1.05
#: Passes whose times differ by less cost the same.
FLAT = 1.1


@dataclass(frozen=True, slots=True)
class Sharing:
    """A way of sharing: ``batch`` segments in a pass, each of at most ``rows`` rows.

    ``in_flight``: segments of a job. ``rate``: tokens per second of all jobs.
    """

    rows: int
    in_flight: int
    batch: int
    rate: float


Seconds = Callable[[int], float]
"""t(w): seconds of the slowest stage's pass by its rows."""


def best_plan(jobs: int, stages: int, seconds: Seconds) -> Sharing:
    """The plan with the most tokens per second for ``jobs`` jobs; of equals the most rows.

    Source: the module's docstring.
    """
    plans = (
        _plan(jobs, stages, seconds, (rows, in_flight, batch))
        for rows in SIZES
        for in_flight in _windows(rows, stages)
        for batch in _batches(jobs, stages, in_flight)
        if rows * batch <= PLANNED_ROWS or batch == 1
    )
    return max(plans, key=lambda plan: (plan.rate, plan.rows, plan.batch))


def best_batch(jobs: int, stages: int, seconds: Seconds) -> Sharing:
    """Plain decoding in the best batches: ``best_plan`` without trees."""
    plans = (_plan(jobs, stages, seconds, (1, 1, batch)) for batch in range(1, jobs + 1))
    return max(plans, key=lambda plan: plan.rate)


def _plan(jobs: int, stages: int, seconds: Seconds, shape: tuple[int, int, int]) -> Sharing:
    rows, in_flight, batch = shape
    segments = min(batch, jobs * in_flight / stages) / seconds(batch * rows)
    rate = segments * tokens_per_segment(rows, in_flight, stages)
    return Sharing(rows, in_flight, batch, rate)


def tokens_per_segment(rows: int, in_flight: int, stages: int) -> float:
    """Tokens that a segment of ``rows`` rows commits, with ``in_flight`` in flight.

    On a single stage the root leads its tree's segment: a chain of ``rows`` rows at least.
    """
    if stages == 1:
        return (1 - (1 - MISS) ** rows) / MISS
    return 1 / (1 + (in_flight - 1) * MISS * math.pow(rows, -MISS_POWER))


def _windows(rows: int, stages: int) -> range:
    """Segments in flight to choose from; a tree needs a second one, behind its root's."""
    return range(1 if rows == 1 else min(2, stages), stages + 1)


def _batches(jobs: int, stages: int, in_flight: int) -> Collection[int]:
    """Batches to choose from: those that plain decoding has, for a tree's some of them."""
    if in_flight == 1:
        return range(1, jobs + 1)
    full = -(-jobs * in_flight // stages)
    return {1, min(full, jobs), jobs}


class Governor:
    """What every run of a pipeline of ``stages`` may use, from the passes measured so far."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._passes = PassTimes()
        self._notes = 0
        self._planned_at = 0  # notes
        self._planned_for = (0, False)  # jobs, and whether any drafts
        self._plan: Sharing | None = None
        self._share = ALONE
        self._given: dict[RunKey, RunShare] = {}
        self._alone = RunKey("", 0), 0  # the run that measures a lone row, and since which note

    def note(self, answer: Answer) -> None:
        """Learn the time of the slowest pass that ``answer`` tells of."""
        if answer.seconds > 0 and answer.rows:
            self._passes.note_answer(answer.rows, answer)
            self._notes += 1

    def changes(self, runs: Mapping[RunKey, bool]) -> dict[RunKey, RunShare]:
        """The shares that change, if ``runs`` decode now; by run, whether it grows a tree."""
        before = self._given
        share = self._share_of(len(runs), drafts=any(runs.values()))
        self._given = dict.fromkeys(runs, share)
        if runs and share != ALONE and not self._passes.single:
            # One makes passes of a lone row: without their time, plans are compared wrongly.
            self._given[self._measuring(list(runs))] = RunShare(1, 1, 1, jobs=len(runs))
        return {run: new for run, new in self._given.items() if before.get(run, ALONE) != new}

    def _measuring(self, runs: Sequence[RunKey]) -> RunKey:
        """The run that makes passes of a lone row.

        It stays the same, so that what it has in flight can end; but not for ever, since a strategy
        with rows of its own makes none.
        """
        known, since = self._alone
        at = runs.index(known) if known in runs else -1
        if at < 0 or self._notes - since >= REPLAN:
            self._alone = runs[(at + 1) % len(runs)], self._notes
        return self._alone[0]

    def _share_of(self, jobs: int, *, drafts: bool) -> RunShare:
        """The share of each of ``jobs`` jobs."""
        fresh = self._notes - self._planned_at
        due = fresh >= REPLAN or (fresh and self._plan is None)
        if (jobs, drafts) != self._planned_for or due:
            self._share = self._decide(jobs, drafts=drafts)
            self._planned_at = self._notes
            self._planned_for = (jobs, drafts)
        return self._share

    def _decide(self, jobs: int, *, drafts: bool) -> RunShare:
        known = self._plan if self._planned_for == (jobs, drafts) else None
        self._plan = None
        if jobs < 2 or not self._notes:
            return ALONE
        seconds = cache(self._passes.at)
        found = (best_plan if drafts else best_batch)(jobs, self._stages, seconds)
        if known is not None:
            shape = (known.rows, known.in_flight, known.batch)
            kept = _plan(jobs, self._stages, seconds, shape)
            found = kept if found.rate < kept.rate * ADVANTAGE else found
        self._plan = found
        size = found.batch * found.rows
        whole = min(MOST_ROWS, jobs * found.rows)
        together = size if seconds(whole) > seconds(size) * FLAT else 0
        return RunShare(found.rows, found.in_flight, together, jobs=jobs)
