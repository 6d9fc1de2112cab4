"""A run of a head's drafter, fed by hand, beside a plain pass of the same head over whole paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.tree.live_rows import LiveRows
from flowspec.model.drafters.eagle import EagleDrafter, FeatureHead

RUN = RunKey("j", 1)
#: Tokens of the families' models.
VOCABULARY = 120


class PlainHead(Protocol):
    """A head as one causal sequence.

    ``hidden``: values of a feature. ``tokens``: number of tokens it can propose.
    """

    hidden: int
    tokens: int

    def last(self, tokens: Sequence[int], features: Sequence[torch.Tensor]) -> torch.Tensor:
        """The predicted feature of the last of ``tokens``; ``features``: their predecessors'."""
        ...

    def scores(self, predicted: torch.Tensor) -> torch.Tensor:
        """Log-probabilities over the target's vocabulary from a predicted feature."""
        ...


class Bench:
    """One run of a drafter, fed by hand, and the plain head's results for it."""

    def __init__(self, drafter: EagleDrafter, plain: PlainHead, prompt: Sequence[int]) -> None:
        self.drafter = drafter
        self.plain = plain
        self.rows = LiveRows(len(prompt))
        self.token = dict(enumerate(prompt))
        self.parent = {at: at - 1 for at in range(len(prompt))}
        self.true: dict[int, torch.Tensor] = {}
        self.given: dict[int, torch.Tensor] = {}
        self.predicted: dict[int, torch.Tensor] = {}
        drafter.allocate(RUN, 400, Sampling(), Returns())

    def path(self, node: int) -> list[int]:
        return [*(self.path(self.parent[node]) if self.parent[node] >= 0 else []), node]

    def learn(self, *nodes: int) -> None:
        """Learn the target's rows of ``nodes``: noise that is fixed per node."""
        rows = torch.stack(
            [
                torch.randn(self.plain.hidden, generator=torch.manual_seed(100 + node))
                for node in nodes
            ]
        )
        self.true.update(zip(nodes, rows, strict=True))
        self.drafter.learn(RUN, nodes, rows.numpy())

    def run(
        self, context: Sequence[int], tree: Sequence[int], width: int = VOCABULARY
    ) -> DraftDone:
        """A pass over rows that are context at once, and over tree rows, which are answered."""
        ids = (*context, *tree)
        parents = tuple(self.parent[node] for node in ids)
        part = Part(
            run=RUN,
            segment=-1,
            ids=ids,
            parents=parents,
            positions=tuple(len(self.path(node)) - 1 for node in ids),
            tokens=tuple(self.token[node] for node in ids),
            offsets=(),
            context=len(context),
            pruned=self.rows.begin_pass(ids, parents, len(context)),
            answers=tuple(range(len(context), len(ids))),
        )
        return self.drafter.run(Draft(part, width))

    def check(self, context: Sequence[int], tree: Sequence[int]) -> None:
        """Run a pass; compare every answer with a plain pass over the node's whole path."""
        for node in (*context, *tree):
            above = self.parent[node]
            self.given[node] = self.true.get(
                above, self.predicted.get(above, torch.zeros(self.plain.hidden))
            )
            path = self.path(node)[1:] or [0]
            self.predicted[node] = self.plain.last(
                [self.token[n] for n in path], [self.given[n] for n in path]
            )
        done = self.run(context, tree)
        for node, tokens, values in zip(tree, done.tokens, done.values, strict=True):
            wanted = self.plain.scores(self.predicted[node])[list(tokens)]
            assert len(set(tokens)) == self.plain.tokens
            assert (torch.tensor(values) - wanted).abs().max() < 5e-4, f"node {node}"


def random_tree(
    bench: Bench, rng: np.random.Generator, tops: Sequence[int], nodes: Sequence[int]
) -> None:
    known = [*tops]
    for node in nodes:
        bench.parent[node] = int(rng.choice(known))
        bench.token[node] = int(rng.integers(VOCABULARY))
        known.append(node)


def feed(bench: Bench, rng: np.random.Generator, nodes: Sequence[int]) -> None:
    """Feed rows in passes of any size; sometimes learn the target's row of one."""
    while nodes:
        count = int(rng.integers(1, 16))
        bench.check((), nodes[:count])
        if rng.random() < 0.4:
            bench.learn(int(rng.choice(nodes[:count])))
        nodes = nodes[count:]


@torch.inference_mode()
def predictions(head: FeatureHead, rows: torch.dtype) -> list[torch.Tensor]:
    """Features of a prompt, a lone row and a level of siblings below it, and the kept rows."""
    source = torch.Generator().manual_seed(5)
    cache = head.new_cache(16, rows)
    cache.storage.zero_()
    found = []
    begin = 0
    for count in (6, 1, 5):
        given = torch.randn((2, count, head.config.hidden_size), generator=source).to(rows)
        mask = torch.zeros((count, begin + count), dtype=torch.bool)
        mask[:, : begin + 1] = True
        mask[:, begin:] |= torch.eye(count, dtype=torch.bool)
        cache.carry_out(None, begin)
        found.append(head.run(*given, [mask], [begin] * count, [cache]))
        begin += count
    return [*found, cache.storage]
