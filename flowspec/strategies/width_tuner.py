"""The width of a level, from measured pass times and the ranks of hits.

Source: SpecPipe (docs/algorithms.md#width): measure t(w) and acc(w), choose the w with the least
``E[TBT](w) = t(w) + (1 - acc(w)) * n * t(w)``.
"""

from __future__ import annotations

from collections import deque

from flowspec.core.protocol.messages import Answer
from flowspec.core.tree.tree import Tree
from flowspec.strategies.expected_tbt import best_width

#: The widths to choose from, in rows.
WIDTHS = (2, 4, 8, 16, 32, 64, 128)
#: Verdicts between two decisions.
DECISION_INTERVAL = 8
#: Most recent answers that count.
SAMPLES = 64


class WidthTuner:
    """Chooses among ``WIDTHS`` for a pipeline of ``stages``; begins wide, to learn at which ranks
    hits occur.

    A hit beyond the current width cannot be observed, so the width rises by at most one size per
    decision, and every fourth decision tries one size above the formula's choice.
    """

    def __init__(self, stages: int) -> None:
        self.width = 64
        self._stages = stages
        self._times: deque[tuple[int, float]] = deque(maxlen=SAMPLES)  # (rows, seconds) of a pass
        # Rank of the hit among the root's children; -1: a miss.
        self._ranks: deque[int] = deque(maxlen=SAMPLES)
        self._verdicts = 0
        self._decisions = 0

    def observe(self, tree: Tree, answer: Answer) -> None:
        """Learn from an answer that has not been judged yet."""
        if answer.seconds > 0:
            self._times.append((len(answer.ids), answer.seconds))
        choices = dict(zip(answer.ids, answer.tokens, strict=True))
        if tree.root not in choices or not tree[tree.root].children:
            return
        children = [tree[child] for child in tree[tree.root].children.values()]
        sent = [child for child in children if child.selected]
        ranked = sorted(sent, key=lambda child: (-child.score, child.id))
        tokens = [child.token for child in ranked]
        chosen = choices[tree.root]
        self._ranks.append(tokens.index(chosen) if chosen in tokens else -1)
        self._verdicts += 1
        if self._verdicts % DECISION_INTERVAL == 0:
            self._decide()

    def _decide(self) -> None:
        times = {width: self._seconds(width) for width in WIDTHS}
        shares = {width: self._share(width) for width in WIDTHS}
        best = best_width(times, shares, self._stages)
        self._decisions += 1
        tries_wider = self._decisions % 4 == 0
        at = WIDTHS.index(best) + tries_wider
        now = WIDTHS.index(self.width)
        self.width = WIDTHS[max(0, min(at, now + 1, len(WIDTHS) - 1))]

    def _share(self, width: int) -> float:
        """acc(w): how often the hit was among the ``width`` best children."""
        return sum(0 <= rank < width for rank in self._ranks) / len(self._ranks)

    def _seconds(self, width: int) -> float:
        """t(w): a regression line through the measured passes, with a slope of at least 0."""
        if not self._times:
            return 1.0
        count = len(self._times)
        rows = sum(row for row, _ in self._times) / count
        mean = sum(seconds for _, seconds in self._times) / count
        spread = sum((row - rows) ** 2 for row, _ in self._times)
        rise = 0.0
        if spread:
            rise = sum((row - rows) * (seconds - mean) for row, seconds in self._times) / spread
        return max(mean + max(0.0, rise) * (width - rows), mean / 10)
