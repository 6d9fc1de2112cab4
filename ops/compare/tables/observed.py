"""What a table shows of its runs beyond their stats: work by role, rows held, tokens per verdict.

A ``RunMeter`` is the tap of one simulated run; ``Observed`` is a run's share of a figure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from flowspec.core.protocol.addresses import Address, Role
from flowspec.core.protocol.machine import Compute, Input, Output
from flowspec.core.protocol.work import Part, Pass
from flowspec.rehearse.compare.simulate import Ran
from flowspec.rehearse.simulator import Costs


@dataclass(frozen=True, slots=True)
class PeakRows:
    """Most rows at a stage at once: tree rows, and all rows, context included."""

    tree: int = 0
    total: int = 0


class RunMeter:
    """Counts the work and the rows of a run's nodes; a ``Tap``."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._work: list[tuple[Address, float, float]] = []  # node, begin, seconds
        self._context: dict[Address, int] = defaultdict(int)
        self._tree: dict[Address, int] = defaultdict(int)
        self.peak = PeakRows()

    def __call__(self, node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Compute):
                self._work.append((node, now, self._costs.work(node, output.work)))
                if node.role is Role.VERIFY and isinstance(output.work, Pass):
                    for part in output.work.parts:
                        self._hold(node, part)

    def _hold(self, node: Address, part: Part) -> None:
        if part.pruned is not None:
            self._context[node] += len(part.pruned.accepted)
            self._tree[node] = len(part.pruned.live)
        self._context[node] += part.context
        self._tree[node] += len(part.ids) - part.context
        tree = self._tree[node]
        self.peak = PeakRows(
            max(self.peak.tree, tree), max(self.peak.total, tree + self._context[node])
        )

    def busy(self, begin: float, end: float) -> dict[Role, float]:
        """Share of the time from ``begin`` to ``end`` that a node of a role works, on average."""
        seconds: dict[Address, float] = defaultdict(float)
        for node, start, taken in self._work:
            seconds[node] += max(0.0, min(end, start + taken) - max(begin, start))
        nodes = Counter(node.role for node in seconds)
        shares: dict[Role, float] = defaultdict(float)
        for node, taken in seconds.items():
            shares[node.role] += taken / (end - begin) / nodes[node.role]
        return dict(shares)


@dataclass(frozen=True, slots=True)
class Observed:
    """One run: ``tokens`` of the whole call or after the first, as its unit counts them.

    ``seconds``: for these tokens. ``after``: tokens after the first. ``hits``: those in the tree.
    ``lengths``: tokens of each verdict after the first. ``agreed``: share of the output before its
    first difference from the target's text. ``repeated``: share of repeated 4-grams.
    """

    tokens: int
    seconds: float
    after: int
    hits: float
    repeated: float
    lengths: tuple[int, ...] = ()
    agreed: float = 1.0
    busy: Mapping[Role, float] = field(default_factory=dict)
    peak: PeakRows = PeakRows()


def observed(ran: Ran, meter: RunMeter, *, whole: bool, agreed: float = 1.0) -> Observed:
    """The observations of a run; ``whole``: its time includes the prefill."""
    stats = ran.stats
    times = [when for when, _ in ran.committed_at]
    after = stats["tokens"] - 1
    return Observed(
        stats["tokens"] if whole else after,
        times[-1] if whole else stats["decode_seconds"],
        after,
        (stats["hit_rate"] or 0.0) * after,
        stats["repeated_4grams"],
        lengths(ran.committed_at),
        agreed,
        meter.busy(times[0], times[-1]) if times[-1] > times[0] else {},
        meter.peak,
    )


def lengths(committed_at: Sequence[tuple[float, int]]) -> tuple[int, ...]:
    """Tokens of each verdict after the first, from the moments and counts of a run's commits."""
    counts = [count for _, count in committed_at]
    return tuple(now - before for before, now in pairwise(counts))
