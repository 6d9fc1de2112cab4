"""How wide a level should be: measured step times and hit ranks, and the expected time between
tokens.

Source: SpecPipe section 4.3 of ``algorithms.md``: choose w by measuring t(w) and acc(w), then
the least ``E[TBT](w) = t(w) + (1 - acc(w)) * n * t(w)``.
"""

from __future__ import annotations

from collections import deque

from flowspec.core.protocol.messages import Answer
from flowspec.core.tree.tree import Tree
from flowspec.strategies.expected_tbt import best_width

WIDTHS = (2, 4, 8, 16, 32, 64, 128)
#: Verdicts between two decisions, and answers remembered.
EVERY = 8
SAMPLES = 64


class WidthTuner:
    """Chooses among ``WIDTHS`` for a pipeline of ``stages``; begins wide, to learn how far hits
    reach.

    Only levels cut to the present width can be seen to hit, so a choice goes up at most one size
    at a time, and one try in four is made one size above what the formula says.
    """

    def __init__(self, stages: int) -> None:
        self.width = 64
        self._stages = stages
        self._times: deque[tuple[int, float]] = deque(maxlen=SAMPLES)  # rows of a pass, its seconds
        self._ranks: deque[int] = deque(
            maxlen=SAMPLES
        )  # rank of the hit among the root's children; -1: a miss
        self._verdicts = 0
        self._decisions = 0

    def hear(self, tree: Tree, result: Answer) -> None:
        """Learn from an answer that was not judged yet."""
        if result.seconds > 0:
            self._times.append((len(result.ids), result.seconds))
        choices = dict(zip(result.ids, result.tokens, strict=True))
        if tree.root not in choices or not tree[tree.root].children:
            return
        children = [
            tree[child] for child in tree[tree.root].children.values() if tree[child].selected
        ]
        ranked = sorted(children, key=lambda child: (-child.score, child.id))
        tokens = [child.token for child in ranked]
        chosen = choices[tree.root]
        self._ranks.append(tokens.index(chosen) if chosen in tokens else -1)
        self._verdicts += 1
        if self._verdicts % EVERY == 0:
            self._decide()

    def _decide(self) -> None:
        times = {width: self._seconds(width) for width in WIDTHS}
        shares = {width: self._share(width) for width in WIDTHS}
        best = best_width(times, shares, self._stages)
        self._decisions += 1
        at = WIDTHS.index(best) + (self._decisions % 4 == 0)
        now = WIDTHS.index(self.width)
        self.width = WIDTHS[max(0, min(at, now + 1, len(WIDTHS) - 1))]

    def _share(self, width: int) -> float:
        """acc(w): how often the hit was among the ``width`` best children."""
        return sum(0 <= rank < width for rank in self._ranks) / len(self._ranks)

    def _seconds(self, width: int) -> float:
        """t(w): a straight line through what was measured, never falling with the width."""
        if not self._times:
            return 1.0
        count = len(self._times)
        rows = sum(row for row, _ in self._times) / count
        mean = sum(seconds for _, seconds in self._times) / count
        spread = sum((row - rows) ** 2 for row, _ in self._times)
        rise = (
            sum((row - rows) * (seconds - mean) for row, seconds in self._times) / spread
            if spread
            else 0.0
        )
        return max(mean + max(0.0, rise) * (width - rows), mean / 10)
