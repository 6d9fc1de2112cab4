"""A table's figures: simulated systems, with a paper's hit rates or with the packaged models."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from flowspec.core.run.sampling import Sampling
from flowspec.emulation import profiles
from flowspec.emulation.profile import Profile
from flowspec.errors import ConfigError
from flowspec.model.base import DraftExecutor, StageExecutor
from flowspec.model.directory import ModelDirectory, default_pair, open_directory
from flowspec.strategies import build
from flowspec.testbed.hits import HitDrafter, HitStage
from flowspec.testbed.simulate import JOB, Ran, profile_costs, returns_hidden, simulate
from flowspec.testbed.tables.contents import Block, Oracle, PaperRow, Table
from flowspec.testbed.texts import Text, texts

#: Texts per figure at a paper's hit rate.
TEXTS = 16
#: The packaged models by profile name; ``m8b`` is a chain's middle model.
PACKAGED = {"slm": "draft", "head": "head", "m8b": "medium"}


@dataclass(frozen=True, slots=True)
class Figure:
    """``value`` in the table's unit, and the shares of tokens hit and of repeated 4-grams."""

    value: float
    hit_rate: float
    repeated: float


def at_hit_rate(table: Table, block: Block, row: PaperRow, oracle: Oracle, count: int) -> Figure:
    """The figure of ``row`` with models of ``oracle``'s hit rates, over ``count`` texts.

    The texts are arbitrary, since only hits matter. Nothing is sampled: a temperature has its own
    rates.
    """
    target = open_directory(default_pair()[0])
    draft = row.draft or table.draft

    def runs() -> Iterator[Ran]:
        for seed, text in enumerate(_arbitrary(table, target, count)):
            sequences = {JOB: (*text.prompt, *text.output)}
            drafter = HitDrafter(
                sequences,
                oracle.kinds[draft],
                target.vocabulary,
                seed=seed,
                wants_hidden=draft == "head",
            )
            makers = {
                f"m{model}": lambda sequences=sequences, seed=seed: HitStage(
                    sequences, oracle.middle, target.vocabulary, seed=seed
                )
                for model in range(row.middles)
            }
            yield _run(text, block, row, draft, target, drafter, makers)

    return _figure(table, runs())


def _arbitrary(table: Table, target: ModelDirectory, count: int) -> Iterator[Text]:
    drawn = random.Random(0)
    allowed = [token for token in range(target.vocabulary) if token not in target.eos]
    for _ in range(count):
        prompt, output = (
            tuple(drawn.choices(allowed, k=length))
            for length in (table.prompt_tokens, table.output_tokens)
        )
        yield Text(prompt, output, Sampling(), np.zeros((len(prompt) + len(output), 1), np.float32))


def _run(
    text: Text,
    block: Block,
    row: PaperRow,
    draft: str,
    target: ModelDirectory,
    drafter: DraftExecutor,
    middles: Mapping[str, Callable[[], StageExecutor]],
) -> Ran:
    strategy = build(row.strategy, block.stages)
    costs = profile_costs(
        _profile(block.profile), block.stages, draft, hidden=returns_hidden(drafter, strategy)
    )
    return simulate(text, row.strategy, block.stages, target, drafter, costs, middles)


@cache
def _profile(name: str) -> Profile:
    """The profile ``name``, whose middle model, if any, is also one of its drafters."""
    profile = profiles.load(name)
    alone = dict(zip(("m8b",), profile.middles, strict=False))
    return replace(profile, drafters={**profile.drafters, **alone})


def _figure(table: Table, runs: Iterator[Ran]) -> Figure:
    tokens = after = seconds = hits = repeated = 0.0
    count = 0
    for ran in runs:
        stats: Mapping[str, Any] = ran.stats
        count += 1
        tokens += stats["tokens"]
        after += stats["tokens"] - 1
        hits += (stats["hit_rate"] or 0.0) * (stats["tokens"] - 1)
        repeated += stats["repeated_4grams"]
        seconds += ran.committed_at[-1][0] if table.unit == "tokens/s" else stats["decode_seconds"]
    value = tokens / seconds if table.unit == "tokens/s" else 1e3 * seconds / after
    return Figure(value, hits / after, repeated / count)


class Pair:
    """The packaged models on ``prompts``: texts, drafters and figures, each made once."""

    def __init__(self, table: Table, prompts: Sequence[str], tokens: int) -> None:
        self._table = table
        self._prompts = prompts
        self._tokens = tokens
        self._target = open_directory(default_pair()[0])
        self._texts: dict[float, list[Text]] = {}
        self._drafters: dict[str, DraftExecutor] = {}
        self._middles: dict[str, StageExecutor] = {}
        self._figures: dict[tuple[object, ...], Figure] = {}

    def figure(self, block: Block, row: PaperRow) -> Figure:
        """The figure of ``row`` with real drafts and the target's own text."""
        draft = row.draft or self._table.draft
        key = (block.profile, block.stages, block.temperature, row.strategy, draft, row.middles)
        if key not in self._figures:
            middles = {f"m{model}": self._middle for model in range(row.middles)}
            given = self._of(block.temperature)
            drafter = self._drafter(draft)
            runs = (_run(text, block, row, draft, self._target, drafter, middles) for text in given)
            self._figures[key] = _figure(self._table, runs)
        return self._figures[key]

    def _of(self, temperature: float) -> list[Text]:
        if temperature not in self._texts:
            samplings = [Sampling(temperature)]
            hidden = self._table.draft == "head"
            found = texts(self._prompts, samplings, self._tokens, self._target, hidden=hidden)
            if not found:
                raise ConfigError(
                    f"no prompt leaves room for {self._tokens} tokens; expected shorter ones"
                )
            self._texts[temperature] = found
        return self._texts[temperature]

    def _drafter(self, draft: str) -> DraftExecutor:
        from flowspec.model.sources import load_sources
        from flowspec.testbed.memo import MemoDrafter

        if draft not in self._drafters:
            self._drafters[draft] = MemoDrafter(load_sources(PACKAGED[draft], self._target))
        return self._drafters[draft]

    def _middle(self) -> StageExecutor:
        from flowspec.model.stage import load_stage

        if "medium" not in self._middles:
            directory = open_directory(PACKAGED["m8b"])
            self._middles["medium"] = load_stage(directory, range(directory.layers))
        return self._middles["medium"]
