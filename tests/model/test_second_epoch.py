"""Two epochs of one job at a drafter: each has its own rows, tokens, features and sampling."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.tree.live_rows import LiveRows
from flowspec.model.base import DraftExecutor
from flowspec.model.drafters.drafter_choice import ChoiceDrafter
from flowspec.model.drafters.eagle import EagleDrafter, load_head
from flowspec.model.drafters.hybrid import HybridDrafter
from flowspec.model.drafters.language_model import ModelDrafter, load_drafter
from flowspec.model.drafters.ngram import NgramDrafter
from flowspec.model.weights.directory import ModelDirectory
from tests.model.heads import VOCABULARY
from tests.model.test_eagle import HIDDEN, save_head

FIRST = RunKey("j", 1)
SECOND = RunKey("j", 2)
#: The runs have the same node ids, with different tokens.
TOKENS = {FIRST: (7, 8, 9, 7, 8, 9, 7, 40, 8), SECOND: (7, 8, 30, 7, 8, 30, 7, 41, 8)}
SAMPLINGS = {FIRST: Sampling(1.0, seed=1), SECOND: Sampling(0.7, seed=2)}
PROMPT = 6

Make = Callable[[], DraftExecutor]
#: A step of one run: allocate, a pass, or release.
Step = Callable[[], DraftDone | None]


@pytest.fixture(params=["model", "head", "ngram", "hybrid", "choice"])
def make(
    request: pytest.FixtureRequest, family: Callable[..., ModelDirectory], tmp_path: Path
) -> Make:
    target = family("llama")
    head = save_head(tmp_path / "head")

    def model() -> ModelDrafter:
        return load_drafter(family("qwen2"))

    def eagle() -> EagleDrafter:
        return load_head(head, target)

    def ngram() -> NgramDrafter:
        return NgramDrafter(VOCABULARY)

    kinds: dict[str, Make] = {
        "model": model,
        "head": eagle,
        "ngram": ngram,
        "hybrid": lambda: HybridDrafter([model(), eagle(), ngram()]),
        "choice": lambda: ChoiceDrafter([model(), eagle()]),
    }
    return kinds[request.param]


def steps(drafter: DraftExecutor, run: RunKey) -> Iterator[Step]:
    """Allocate; the prompt; a root with two children; after a prune, a child of the first one."""
    live = LiveRows(PROMPT)

    def learn(nodes: Sequence[int]) -> None:
        if drafter.wants_hidden:
            noise = np.random.default_rng(100 * run.epoch + nodes[0])
            drafter.learn(run, nodes, noise.normal(size=(len(nodes), HIDDEN)).astype(np.float32))

    def draft(ids: Sequence[int], parents: Sequence[int], context: int = 0) -> DraftDone:
        part = Part(
            run=run,
            segment=-1,
            ids=tuple(ids),
            parents=tuple(parents),
            positions=tuple({6: 6, 7: 6, 8: 7}.get(node, node) for node in ids),
            tokens=tuple(TOKENS[run][node] for node in ids),
            offsets=(),
            context=context,
            pruned=live.begin_pass(ids, parents, context),
            answers=tuple(range(context, len(ids))),
        )
        return drafter.run(Draft(part, 5, coupled=True, drafter=run.epoch - 1))

    def prefill() -> DraftDone:
        learn(range(5))
        return draft(range(5), range(-1, 4), context=5)

    def after_a_prune() -> DraftDone:
        live.prune([5], root=6)
        learn([5])
        return draft([8], [6])

    yield lambda: drafter.allocate(run, 100, SAMPLINGS[run], Returns())
    yield prefill
    yield lambda: draft([5, 6, 7], [4, 5, 5])
    yield after_a_prune
    yield lambda: drafter.release(run)


def alone(drafter: DraftExecutor, run: RunKey) -> list[DraftDone]:
    return [done for step in steps(drafter, run) if (done := step()) is not None]


def test_epochs_do_not_share_rows(make: Make) -> None:
    expected = {run: alone(make(), run) for run in (FIRST, SECOND)}
    assert all(any(done.tokens) for done in expected[SECOND][1:])
    assert expected[FIRST] != expected[SECOND]
    drafter = make()
    turns = 5
    orders = list(itertools.combinations(range(2 * turns), turns))
    for first in orders[::13]:
        runs = {run: steps(drafter, run) for run in (FIRST, SECOND)}
        done: dict[RunKey, list[DraftDone]] = {FIRST: [], SECOND: []}
        for turn in range(2 * turns):
            run = FIRST if turn in first else SECOND
            result = next(runs[run])()
            done[run] += [result] if result is not None else []
        assert done == expected


def test_the_release_of_an_epoch_frees_its_rows_alone(make: Make) -> None:
    expected = alone(make(), SECOND)
    drafter = make()
    first = steps(drafter, FIRST)
    second = steps(drafter, SECOND)
    for _ in range(3):
        next(first)()
        next(second)()
    drafter.release(FIRST)
    drafter.release(FIRST)
    with pytest.raises(KeyError):
        next(first)()
    assert next(second)() == expected[-1]
