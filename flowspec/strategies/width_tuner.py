"""The width of a level, from measured pass times and the ranks of the target's tokens.

Source: SpecPipe (docs/algorithms.md#width): measure t(w) and acc(w), choose the w with the least
``E[TBT](w) = t(w) + (1 - acc(w)) * n * t(w)``. Both tables are kept from job to job.

A level of width w holds the w best candidates of its parents, so it holds the target's token if
fewer than w candidates score higher. This rank is known for candidates that were not sent, too:
wider levels need not be tried to learn how often they would hit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence

from flowspec.core.drafting.layered_growth import LayerGrowth
from flowspec.core.job.pass_times import PassTimes
from flowspec.core.protocol.messages import Answer
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.tree.tree import Tree
from flowspec.strategies.expected_tbt import best_width

#: The widths to choose from, in rows.
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
#: Most recent ranks that count.
SAMPLES = 256
#: The rank of a token that the drafter did not propose.
MISS = -1
#: Ranks assumed before any was observed: a small drafter's best candidate is right more often than
#: not, and few tokens are missed by many candidates.
PRIOR = (*(0,) * 10, 1, 1, 2, 4, 9, MISS)


class WidthHistory:
    """Ranks of the target's tokens by (coupled, sampled, children, levels) of a job.

    A token's rank depends on all of these.
    """

    def __init__(self) -> None:
        self.ranks = defaultdict[tuple[bool, bool, int, int], deque[int]](_assumed)


def _assumed() -> deque[int]:
    return deque(PRIOR, maxlen=SAMPLES)


class WidthTuner:
    """Chooses among ``WIDTHS`` for segments of ``levels`` levels in a pipeline of ``stages``.

    ``passes`` and ``ranks``: those of earlier jobs; updated in place.
    """

    def __init__(self, stages: int, levels: int, passes: PassTimes, ranks: deque[int]) -> None:
        self._stages = stages
        self._levels = levels
        self._passes = passes
        self._ranks = ranks
        # Negated scores of a level's best candidates when it was chosen, ascending, by depth.
        self._candidates: dict[int, list[float]] = {}

    @property
    def width(self) -> int:
        """The width with the least expected time between tokens.

        1 until a pass over one row was measured: levels that are too narrow lose a few hits, and
        where rows are dear, ones that are too wide take many times as long.
        """
        if not self._passes.single:
            return WIDTHS[0]
        times = {width: self._passes.at(width * self._levels) for width in WIDTHS}
        shares = {width: self._share(width) for width in WIDTHS}
        # A step is a segment of several levels, each of which can miss.
        return best_width(times, shares, self._stages, refill=self._stages * self._levels)

    def _share(self, width: int) -> float:
        """acc(w): how often the target's token was among the ``width`` best candidates."""
        return sum(0 <= rank < width for rank in self._ranks) / len(self._ranks)

    def begin_round(self) -> None:
        """A new root was planted, and depths count from it."""
        self._candidates.clear()

    def chose(self, tree: Tree, segment: Sequence[int]) -> None:
        """``segment`` holds new levels of the tree, each with the best of its candidates."""
        chosen = set(segment)
        passed = [depth for depth in self._candidates if depth <= tree[tree.root].depth]
        for depth in passed:
            del self._candidates[depth]
        depths = {tree[node].depth for node in segment}
        for depth in depths:
            parents = (
                node
                for node in tree
                if node.depth == depth - 1 and (node.selected or node.id in chosen)
            )
            scores = sorted(
                -(node.score + value)
                for node in parents
                if node.expansion is not None
                for value in node.expansion.values
            )
            self._candidates[depth] = scores[: WIDTHS[-1]]

    def prefilled(self, trip: RoundTrip, answer: Answer) -> None:
        """Learn from the prompt's trip and the answer to its last chunk."""
        self._passes.note_prompt(trip.rows, answer)

    def observe(self, tree: Tree, answer: Answer, trip: RoundTrip | None) -> None:
        """Learn from a segment's answer that has not been judged yet; ``trip``: its round trip."""
        if trip is not None and answer.seconds > 0:
            self._note_pass(trip.rows, answer)
        choices = dict(zip(answer.ids, answer.tokens, strict=True))
        node: int | None = tree.root
        while node in choices and node in tree:
            token = choices[node]
            self._note_rank(tree, node, token)
            node = tree.child(node, token)

    def _note_pass(self, sent: int, answer: Answer) -> None:
        """Note the slowest pass of a segment of ``sent`` rows, and of other runs' rows with it.

        If most were pruned on the way, the pass may have been over few of them; its time says
        something of ``sent`` rows only if it is longer than what is expected of them.
        """
        rows = max(sent, answer.rows)
        if 2 * len(answer.ids) >= sent or answer.seconds > self._passes.at(rows):
            self._passes.note_answer(sent, answer)

    def _note_rank(self, tree: Tree, node: int, token: int) -> None:
        """Note where ``token`` ranks in the level below ``node``, if one was chosen."""
        parent = tree[node]
        candidates = self._candidates.get(parent.depth + 1)
        if candidates is None or parent.expansion is None:
            return
        found = parent.expansion
        rank = MISS
        if token in found.tokens:
            score = parent.score + found.values[found.tokens.index(token)]
            rank = bisect_left(candidates, -score)
        self._ranks.append(rank)


class TunedGrowth(LayerGrowth):
    """Layers of the tuner's width; tells the tuner what was chosen.

    ``shape``: most rows of a layer, candidates per node, layers.
    """

    def __init__(self, tree: Tree, tuner: WidthTuner, shape: tuple[int, int, int]) -> None:
        most, children, levels = shape
        super().__init__(tree, min(tuner.width, most), children, levels)
        self._tuner = tuner

    def segments(self, tree: Tree) -> list[list[int]]:
        found = super().segments(tree)
        for segment in found:
            self._tuner.chose(tree, segment)
        return found
