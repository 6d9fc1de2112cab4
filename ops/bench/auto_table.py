"""The page of ``ops.bench.auto``: what its columns mean, a row per place, and both drafts' best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from flowspec.rehearse.compare.memo import WIDTH
from flowspec.rehearse.compare.report import Estimate, ReportRow, estimate_text
from ops.bench.auto_tuning import Found
from ops.compare.tuning import Effort

BASELINE = "autoregressive"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Place:
    """What was measured on a profile at a temperature with a draft: ``rows`` by strategy, and the
    texts of the others before and after tuning. ``bound``: the clairvoyant's seconds per token.
    """

    profile: str
    stages: int
    temperature: float
    draft: str
    rows: Mapping[str, ReportRow]
    untuned: Sequence[str]
    tuned: Sequence[str]
    bound: float

    @property
    def auto(self) -> ReportRow:
        """The row of ``auto``."""
        return self.rows[AUTO]

    @property
    def best_untuned(self) -> ReportRow:
        """The fastest of the others with their defaults."""
        return _fastest(self.rows[text] for text in self.untuned)

    @property
    def best_tuned(self) -> ReportRow:
        """The fastest of the others with the options that were found."""
        return _fastest(self.rows[text] for text in self.tuned)


COLUMNS = (
    *("profile, stages", "T", "draft", "plain", "best untuned", "best tuned", AUTO),
    *("tuned over auto", "by prompt (95%)", "hit rate", "rows per token", "draft passes per token"),
    *("clairvoyant", "auto over it"),
)
BEST_COLUMNS = ("profile", "T", "best tuned", AUTO, "tuned over auto", "by prompt (95%)")


def tables(
    places: Sequence[Place], found: Sequence[Found], effort: Effort, tokens: int, kept: str = ""
) -> Iterator[str]:
    """The page's lines; ``kept``: the name of the file with all options found."""
    ordered = sorted(places, key=lambda place: (place.profile, place.temperature))
    yield from _explained(ordered, found, effort, tokens)
    if kept:
        yield ""
        yield f"Searched values, and the options found for every system: `{kept}`."
    yield ""
    yield from _table(COLUMNS, (_cells(place) for place in ordered))
    yield ""
    yield "With the better draft for either side:"
    yield ""
    groups = groupby(ordered, key=lambda place: (place.profile, place.temperature))
    yield from _table(BEST_COLUMNS, (_best_cells(list(its)) for _, its in groups))


def _explained(
    places: Sequence[Place], found: Sequence[Found], effort: Effort, tokens: int
) -> Iterator[str]:
    prompts = sorted({place.auto.prompts for place in places})
    tuning = sorted({one.prompts for one in found})
    searched = sorted({one.configurations for one in found})
    yield (
        f"Milliseconds per token after a text's first, over all tokens of {_range(prompts)} texts "
        f"of up to {tokens} tokens; prompts whose greedy text repeats itself are left out. `auto` "
        "has its default options."
    )
    yield ""
    screened = min(effort.few, *tuning)
    finalists = "the best" if effort.finalists == 1 else f"the best {effort.finalists}"
    names = list(dict.fromkeys(one.strategy for one in found))
    yield (
        f"The others are {', '.join(names)}, on two models each. *Untuned*: with their defaults. "
        f"*Tuned*: with the best of {_range(searched)} configurations, searched for every profile, "
        f"temperature and draft on {screened} of {_range(tuning)} other prompts; "
        f"{finalists} and the defaults then ran all of these. Of the others, the "
        "two fastest on those prompts are measured, before and after tuning, and the faster of "
        "them is shown."
    )
    yield ""
    yield (
        f"The search is short: {_range(searched)} configurations per system and place, each on "
        f"{screened} of the tuning prompts; a longer one may find faster options. `auto` is not "
        "searched here, but its rules and the defaults of `delay` and `alternative` were chosen "
        "on the tuning prompts ([constants](../archive/auto-constants.md))."
    )
    yield ""
    yield (
        "*Tuned over auto*: ratio of the means. *By prompt*: median over prompts of the tuned "
        "system's time over `auto`'s, with its 95% interval by order statistics. Of `auto`: *hit "
        "rate*, the share of the target's choices that were in the tree; *rows per token*, that "
        "each stage computed; *draft passes per token*."
    )
    yield ""
    yield (
        "*Clairvoyant*: a scheduler that knows the target's text, drafts along nothing else and "
        "sends nothing else, with the same drafter, costs and simulator "
        f"(`ops/bench/clairvoyant.py`). A token must be among the drafter's {WIDTH} best "
        "candidates, as many as any system asks for; behind one that is not, it waits for the "
        "target. It is a bound only up to how it cuts segments and how many are in flight: a few "
        "of these options are searched, and the fastest run of every text counts. With a draft "
        "head, a candidate may also be missing here that another order of passes finds, as its "
        "proposals depend on what the target had answered when it drafted."
    )


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _cells(place: Place) -> list[str]:
    auto = place.auto
    tuned = place.best_tuned
    decoded = auto.tokens - auto.prompts
    mean = auto.tbt["mean"]
    return [
        f"{place.profile}, {place.stages}",
        f"{place.temperature:g}",
        place.draft,
        _milliseconds(_mean(place.rows[BASELINE])),
        _named(place.best_untuned),
        _named(tuned),
        _milliseconds(mean),
        f"{_mean(tuned) / mean:.2f}",
        _by_prompt(tuned, auto),
        f"{auto.hit_rate:.2f}",
        f"{sum(auto.rows.values()) / decoded / auto.stages:.1f}",
        f"{auto.draft_passes_per_token:.2f}",
        _milliseconds(place.bound),
        f"{mean / place.bound:.2f}",
    ]


def _best_cells(places: Sequence[Place]) -> list[str]:
    """The places of one profile and temperature, a draft each."""
    tuned = min(places, key=lambda place: _mean(place.best_tuned))
    auto = min(places, key=lambda place: _mean(place.auto))
    return [
        auto.profile,
        f"{auto.temperature:g}",
        f"{tuned.draft}, {_named(tuned.best_tuned)}",
        f"{auto.draft}: {_milliseconds(_mean(auto.auto))}",
        f"{_mean(tuned.best_tuned) / _mean(auto.auto):.2f}",
        _by_prompt(tuned.best_tuned, auto.auto),
    ]


def _by_prompt(tuned: ReportRow, auto: ReportRow) -> str:
    """The median over prompts of the one's time per token over the other's, with its interval."""
    ratios = [auto.speeds[at] / speed for at, speed in tuned.speeds.items() if at in auto.speeds]
    return estimate_text(Estimate.of(ratios))


def _fastest(rows: Iterable[ReportRow]) -> ReportRow:
    return min(rows, key=_mean)


def _mean(row: ReportRow) -> float:
    return row.tbt["mean"]


def _named(row: ReportRow) -> str:
    return f"{row.strategy}: {_milliseconds(_mean(row))}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds >= 0.01 else f"{seconds * 1e3:.2f}"
