"""Reports of comparisons: rows of measurements and a header, as JSON and as Markdown.

Two files can be compared if their models, prompts, profile and machine are the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flowspec.errors import ConfigError
from flowspec.rehearse.compare.naming import counted
from flowspec.rehearse.compare.simulate import Ran
from flowspec.strategies.auto.decisions import tokens_by_drafter

#: Marks a file as a report.
KIND = "flowspec bench"
#: Largest probability outside a 95% interval on either side.
_TAIL = 0.025
_FATES = ("useful", "wasted", "void")
#: Header entries that two compared runs must share, and their names in an error.
_SAME = {
    "how": "kind of run",
    "target": "target",
    "drafts": "draft models",
    "prompts": "prompts",
    "tokens": "tokens",
    "seed": "seed",
    "profile": "profile",
    "machine": "machine",
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over prompts; from six prompts on, with its 95% interval by order statistics."""

    median: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """The estimate from ``values``; None if there are none.

        The interval's ends are the values that enclose the median with at least 95%, for any
        distribution: P(Binomial(n, 1/2) < rank) <= 2.5%.
        """
        if not values:
            return None
        ordered = sorted(values)
        count = len(values)
        below = 0.0
        rank = 0
        while (below := below + math.comb(count, rank) / 2**count) <= _TAIL:
            rank += 1
        median = float(np.median(ordered))
        return cls(median, ordered[rank - 1], ordered[count - rank]) if rank else cls(median)


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One strategy with one draft source, stage count and temperature, over all prompts.

    ``source`` is "-" if nothing is drafted. Times are simulated seconds, over the tokens after
    each prompt's first. ``tbt``: mean, p50 and p99 over all tokens; of tokens committed together,
    all but the first have a time of 0. ``rows``: by fate, summed over stages. ``stage_busy``: by
    stage. ``speeds``: tokens/s by prompt number. ``speedup``, ``speedups``: over the baseline on
    the same prompt. ``drafts``: if the strategy chose among several, the number of tokens after
    each prompt's first for which each one was used.
    """

    strategy: str
    source: str
    stages: int
    temperature: float
    swept: str
    latency_ms: float
    mbit: float
    prompts: int
    tokens: int
    tbt: Mapping[str, float]
    tokens_per_second: Estimate | None
    ttft_seconds: float
    tokens_per_step: float
    tokens_per_round: float
    hit_rate: float
    stage_busy: tuple[float, ...]
    rows: Mapping[str, int]
    draft_passes_per_token: float
    draft_seconds_per_token: float
    repeated_4grams: float
    speeds: Mapping[int, float]
    speedup: Estimate | None = None
    speedups: Mapping[int, float] | None = None
    drafts: Mapping[str, int] = field(default_factory=dict)


def gaps(ran: Ran) -> list[float]:
    """Seconds from each token to the next, beginning with the first commit's first token."""
    found: list[float] = []
    before = ran.committed_at[0][0]
    counted = 0
    for when, count in ran.committed_at:
        found += [when - before] + [0.0] * (count - counted - 1)
        before = when
        counted = count
    return found[1:]


def measured(runs: Mapping[int, Ran], drafts: Sequence[str]) -> dict[str, Any]:
    """A row's fields from its runs by prompt; ``drafts``: the choices of its draft source."""
    stats = {at: ran.stats for at, ran in runs.items()}
    used = sum((Counter(tokens_by_drafter(one)) for one in stats.values()), Counter[int]())
    waits = [wait for ran in runs.values() for wait in gaps(ran)]
    tokens = len(waits)
    speeds = {at: one["tokens_per_second"] for at, one in stats.items() if one["tokens_per_second"]}
    decode = sum(one["decode_seconds"] for one in stats.values())

    def total(name: str) -> float:
        return sum(one[name] or 0 for one in stats.values())

    busy = [[share or 0.0 for share in one["stage_busy"]] for one in stats.values()]
    weights = [one["decode_seconds"] / decode for one in stats.values()]
    p50, p99 = np.percentile(waits, [50, 99])
    return {
        "prompts": len(runs),
        "tokens": int(total("tokens")),
        "tbt": {"mean": float(np.mean(waits)), "p50": float(p50), "p99": float(p99)},
        "tokens_per_second": Estimate.of(list(speeds.values())),
        "ttft_seconds": float(np.median([one["ttft_seconds"] for one in stats.values()])),
        "tokens_per_step": tokens / total("steps"),
        "tokens_per_round": tokens / total("rounds"),
        "hit_rate": sum((one["hit_rate"] or 0) * (one["tokens"] - 1) for one in stats.values())
        / tokens,
        "stage_busy": tuple(float(share) for share in np.average(busy, axis=0, weights=weights)),
        "rows": {fate: sum(one["rows"][fate] for one in stats.values()) for fate in _FATES},
        "draft_passes_per_token": total("draft_passes") / tokens,
        "draft_seconds_per_token": total("draft_seconds") / tokens,
        "repeated_4grams": total("repeated_4grams") / len(stats),
        "speeds": speeds,
        "drafts": {name: used[number] for number, name in enumerate(drafts)} if used else {},
    }


@dataclass(frozen=True, slots=True)
class BenchReport:
    """``header``: the models, inputs and machine of the runs; ``rows``: their measurements."""

    header: Mapping[str, Any]
    rows: tuple[ReportRow, ...]

    def text(self) -> str:
        """The report as JSON."""
        return (
            json.dumps(
                {
                    "kind": KIND,
                    **self.header,
                    "rows": [dataclasses.asdict(row) for row in self.rows],
                }
            )
            + "\n"
        )

    @classmethod
    def load(cls, file: Path) -> BenchReport:
        """Read a report; ConfigError if ``file`` cannot be read or is not one."""
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content.pop("kind") != KIND:
                raise ValueError("it is of another kind")
            return cls(content, tuple(_row_of(row) for row in content.pop("rows")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file} is no file written by `flowspec bench --out`: {error}"
            ) from None


def _row_of(row: dict[str, Any]) -> ReportRow:
    for name in ("tokens_per_second", "speedup"):
        row[name] = Estimate(**row[name]) if row[name] is not None else None
    for name in ("speeds", "speedups"):
        row[name] = (
            {int(at): speed for at, speed in row[name].items()} if row[name] is not None else None
        )
    return ReportRow(**{**row, "stage_busy": tuple(row["stage_busy"])})


_COLUMNS: dict[str, Callable[[ReportRow], str]] = {
    "strategy": lambda row: row.strategy,
    "draft": lambda row: row.source,
    "stages": lambda row: str(row.stages),
    "T": lambda row: f"{row.temperature:g}",
    "link": lambda row: f"{row.latency_ms:g} ms, {row.mbit:g} Mbit/s",
    "tokens/s (95%)": lambda row: estimate_text(row.tokens_per_second),
    "speedup (95%)": lambda row: estimate_text(row.speedup),
    "TBT mean / p50 / p99, ms": lambda row: " / ".join(
        f"{row.tbt[key] * 1e3:.1f}" for key in ("mean", "p50", "p99")
    ),
    "TTFT, s": lambda row: f"{row.ttft_seconds:.2f}",
    "tokens per step / round": lambda row: (
        f"{row.tokens_per_step:.2f} / {row.tokens_per_round:.2f}"
    ),
    "hit rate": lambda row: f"{row.hit_rate:.2f}",
    "stage busy": lambda row: f"{min(row.stage_busy):.0%} to {max(row.stage_busy):.0%}",
    "rows per token and stage, useful / wasted / void": lambda row: " / ".join(
        f"{row.rows[fate] / (row.tokens - row.prompts) / row.stages:.1f}" for fate in _FATES
    ),
    "draft passes, ms per token": lambda row: (
        f"{row.draft_passes_per_token:.2f}, {row.draft_seconds_per_token * 1e3:.1f}"
    ),
    "repeated 4-grams": lambda row: f"{row.repeated_4grams:.0%}",
}


def markdown(report: BenchReport, notes: Sequence[str] = ()) -> str:
    """The header in a few lines and one table; ``notes``: lines below it."""
    head = report.header
    profile = head["profile"]
    prompts = head["prompts"]
    loops = f"{prompts['loops']} of them with loops"
    lines = [
        f"## {profile['name']}, {head['how']}",
        "",
        f"{profile['summary']}. Source: {profile['source']}. "
        f"{sentence(profile['way'])} All times are {head['how']}, none was measured on such a "
        f"machine; acceptance is that of {profile['models']}.",
        "",
        f"{counted(prompts['count'], 'prompt')} ({prompts['half']}; {loops}, "
        f"{'left out' if prompts['no_loops'] else 'kept'}), {head['tokens']} tokens each, "
        f"seed {head['seed']}; speedup over {head['baseline']}; medians over prompts with 95% "
        "intervals by order statistics (none below six prompts), all else over all tokens.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
        *(f"| {' | '.join(show(row) for show in _COLUMNS.values())} |" for row in report.rows),
        "",
        *_footnote(report.rows),
        *notes,
        f"`{head['command']}`, version {head['version']}, on {head['machine']['line']}.",
    ]
    return "\n".join(lines) + "\n"


def sentence(text: str) -> str:
    """``text`` with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def described(row: ReportRow) -> list[tuple[str, str]]:
    """A row as names and values."""
    speed = row.tokens_per_second
    absent = " (95%)" if speed is None or speed.low is None else ""
    shown = [(name.removesuffix(absent), show(row)) for name, show in _COLUMNS.items()]
    return [*shown, ("tokens by draft", _drafts(row))] if row.drafts else shown


def _footnote(rows: Sequence[ReportRow]) -> list[str]:
    """The drafts used by rows that had several to choose from; no lines without such rows."""
    said = [
        f"- {row.strategy} with {row.source} on {row.stages} stages, T {row.temperature:g}, "
        f"{_COLUMNS['link'](row)}: {_drafts(row)}"
        for row in rows
        if row.drafts
    ]
    return ["Tokens after each prompt's first by the draft used:", "", *said, ""] if said else []


def _drafts(row: ReportRow) -> str:
    return ", ".join(f"{name} {tokens}" for name, tokens in row.drafts.items())


def estimate_text(value: Estimate | None) -> str:
    """The median with its interval in brackets; "-" if there is none."""
    if value is None:
        return "-"
    return f"{value.median:.2f}" + (
        f" ({value.low:.2f} to {value.high:.2f})" if value.low is not None else ""
    )


def compare(old: Path, new: Path) -> str:
    """The changes from ``old`` to ``new`` as Markdown; ConfigError if they are not comparable."""
    reports = BenchReport.load(old), BenchReport.load(new)
    was, now = (report.header for report in reports)
    for name, called in _SAME.items():
        one = was.get(name)
        other = now.get(name)
        if _identity(one, other) != _identity(other, one):
            raise ConfigError(
                f"{old} and {new} differ in {called}: {_short(one)} and {_short(other)}; "
                "only runs of the same models, prompts, profile and machine can be compared"
            )
    before, after = ({_key(row): row for row in report.rows} for report in reports)
    lines = [
        f"{was['profile']['name']}, {was['how']}: version {was['version']} to {now['version']}",
        "",
        "| strategy | draft | stages | T | link | tokens/s, old | new | new over old (95%) |",
        "|---" * 8 + "|",
    ]
    for key in dict.fromkeys((*before, *after)):
        pair = [rows[key] for rows in (before, after) if key in rows]
        ratios = [
            pair[-1].speeds[at] / speed
            for at, speed in pair[0].speeds.items()
            if at in pair[-1].speeds
        ]
        speeds = [
            estimate_text(rows[key].tokens_per_second if key in rows else None)
            for rows in (before, after)
        ]
        change = estimate_text(Estimate.of(ratios) if len(pair) == 2 else None)
        cell = [show(pair[0]) for show in list(_COLUMNS.values())[:5]]
        lines.append(f"| {' | '.join([*cell, *speeds, change])} |")
    return "\n".join(lines) + "\n"


def _key(row: ReportRow) -> tuple[object, ...]:
    return (
        row.strategy,
        row.source,
        row.stages,
        row.temperature,
        row.swept,
        row.latency_ms,
        row.mbit,
    )


def _identity(value: object, other: object) -> object:
    """The part of a header entry that must be equal: its digest, or its keys that both have."""
    if not isinstance(value, dict) or not isinstance(other, dict):
        return value
    return (
        value["digest"]
        if "digest" in value
        else {key: value[key] for key in sorted(value.keys() & other.keys())}
    )


def _short(value: object) -> str:
    """A header entry in a few words."""
    if isinstance(value, dict):
        return " ".join(
            f"{key} {value[key]}"
            for key in ("name", "way", "count", "line", "digest")
            if key in value
        ) or str(value)
    return str(value)
