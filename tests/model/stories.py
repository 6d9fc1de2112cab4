"""Random runs as a stage's log has them, for tests of KV stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from flowspec.core.protocol.messages import Open, Prune, Segment
from flowspec.core.protocol.work import Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage.stage_run import StageRun, rows_of
from tests.model.families import COMMON

RUN = RunKey("j", 1)
VOCABULARY = COMMON["vocab_size"]
CAPACITY = 200


class Story:
    """A stage's log of one random run: a prompt in chunks, segments, hits and misses.

    A segment may enter the log after the next prune, so that a stage gets dead rows.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.length = int(self.rng.integers(2, 30))
        self.tokens = self.rng.integers(2, VOCABULARY, self.length).tolist()
        self.parents = list(range(-1, self.length - 1))
        self.root = self.length - 1
        self.context = self.root
        self.alive = {self.root}
        self.computed = {self.root}  # not pruned: written, and met by the stage

    def line(self, node: int) -> list[int]:
        """Ids from the prompt's first row to ``node``."""
        return [*self.line(self.parents[node]), node] if node >= 0 else []

    def events(self, steps: int) -> Iterator[Segment | Prune]:
        cuts = self.rng.choice(
            np.arange(1, self.length), size=min(2, self.length - 1), replace=False
        )
        for chunk in np.split(np.arange(self.length), sorted(cuts)):
            yield self.segment(chunk.tolist())
        late: list[int] = []
        for _ in range(steps):
            nodes = self.grow()
            if not late and self.root in self.computed and self.rng.random() < 0.3:
                late = nodes
            else:
                self.computed |= set(nodes)
                yield self.segment(nodes)
            if self.root in self.computed and self.rng.random() < 0.6:
                yield self.commit()
                if late:
                    self.computed |= self.alive & set(late)
                    yield self.segment(late)
                    late = []

    def segment(self, ids: Sequence[int]) -> Segment:
        rows = [
            (node, self.parents[node], len(self.line(node)) - 1, self.tokens[node]) for node in ids
        ]
        return Segment(RUN, 0, 1, *zip(*rows, strict=True))

    def add(self, parent: int) -> int:
        self.parents.append(parent)
        self.tokens.append(int(self.rng.integers(2, VOCABULARY)))
        return len(self.tokens) - 1

    def grow(self) -> list[int]:
        """After a miss a new root, and children of nodes that a segment may build on."""
        nodes = [] if self.root in self.alive else [self.root]
        for _ in range(int(self.rng.integers(0 if nodes else 1, 6))):
            nodes.append(self.add(int(self.rng.choice(sorted({*self.computed, *nodes})))))
        self.alive |= set(nodes)
        return nodes

    def commit(self) -> Prune:
        """Accept a random computed path; continue at a computed child of its end, or miss."""
        last = int(self.rng.choice(sorted(self.computed)))
        accepted = [node for node in self.line(last) if node >= self.root]
        children = [node for node in self.computed if self.parents[node] == last]
        if children and self.rng.random() < 0.7:
            self.root = int(self.rng.choice(children))
            self.alive = {node for node in self.alive if self.root in self.line(node)}
        else:
            self.root = self.add(last)
            self.alive = set()
        self.computed &= self.alive
        prune = Prune(
            RUN,
            self.context,
            tuple(accepted),
            self.root,
            tuple(sorted(self.alive - {self.root})),
        )
        self.context += len(accepted)
        return prune

    def run(self) -> StageRun:
        return StageRun(1, Open(RUN, self.length, CAPACITY, Sampling()), last=True)


def next_part(run: StageRun, event: Segment | Prune) -> Part | None:
    """The rows of ``event`` that a stage computes, if any."""
    if isinstance(event, Prune):
        run.prune(event)
        return None
    kept = run.live_part(event)
    return run.begin_pass(rows_of(event, kept), kept) if kept else None
