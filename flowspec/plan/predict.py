"""What a layout would do: the simulator's time between tokens, and the best layout by it.

The texts are the packaged target's on packaged prompts, and so is acceptance: that of the packaged
drafters, or a given probability. Only costs are the layout's, and ``SOFTWARE_SECONDS`` for a
worker's software; ``ops/bench/results/plan.md`` compares with emulated runs, which charge theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul

from flowspec.core.run.history import History
from flowspec.core.run.sampling import Sampling
from flowspec.model.base import DraftExecutor
from flowspec.model.drafters.sources import load_sources
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.model.weights.precision import Precision
from flowspec.model.weights.shapes import ModelShapes
from flowspec.plan.layout import SEGMENT, Layout
from flowspec.rehearse.compare.hits import HitDrafter, Kind, geometric
from flowspec.rehearse.compare.memo import MemoDrafter
from flowspec.rehearse.compare.naming import drafter_of
from flowspec.rehearse.compare.simulate import JOB, Ran, profile_costs, returns_hidden, simulate
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.devices.profile import LinkShape, Profile
from flowspec.strategies import build

PLAIN = "autoregressive"
#: Tokens of every text of a prediction, and texts of one that only chooses between layouts.
TOKENS = 32
FEW = 1
#: Seconds of a worker's own work for a pass or an answer: reading, a machine's step, masks,
#: writing. Plain decoding over 4 stages takes 1.018 times the 266 ms of its passes and hops, which
#: is 1 ms for each of the 5 workers (ops/bench/results/emulation.md).
SOFTWARE_SECONDS = 1e-3
#: How far predictions may be off (ops/bench/results/plan.md).
PRECISE = 0.1
#: Weights of the slowest stage against the sum of all, for which layouts are compared.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class TargetRows:
    """A row of the planned target as it travels: values and bytes of each; and the links."""

    hidden: int
    value_bytes: int
    link: LinkShape

    def profile(self, layout: Layout, strategy: str, software: float = 0.0) -> Profile:
        """``layout`` as a cluster that runs ``strategy``; ``software`` as of ``Layout.profile``."""
        drafting = build(strategy, len(layout.stages)).draft_width > 0
        return layout.profile(
            self.hidden, self.value_bytes, self.link, drafting=drafting, software=software
        )

    def expected(self, layout: Layout, strategy: str) -> Profile:
        """The same with the software's usual seconds."""
        return self.profile(layout, strategy, SOFTWARE_SECONDS)


def target_rows(shapes: ModelShapes, precision: Precision, link: LinkShape) -> TargetRows:
    """Rows of a target of ``shapes`` in ``precision``, over ``link``."""
    return TargetRows(shapes.hidden, precision.row_bytes("cpu"), link)


class Predictor:
    """Simulates on ``prompts``, with drafts by ``source``.

    ``acceptance``: the probability that a proposed token is right; None: the packaged drafters'.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        source: str,
        acceptance: float | None = None,
        tokens: int = TOKENS,
    ) -> None:
        self._prompts = tuple(prompts)
        self._source = source
        self._acceptance = acceptance
        self._tokens = tokens
        self._target = open_directory(default_pair()[0])

    @cached_property
    def texts(self) -> list[Text]:
        """The target's texts; they need at least two tokens."""
        hidden = self._acceptance is None and "head" in self._source
        found = texts(self._prompts, [Sampling()], self._tokens, self._target, hidden=hidden)
        return [text for text in found if len(text.output) > 1]

    @cached_property
    def _packaged(self) -> DraftExecutor:
        return load_sources(drafter_of(self._source), self._target, MemoDrafter)

    def _drafter(self, text: Text) -> DraftExecutor:
        if self._acceptance is None:
            return self._packaged
        kind = Kind(geometric(self._acceptance, 1 - self._acceptance))
        return HitDrafter({JOB: (*text.prompt, *text.output)}, [kind], self._target.vocabulary)

    def token_seconds(self, profile: Profile, strategy: str, most: int | None = None) -> float:
        """Seconds between tokens of ``strategy`` on ``profile``, over ``most`` texts or all."""
        history = History()
        runs = [self._run(text, profile, strategy, history) for text in self.texts[:most]]
        return token_seconds(runs)

    def _run(self, text: Text, profile: Profile, strategy: str, history: History) -> Ran:
        stages = profile.stages[0]
        drafter = self._drafter(text)
        hidden = returns_hidden(drafter, build(strategy, stages))
        costs = profile_costs(profile, stages, self._source, hidden=hidden)
        return simulate(text, strategy, stages, self._target, drafter, costs, history=history)


def token_seconds(runs: Sequence[Ran]) -> float:
    """Seconds between tokens, over all runs."""
    seconds: float = sum(run.stats["decode_seconds"] for run in runs)
    tokens: int = sum(run.stats["tokens"] - 1 for run in runs)
    return seconds / tokens


@dataclass(frozen=True, slots=True)
class Predicted:
    """A layout and its seconds between tokens by strategy."""

    layout: Layout
    seconds: Mapping[str, float]


def best_by_boxes(
    found: Mapping[int, Sequence[Layout]],
    rows: TargetRows,
    predictor: Predictor,
    strategy: str,
    tell: Callable[[str], None] = lambda what: None,
) -> dict[int, Predicted]:
    """The best layout for ``strategy`` over each number of boxes, predicted on every prompt.

    Of each number the few that could be best are compared on the first prompts.
    """
    best = {}
    for boxes, options in found.items():
        tell(f"simulating {boxes} {'box' if boxes == 1 else 'boxes'}")
        few = _promising(options)
        if len(few) > 1:
            speeds = [
                predictor.token_seconds(rows.expected(one, strategy), strategy, FEW) for one in few
            ]
            few = [few[speeds.index(min(speeds))]]
        (layout,) = few
        best[boxes] = Predicted(
            layout,
            {
                name: predictor.token_seconds(rows.expected(layout, name), name)
                for name in dict.fromkeys((PLAIN, strategy))
            },
        )
    return best


def fastest(best: Mapping[int, Predicted], strategy: str) -> Predicted:
    """The fastest for ``strategy``; among equals, that of the fewest boxes."""
    return min(best.values(), key=lambda one: (one.seconds[strategy], one.layout.boxes))


def compared(seconds: float, other: float) -> str:
    """How ``seconds`` is to ``other``: faster only if by more than a prediction is off."""
    return "faster than" if other > (1 + PRECISE) * seconds else "about as fast as"


def _promising(options: Sequence[Layout]) -> list[Layout]:
    """The best by weighted sums of slowest stage, sum of stages and draft; each of them once."""
    parts = [(_slowest(one), _total(one), _drafted(one)) for one in options]
    weights = [(share, 1 - share, draft) for share in SHARES for draft in (0.1, 1.0)]
    found = []
    for weighing in weights:
        scores = [sum(map(mul, weighing, part)) for part in parts]
        best = options[scores.index(min(scores))]
        if best not in found:
            found.append(best)
    return found


def _slowest(one: Layout) -> float:
    """Seconds of the slowest stage in a full pipeline."""
    count = len(one.stages)
    seconds = [one.block(stage, drafting=True).at(SEGMENT) for stage in range(1, count + 1)]
    return max(*seconds[:-1], seconds[-1] + one.head(drafting=True).at(SEGMENT), 0.0)


def _total(one: Layout) -> float:
    """Seconds of one row's way through all stages."""
    seconds = [one.block(at, drafting=False).at(1) for at in range(1, len(one.stages) + 1)]
    return math.fsum(seconds) + one.head(drafting=False).at(1)


def _drafted(one: Layout) -> float:
    """Seconds of a pass of every drafter."""
    return math.fsum(times.at(SEGMENT) for times in one.drafters(drafting=True).values())
