"""A row of a whole stage has the same bits alone, in a tree segment and beside a long one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import ModelDirectory
from tests.marks import crossed
from tests.model.families import FAMILIES
from tests.model.stages import StageByStage
from tests.precisions import FOUR_BITS

Family = Callable[..., ModelDirectory]
#: A tree of 19 rows above a prompt of 21: token and parent by node.
PROMPT = tuple(range(5, 26))
PARENTS = (20, 21, 21, 21, 22, 22, 23, 24, 25, 27, 28, 28, 29, 30, 31, 31, 34, 36, 37)
TREE = {21 + at: (40 + 3 * at, parent) for at, parent in enumerate(PARENTS)}


def position(node: int) -> int:
    return node if node < len(PROMPT) else position(TREE[node][1]) + 1


def answers(stages: StageByStage, sizes: list[int]) -> torch.Tensor:
    """Logits of the whole tree, fed in segments of ``sizes``."""
    length = len(PROMPT)
    stages.feed(range(length), range(-1, length - 1), range(length), PROMPT)
    stages.prune(length - 1, [length - 1], length, [])
    rows = []
    nodes = list(TREE)
    for size in sizes:
        part, nodes = nodes[:size], nodes[size:]
        parents = [TREE[node][1] for node in part]
        tokens = [TREE[node][0] for node in part]
        rows.append(stages.feed(part, parents, [position(node) for node in part], tokens))
    assert not nodes
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("name", "precision"), crossed(FAMILIES, ("float32", "bfloat16", FOUR_BITS), keep=3)
)
def test_rows_do_not_depend_on_their_company(family: Family, name: str, precision: str) -> None:
    directory = family(name)

    def fed(sizes: list[int]) -> torch.Tensor:
        ranges = [range(3), range(3, directory.layers)]
        return answers(StageByStage(directory, ranges, len(PROMPT), Placing(precision)), sizes)

    alone = fed([1] * len(TREE))
    assert torch.equal(fed([len(TREE)]), alone)
    assert torch.equal(fed([3, 1, 11, 4]), alone)
