"""A table's figures: simulated systems, with a paper's hit rates or with the packaged models."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

import numpy as np

from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError
from flowspec.model.base import DraftExecutor, StageExecutor
from flowspec.model.weights.directory import (
    ModelDirectory,
    default_pair,
    layer_ranges,
    open_directory,
)
from flowspec.rehearse.compare.hits import HitDrafter, HitStage
from flowspec.rehearse.compare.simulate import (
    JOB,
    profile_costs,
    returns_hidden,
    simulate,
    simulate_stages,
)
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.devices import profiles
from flowspec.rehearse.devices.profile import Profile
from flowspec.rehearse.devices.way import NO_BROKER
from flowspec.strategies import STRATEGIES, build
from ops.compare.tables.contents import Block, Oracle, PaperRow, Table
from ops.compare.tables.observed import Observed, RunMeter, observed
from ops.compare.tables.ranks import AT, hit_at

#: The packaged models by profile name; ``m8b`` is a chain's middle model.
PACKAGED = {"slm": "draft", "head": "head", "ngram": "ngram", "m8b": "medium"}
#: The column for which drafters are asked, and nothing is simulated.
AT_K = "at_k"


@dataclass(frozen=True)
class Figure:
    """A system's runs, one per text, or how often a drafter is right among its k best (``at_k``).

    ``value``: in the table's unit, over all texts. ``hit_rate``, ``repeated``: the shares of tokens
    hit and of repeated 4-grams.
    """

    unit: str
    runs: tuple[Observed, ...]
    at_k: tuple[float, ...] = ()

    @cached_property
    def value(self) -> float:
        return _value(self.unit, self.runs)

    @property
    def values(self) -> list[float]:
        """The value of each text."""
        return [_value(self.unit, [run]) for run in self.runs]

    @property
    def thirds(self) -> list[float]:
        """The values of the first, second and last third of the texts."""
        size = len(self.runs) / 3
        cuts = [round(size * at) for at in range(4)]
        parts = (self.runs[low:high] for low, high in pairwise(cuts))
        return [_value(self.unit, part) for part in parts if part]

    @property
    def hit_rate(self) -> float:
        return sum(run.hits for run in self.runs) / sum(run.after for run in self.runs)

    @property
    def repeated(self) -> float:
        return sum(run.repeated for run in self.runs) / max(1, len(self.runs))


def _value(unit: str, runs: Sequence[Observed]) -> float:
    tokens = sum(run.tokens for run in runs)
    seconds = sum(run.seconds for run in runs)
    return tokens / seconds if unit == "tokens/s" else 1e3 * seconds / tokens


def at_hit_rate(table: Table, block: Block, row: PaperRow, oracle: Oracle, count: int) -> Figure:
    """The figure of ``row`` with models of ``oracle``'s hit rates, over ``count`` texts.

    The texts are arbitrary, since only hits matter. Nothing is sampled: a temperature has its own
    rates.
    """
    target = open_directory(default_pair()[0])
    draft = row.draft or table.draft

    def models() -> Iterator[tuple[Text, _Models]]:
        for seed, text in enumerate(_arbitrary(table, target, count)):
            sequences = {JOB: (*text.prompt, *text.output)}
            drafter = HitDrafter(
                sequences,
                oracle.kinds[draft],
                target.vocabulary,
                seed=seed,
                wants_hidden="head" in draft,
            )
            makers = {
                f"m{model}": lambda sequences=sequences, seed=seed: HitStage(
                    sequences, oracle.middle, target.vocabulary, seed=seed
                )
                for model in range(row.middles)
            }
            yield text, _Models(target, drafter, makers)

    return _figure(table, block, row, models())


def _arbitrary(table: Table, target: ModelDirectory, count: int) -> Iterator[Text]:
    drawn = random.Random(0)
    allowed = [token for token in range(target.vocabulary) if token not in target.eos]
    for _ in range(count):
        prompt, output = (
            tuple(drawn.choices(allowed, k=length))
            for length in (table.prompt_tokens, table.output_tokens)
        )
        yield Text(prompt, output, Sampling(), np.zeros((len(prompt) + len(output), 1), np.float32))


@dataclass(frozen=True, slots=True)
class _Models:
    """The models of a run; ``stages``: real ones of the target, for a lossy system."""

    target: ModelDirectory
    drafter: DraftExecutor
    middles: Mapping[str, Callable[[], StageExecutor]]
    stages: Sequence[StageExecutor] = ()


def _figure(
    table: Table, block: Block, row: PaperRow, given: Iterable[tuple[Text, _Models]]
) -> Figure:
    if AT_K in table.columns:
        coupled = build(row.strategy, block.stages).coupled and block.temperature > 0
        found = [hit_at(text, models.drafter, coupled=coupled) for text, models in given]
        tokens = sum(count for count, _ in found)
        shares = tuple(sum(hits[at] for _, hits in found) / tokens for at in range(len(AT)))
        return Figure(table.unit, (), shares)
    return Figure(table.unit, tuple(_run(table, block, row, *one) for one in given))


def _run(table: Table, block: Block, row: PaperRow, text: Text, models: _Models) -> Observed:
    strategy = build(row.strategy, block.stages)
    costs = profile_costs(
        cluster(block),
        block.stages,
        row.draft or table.draft,
        hidden=returns_hidden(models.drafter, strategy),
    )
    meter = RunMeter(costs)
    whole = table.unit == "tokens/s"
    if models.stages:
        ran, output = simulate_stages(
            text, row.strategy, models.stages, models.target, models.drafter, costs, meter
        )
        pairs = zip(output, text.output, strict=False)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(text.output))
        return observed(ran, meter, whole=whole, agreed=same / len(text.output))
    ran = simulate(
        text,
        row.strategy,
        block.stages,
        models.target,
        models.drafter,
        costs,
        models.middles,
        meter,
    )
    return observed(ran, meter, whole=whole)


def cluster(block: Block) -> Profile:
    """The profile of ``block`` with its links and no broker, which no paper has.

    A middle model is also one of the drafters.
    """
    profile = _profile(block.profile)
    link = profile.link
    latency = link.latency if block.latency_ms is None else block.latency_ms / 1e3
    bandwidth = link.bandwidth if block.mbit is None else block.mbit * 1e6 / 8
    shape = replace(link, latency=latency, bandwidth=bandwidth)
    return replace(profile, link=shape, way=NO_BROKER)


@cache
def _profile(name: str) -> Profile:
    profile = profiles.load(name)
    alone = dict(zip(("m8b",), profile.middles, strict=False))
    return replace(profile, drafters={**profile.drafters, **alone})


class Pair:
    """The packaged models on ``prompts``: texts, drafters and figures, each made once."""

    def __init__(self, table: Table, prompts: Sequence[str], tokens: int) -> None:
        self._table = table
        self._prompts = prompts
        self._tokens = tokens
        self._target = open_directory(default_pair()[0])
        self._texts: dict[tuple[Sampling, ...], list[Text]] = {}
        self._drafters: dict[str, DraftExecutor] = {}
        self._middles: dict[str, StageExecutor] = {}
        self._stages: dict[int, list[StageExecutor]] = {}
        self._figures: dict[tuple[object, ...], Figure] = {}

    def figure(self, block: Block, row: PaperRow) -> Figure:
        """The figure of ``row`` with real drafts and the target's own text."""
        draft = row.draft or self._table.draft
        link = cluster(block).link
        samplings = block.samplings
        key = (block.profile, link, block.stages, samplings, row.strategy, draft, row.middles)
        if key not in self._figures:
            models = _Models(
                self._target,
                self._drafter(draft),
                {f"m{model}": self._middle for model in range(row.middles)},
                self._loaded(block.stages) if lossy(row) else (),
            )
            given = self._of(samplings)
            self._figures[key] = _figure(
                self._table, block, row, ((text, models) for text in given)
            )
        return self._figures[key]

    def _of(self, samplings: tuple[Sampling, ...]) -> list[Text]:
        if samplings not in self._texts:
            hidden = any("head" in draft for draft in self._table.drafts)
            found = texts(self._prompts, samplings, self._tokens, self._target, hidden=hidden)
            if not found:
                raise ConfigError(
                    f"no prompt leaves room for {self._tokens} tokens; expected shorter ones"
                )
            self._texts[samplings] = found
        return self._texts[samplings]

    def _drafter(self, draft: str) -> DraftExecutor:
        from flowspec.model.drafters.sources import load_sources
        from flowspec.rehearse.compare.memo import MemoDrafter

        if draft not in self._drafters:
            names = "+".join(PACKAGED[name] for name in draft.split("+"))
            self._drafters[draft] = MemoDrafter(load_sources(names, self._target))
        return self._drafters[draft]

    def _middle(self) -> StageExecutor:
        from flowspec.model.stage import load_stage

        if "medium" not in self._middles:
            directory = open_directory(PACKAGED["m8b"])
            self._middles["medium"] = load_stage(directory, range(directory.layers))
        return self._middles["medium"]

    def _loaded(self, stages: int) -> list[StageExecutor]:
        from flowspec.model.stage import load_stage

        if stages not in self._stages:
            target = self._target
            ranges = layer_ranges(target.layers, stages)
            self._stages[stages] = [load_stage(target, layers) for layers in ranges]
        return self._stages[stages]


def lossy(row: PaperRow) -> bool:
    """Whether ``row`` may give another text than the target's."""
    return bool(row.strategy) and bool(STRATEGIES[row.strategy.partition(":")[0]].lossy)
