"""The naive pipeline and the static tree: rounds that are judged when all of it is back.

A round is its draft passes, one after another, then its segments one behind the other through all
stages. The whole tree was answered, so the verdict ends the round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.reference.cases import Case, Commits, Costs, Options
from tests.reference.flowspec import cut
from tests.reference.growth import Beam
from tests.reference.tree import Node, first_root, judge

#: For a root: the number of draft passes, and the segments of the tree drafted.
Draft = Callable[[Node], tuple[int, list[list[Node]]]]


def naive(case: Case, options: Options) -> Commits:
    """FlowSpec's naive pipeline: a beam's tree in generation order, in N + 1 segments."""
    width, loops, nodes = (int(options[name]) for name in ("width", "loops", "nodes"))
    order, limit = str(options.get("order", "generation")), int(options.get("segment", 1 << 20))

    def draft(root: Node) -> tuple[int, list[list[Node]]]:
        beam, passes = Beam(root, width, loops + 1, order), 0
        while unknown := beam.wanted():
            ask(case, unknown)
            passes += 1
        return passes, cut([root, *beam.chosen(nodes)], len(case.costs.stages) + 1, limit)

    return list(rounds(case, draft))


def static(case: Case, options: Options) -> Commits:
    """SpecInfer's static tree: every node of a level has the same number of children."""
    shape = [int(count) for count in str(options["shape"]).split("-")]

    def draft(root: Node) -> tuple[int, list[list[Node]]]:
        tree, level, passes = [root], [root], 0
        for count in shape:
            if not level:
                break
            ask(case, level)
            passes += 1
            level = [child for node in level for child in node.grown()[:count]]
            tree.extend(level)
        return passes, [tree]

    return list(rounds(case, draft))


def ask(case: Case, nodes: list[Node]) -> None:
    for node in nodes:
        node.candidates = case.propose(node.path)


def rounds(case: Case, draft: Draft) -> Iterator[tuple[float, int]]:
    """Rounds from prefill to the end of the text."""
    costs = case.costs
    root = first_root(case)
    now = through(costs, 0.0, 1)
    yield now, 1
    left = case.budget - 1
    while left:
        passes, segments = draft(root)
        for paid in range(passes):
            now += 0.0 if costs.per_growth and paid else costs.draft
        now = through(costs, now, len(segments))
        for row in (row for segment in segments for row in segment):
            row.selected = row.answered = True
        verdict = judge(case, root)
        assert verdict is not None
        yield now, verdict.tokens
        root, left = verdict.root, left - verdict.tokens


def through(costs: Costs, now: float, count: int) -> float:
    """When the last of ``count`` segments is back at D0, of which N + 1 are in flight at most."""
    slots = len(costs.stages) + 1
    free = [0.0] * len(costs.stages)
    back: list[float] = []
    for index in range(count):
        time = now if index < slots else back[index - slots]
        for stage, seconds in enumerate(costs.stages):
            time = free[stage] = max(free[stage], time + costs.link) + seconds
        back.append(time + costs.link)
    return back[-1]
