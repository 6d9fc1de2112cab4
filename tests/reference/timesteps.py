"""PipeDec: in each timestep every group of stages computes one layer of the tree.

A timestep ends when all its groups and the drafter are done and D0 has heard of it, a link's time
after a group's end; then the choice at the root is judged if the last group computed the root, and
the next layer is chosen among what survives.
"""

from __future__ import annotations

from tests.reference.cases import Case, Commits, Options
from tests.reference.growth import Levels, bottom_layer
from tests.reference.tree import Node, first_root, judge, live


def commits(case: Case, options: Options) -> Commits:
    """``groups=0``: as many groups as stages."""
    width, children = int(options["width"]), int(options["children"])
    costs, stages = case.costs, len(case.costs.stages)
    groups = int(options.get("groups", 0)) or stages
    times = [group_seconds(costs.stages, groups, group, costs.link) for group in range(groups)]
    now = sum(costs.stages) + (stages + 1) * costs.link
    record, left = [(now, 1)], case.budget - 1
    root = first_root(case)
    layers: list[list[Node]] = [[root]]  # by group; an empty one has nothing to compute
    while left:
        layers += [[] for _ in range(groups - len(layers))]
        level = Levels(bottom_layer(root), width, children)
        drafted = level.wanted()
        busy = [seconds for seconds, layer in zip(times, layers, strict=True) if layer]
        now += max(*busy, costs.draft if drafted else 0.0)
        for node in drafted:
            node.candidates = case.propose(node.path)
        for row in layers.pop():
            row.answered = True
        verdict = judge(case, root)
        if verdict is None:
            layers.insert(0, enter(level))
            continue
        record.append((now, verdict.tokens))
        left -= verdict.tokens
        root = verdict.root
        if verdict.missed:
            layers = [[root]]
        else:
            layers = [live(layer, root) for layer in layers]
            layers.insert(0, next_layer(root, width, children))
    return record


def next_layer(root: Node, width: int, children: int) -> list[Node]:
    """The layer below the deepest that survived; nothing if that was not drafted from."""
    level = Levels(bottom_layer(root), width, children)
    return [] if level.wanted() else enter(level)


def enter(level: Levels) -> list[Node]:
    """The layer chosen, in the tree from now on."""
    layer = level.rows()
    for node in layer:
        node.selected = True
    return layer


def group_seconds(stages: tuple[float, ...], groups: int, group: int, link: float) -> float:
    """Passes of a group's stages one after another, and all links from D0 to D0 on the way."""
    first, end = len(stages) * group // groups, len(stages) * (group + 1) // groups
    return sum(stages[first:end]) + (end - first + 1) * link
